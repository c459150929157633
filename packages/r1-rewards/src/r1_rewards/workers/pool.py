"""Score batches in worker processes that can be killed, so that no response and no reward function stops a run."""

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from r1_rewards.spec import parse_spec
from r1_rewards.types import (
    Cause,
    Failure,
    FailurePolicy,
    FailureRule,
    OpenVerifier,
    Outcome,
    RewardInput,
    RewardSpecError,
    Score,
    check_inputs,
)
from r1_rewards.workers.batch import Batch, Durations, score_whole
from r1_rewards.workers.frames import WireSample, check_json, encode_picture
from r1_rewards.workers.process import GARBLED, ForkServer, Worker, WorkerClosed, WorkerCrash

BATCH_SECONDS_PER_SAMPLE = 1.0  # what a batch call gets on top of the timeout
MAX_CHARACTERS = 10_000_000  # of a response

logger = logging.getLogger("r1_rewards")


@dataclass(frozen=True, slots=True)
class Reward:
    name: str
    batch: bool
    shape: str = "builtin"  # how it is called, see arguments.py
    wants: tuple[str, ...] = ()  # what it asks for by its parameters' names


class PooledVerifier(OpenVerifier):
    """A verifier that runs a reward in worker processes; no response or user's function makes it raise.

    Workers see no GPU and are killed with everything they started. Calls may come from any thread and are serialized.

    Built-in and sequential rewards are scored sample by sample, each within `timeout` seconds (see `batch`). A batch
    function scores the whole batch in one call, because its scores may depend on one another, within `timeout` plus one
    second per sample. If that call fails as a whole, every sample is scored again alone.

    A sample that fails alone has `Score.error`; the README lists the causes. `crash` also means a worker that cannot be
    started, and after SIGKILL or SIGTERM the sample is first retried alone. `failure_policy` "score" gives such a
    sample `failure_score`; "drop" also sets `Score.keep` to False and leaves `parts` empty; "stop" raises
    RewardFailure. `failures` counts causes.
    """

    def __init__(
        self,
        spec: str,
        kwargs: Mapping[str, object] | None = None,
        *,
        timeout: float = 30.0,
        failure_score: float = 0.0,
        failure_policy: FailurePolicy = "score",
        workers: int = 1,
        memory_mib: int | None = 4096,
    ) -> None:
        """Load the reward in a new process; workers start when needed.

        `timeout` is in seconds per sample; `memory_mib` limits a worker's memory beyond what loading took. Raises
        RewardSpecError if the reward cannot be loaded, ValueError for numbers out of range, TypeError for `kwargs` that
        are not JSON values.
        """
        if workers < 1 or timeout <= 0:
            raise ValueError(f"workers must be at least 1 and timeout positive, got {workers} and {timeout}")
        if memory_mib is not None and memory_mib < 1:
            raise ValueError(f"memory_mib must be positive, or None for no limit, got {memory_mib}")
        self._rule = FailureRule(failure_policy, failure_score)
        parsed = parse_spec(spec)
        check_json(kwargs or {}, "reward_function_kwargs")
        self.spec = spec
        self.timeout = timeout
        self.failures: Counter[Cause] = Counter()
        self._workers = workers
        self._lock = threading.Lock()
        self._closed = False
        self._warned: set[str] = set()
        self._idle: list[Worker] = []
        self._durations = Durations(timeout)
        setup = {"function": parsed.function, "path": str(parsed.path or ""), "kwargs": dict(kwargs or {})}
        self._server = ForkServer("r1_rewards.workers.worker", "reward", {**setup, "memory_mib": memory_mib})
        try:
            reply = self._server.load()
            self.reward = Reward(reply["name"], reply["batch"], reply["shape"], tuple(reply["wants"]))
        except WorkerCrash as error:
            raise RewardSpecError(f"reward {spec!r}: {error}") from error
        except KeyError as error:
            self.close()
            raise RewardSpecError(GARBLED.format("reward")) from error

    def __call__(
        self, inputs: Sequence[RewardInput], progress: Callable[[int, int], None] | None = None
    ) -> list[Score]:
        """`progress(done, total)` is called for each input.

        Raises RuntimeError if closed, TypeError for inputs that are not `RewardInput`s or metadata that is not JSON,
        RewardFailure under the policy "stop".
        """
        scores: dict[int, Score] = {}
        for done, (index, score) in enumerate(self.stream(inputs), 1):
            scores[index] = score
            if progress is not None:
                progress(done, len(inputs))
        return [scores[index] for index in range(len(scores))]

    def stream(self, inputs: Sequence[RewardInput]) -> Iterator[tuple[int, Score]]:
        """Yield (index, score) in the order of completion. Raises as a call does.

        Other calls wait until the iterator is exhausted or closed.
        """
        check_inputs(inputs)
        pictures: dict[int, dict[str, str]] | None = {} if "images" in self.reward.wants else None
        samples = {index: to_wire(index, item, pictures) for index, item in enumerate(inputs)}
        with self._lock:
            if self._closed and samples:
                raise RuntimeError(f"the verifier {self.spec!r} is closed")
            try:
                for index, outcome in self._outcomes(samples):
                    if isinstance(outcome, Failure):
                        self.failures[outcome.cause] += 1
                    yield index, self._rule.apply(self.spec, index, outcome)
            except WorkerClosed as error:
                raise RuntimeError(f"the verifier {self.spec!r} was closed while scoring") from error

    @property
    def per_sample(self) -> bool:
        return not self.reward.batch

    def pids(self) -> list[int]:
        return self._server.pids()

    def close(self) -> None:
        """Kill the workers, also while they score, from any thread."""
        self._closed = True
        self._server.close()
        with self._lock:
            self._server.dispose()

    def _outcomes(self, samples: dict[int, WireSample]) -> Iterator[tuple[int, Outcome]]:
        for index, sample in list(samples.items()):
            if (length := len(sample["response"])) > MAX_CHARACTERS:
                del samples[index]
                yield index, Failure("too_long", f"{length} characters, more than {MAX_CHARACTERS}")
        if self.reward.batch and len(samples) > 1:
            outcomes = self._score_whole(list(samples.values()))
            if outcomes is not None:
                yield from zip(samples, outcomes, strict=True)
                return
        for index, outcome in Batch(self._server, self._idle, samples, self._durations, self._workers).outcomes():
            if self._closed:
                raise WorkerClosed
            yield index, outcome

    def _score_whole(self, samples: list[WireSample]) -> list[Outcome] | None:
        """Score all samples in one call; None, with a warning, if it failed as a whole.

        Retries once if the worker is killed from outside.
        """
        found = self._call_whole(samples) or self._call_whole(samples, last=True)
        assert found is not None
        if not isinstance(found, Failure):
            return found
        if found.cause not in self._warned:
            self._warned.add(found.cause)
            logger.warning(
                "reward %s: the call for a batch of %d failed (%s: %s); each response is now scored alone. "
                "Further failures of this kind are not reported.", self.spec, len(samples), found.cause, found.message,
            )  # fmt: skip
        return None

    def _call_whole(self, samples: list[WireSample], *, last: bool = False) -> list[Outcome] | Failure | None:
        timeout = self.timeout + BATCH_SECONDS_PER_SAMPLE * len(samples)
        found: list[Outcome] | Failure
        worker = None
        try:
            worker = self._idle.pop() if self._idle else self._server.start()
            found = score_whole(worker, samples, timeout, timeout * (os.cpu_count() or 1))
            self._idle.append(worker)
        except (WorkerCrash, RewardSpecError) as error:
            found = Failure("crash", str(error))
        except (EOFError, OSError, ValueError) as error:
            assert worker is not None
            end = self._server.reap(worker)
            if self._closed:
                raise WorkerClosed from error
            if isinstance(error, TimeoutError):
                found = Failure("timeout", f"no result after {timeout:g} s")
            elif end.from_outside and not last:
                return None
            else:
                found = Failure(end.cause, str(end))
        except BaseException:
            if worker is not None:
                self._server.reap(worker)
            raise
        return found


def to_wire(index: int, item: RewardInput, pictures: dict[int, dict[str, str]] | None) -> WireSample:
    check_json(item.metadata, f"metadata of response {index}")
    return {
        "response": item.response,
        "response_length": item.response_length,
        "ground_truth": item.ground_truth,
        "prompt": item.prompt,
        "metadata": dict(item.metadata),
        "messages": list(item.messages),
        "images": [] if pictures is None else [encode_picture(picture, pictures) for picture in item.images],
        "step": item.step,
        "source": item.source,
    }
