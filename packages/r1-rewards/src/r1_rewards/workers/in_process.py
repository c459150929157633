"""Score with a function of this process, for functions that no worker process can be given."""

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context

from r1_rewards.types import (
    Failure,
    FailurePolicy,
    FailureRule,
    OpenVerifier,
    Outcome,
    RewardInput,
    Score,
    check_inputs,
)
from r1_rewards.workers.frames import WireSample, check_json
from r1_rewards.workers.functions import read_function, score_samples
from r1_rewards.workers.pool import BATCH_SECONDS_PER_SAMPLE, Reward, to_wire


class InProcessVerifier(OpenVerifier):
    """A verifier that calls a function in a thread of this process: a closure, a lambda, a method, an object.

    An exception, a wrong shape or a time limit costs one sample, as in `PooledVerifier`. A function that is over its
    limit cannot be ended: it goes on in its thread. A crash or an exit ends this process. Calls are serialized.
    """

    def __init__(
        self,
        function: Callable[..., object],
        kwargs: Mapping[str, object] | None = None,
        *,
        timeout: float = 30.0,
        failure_score: float = 0.0,
        failure_policy: FailurePolicy = "score",
    ) -> None:
        """`timeout` is in seconds per sample. Raises RewardSpecError if the function cannot be called as a reward."""
        check_json(kwargs or {}, "reward_function_kwargs")
        name = getattr(function, "__name__", type(function).__name__)
        names = getattr(inspect.unwrap(function), "__globals__", {})
        self._function = read_function(
            function, kwargs or {}, names, name=name, where=f"reward function {name}", file=None
        )
        read = self._function
        self.reward = Reward(read.name, read.batch, read.shape, read.wants)
        self.timeout, self._rule, self._lock = timeout, FailureRule(failure_policy, failure_score), threading.Lock()

    @property
    def per_sample(self) -> bool:
        return not self.reward.batch

    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score]:
        check_inputs(inputs)
        pictures: dict[int, dict[str, str]] | None = {} if "images" in self.reward.wants else None
        samples = [to_wire(index, item, pictures) for index, item in enumerate(inputs)]
        with self._lock:
            outcomes = self._call(samples) if self.reward.batch and len(samples) > 1 else None
            if not isinstance(outcomes, list):
                outcomes = [self._score_alone(sample) for sample in samples]
        return [self._rule.apply(self.reward.name, index, outcome) for index, outcome in enumerate(outcomes)]

    def _score_alone(self, sample: WireSample) -> Outcome:
        found = self._call([sample])
        return found if isinstance(found, Failure) else found[0]

    def _call(self, samples: Sequence[WireSample]) -> list[Outcome] | Failure:
        """Call in a thread of its own, in which no event loop runs, and which no signal of the main thread ends."""
        found: list[list[Outcome] | Failure] = []
        context = copy_context()
        thread = threading.Thread(
            target=lambda: found.append(context.run(score_samples, self._function, samples)), daemon=True
        )
        thread.start()
        timeout = self.timeout + (BATCH_SECONDS_PER_SAMPLE * len(samples) if len(samples) > 1 else 0)
        thread.join(timeout)
        return found[0] if found else Failure("timeout", f"no result after {timeout:g} s")
