"""Score batches in worker processes that can be killed, so that no answer and no reward function stops a run."""

import json
import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from r1_rewards.frames import Outcome
from r1_rewards.process import Reward, WorkerClosed, WorkerCrash, WorkerProcess
from r1_rewards.spec import RewardSpecError, parse_spec
from r1_rewards.types import Failure, RewardInput, Score

BATCH_SECONDS_PER_SAMPLE = 1.0  # what a batch call gets on top of the timeout
TIMEOUTS_IN_A_ROW = 3

Result = TypeVar("Result")

logger = logging.getLogger("r1_rewards")


class PooledVerifier:
    """A verifier that runs a reward in worker processes; it never raises because of an answer or a user's function.

    A worker imports the reward itself: user code never runs in the caller's process, sees no GPU, and is killed with
    all its child processes at a deadline. Scores come in the order of the inputs. Calls from several threads wait for
    one another.

    Built-in and sequential rewards are scored one sample at a time, spread over the workers, each within `timeout`.
    A batch function gets the whole batch in one call, because its scores may depend on one another, and `timeout`
    plus one second per sample for it. If that call raises, runs out of time, crashes, or does not return one score per
    answer, every sample is scored again alone, as a batch of one; what succeeds alone stands.

    A sample that fails alone gets `Score(failure_score, {"overall": failure_score}, Failure(cause, message))`:

    - timeout: no result in time; the worker was killed and is started again;
    - exception: the function raised (`sys.exit` included); the message has type, text and line;
    - crash: the worker died (`os._exit`, a segmentation fault, out of memory) or cannot be started again;
    - non_finite: a NaN or infinite score;
    - wrong_shape: not a number, a mapping without `overall`, or not one score.

    A score of the last two kinds within a batch call that is otherwise fine fails its own sample only. After as many
    samples alone in a row have timed out as there are workers, and at least three, the rest of the batch fails as
    timeouts at once, so that a function that never returns does not cost `timeout` for each sample. Samples are taken
    in a fixed shuffled order, so that one prompt whose answers all hang does not look like that.
    """

    def __init__(
        self,
        spec: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float = 30.0,
        failure_score: float = 0.0,
        workers: int = 1,
    ) -> None:
        """Start one worker and load the reward in it; the others start when needed.

        `timeout` is in seconds per sample. Raises RewardSpecError if the reward cannot be loaded, ValueError for
        numbers out of range, TypeError for `kwargs` that are not JSON values.
        """
        if workers < 1 or timeout <= 0:
            raise ValueError(f"workers must be at least 1 and timeout positive, got {workers} and {timeout}")
        parsed = parse_spec(spec)
        _check_json(kwargs or {}, "reward_function_kwargs")
        self.spec = spec
        self.timeout = timeout
        self.failure_score = failure_score
        self._lock = threading.Lock()
        self._closed = False
        self._warned: set[str] = set()
        self._workers = [WorkerProcess(parsed, kwargs or {}) for _ in range(workers)]
        # Its threads start the workers and live until `close`: see WorkerProcess.
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="r1-reward")
        try:
            self.reward: Reward = self._threads.submit(self._workers[0].start).result()
        except WorkerCrash as error:
            self.close()
            raise RewardSpecError(f"reward {spec!r}: {error}") from error
        except BaseException:
            self.close()
            raise

    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score]:
        """Return one score per input, in order.

        Raises RuntimeError if closed, TypeError for metadata that is not JSON.
        """
        samples = [_wire(index, item) for index, item in enumerate(inputs)]
        if not samples:
            return []
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the verifier {self.spec!r} is closed")
            try:
                outcomes = self._score_batch(samples) if self.reward.batch and len(samples) > 1 else None
                if outcomes is None:
                    outcomes = self._score_alone(samples)
            except WorkerClosed as error:
                raise RuntimeError(f"the verifier {self.spec!r} was closed while scoring") from error
        return [self._score(outcome) for outcome in outcomes]

    def close(self) -> None:
        """Kill the workers, also while they score; safe to call twice and from any thread."""
        self._closed = True
        for worker in self._workers:
            worker.kill(close=True)
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.stop()

    def __enter__(self) -> "PooledVerifier":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _score_batch(self, samples: list[dict[str, Any]]) -> list[Outcome] | None:
        """Score all samples in one call; None, with a warning, if the call as a whole failed."""
        timeout = self.timeout + BATCH_SECONDS_PER_SAMPLE * len(samples)
        try:
            [answer] = self._run([lambda: self._workers[0].ask(samples, timeout)])
        except TimeoutError:
            answer = {"failure": ["timeout", f"no result after {timeout:g} s"]}
        except (WorkerCrash, RewardSpecError) as error:
            answer = {"failure": ["crash", str(error)]}
        if isinstance(answer, list):
            return answer
        cause, message = answer["failure"]
        if cause not in self._warned:
            self._warned.add(cause)
            logger.warning(
                "reward %s: the call for a batch of %d failed (%s: %s); each answer is now scored alone. "
                "Further failures of this kind are not reported.", self.spec, len(samples), cause, message,
            )  # fmt: skip
        return None

    def _score_alone(self, samples: list[dict[str, Any]]) -> list[Outcome]:
        """Score the samples one by one on all workers."""
        queue = _Queue(samples, self.timeout, patience=max(TIMEOUTS_IN_A_ROW, len(self._workers)))
        workers = self._workers[: len(samples)]
        self._run([partial(queue.work, worker) for worker in workers], on_interrupt=queue.stop)
        return queue.outcomes

    def _run(self, jobs: list[Callable[[], Result]], on_interrupt: Callable[[], None] | None = None) -> list[Result]:
        """Run the jobs on the pool's threads; on Ctrl-C kill what they wait for, so that no thread stays behind."""
        futures = [self._threads.submit(job) for job in jobs]
        try:
            wait(futures)
        except BaseException:
            if on_interrupt is not None:
                on_interrupt()
            while wait(futures, timeout=0.1).not_done:
                for worker in self._workers:
                    worker.kill()
            raise
        return [future.result() for future in futures]

    def _score(self, outcome: Outcome) -> Score:
        if "parts" in outcome:
            return Score(outcome["parts"]["overall"], outcome["parts"])
        return Score(self.failure_score, {"overall": self.failure_score}, Failure(*outcome["failure"]))


class _Queue:
    """Samples that the pool's threads take one by one, and what became of them."""

    def __init__(self, samples: list[dict[str, Any]], timeout: float, patience: int) -> None:
        self.outcomes: list[Outcome] = [{} for _ in samples]
        self._samples = samples
        self._timeout = timeout
        self._patience = patience
        self._lock = threading.Lock()
        self._waiting = list(range(len(samples)))
        random.Random(0).shuffle(self._waiting)
        self._timeouts_in_a_row = 0

    def work(self, worker: WorkerProcess) -> None:
        """Score samples on `worker` until none is left."""
        while (index := self._next()) is not None:
            try:
                answer = worker.ask([self._samples[index]], self._timeout)
            except TimeoutError:
                self.outcomes[index] = {"failure": ["timeout", f"no score after {self._timeout:g} s"]}
                self._count_timeout()
                continue
            except WorkerCrash as error:
                answer = {"failure": ["crash", str(error)]}
            except RewardSpecError as error:  # the file loaded once, and no longer does
                answer = {"failure": ["crash", f"the reward cannot be loaded again: {error}"]}
                self._fail_waiting(answer)
            with self._lock:
                self._timeouts_in_a_row = 0
            self.outcomes[index] = answer[0] if isinstance(answer, list) else answer

    def stop(self) -> None:
        """Hand out no further sample."""
        with self._lock:
            self._waiting.clear()

    def _next(self) -> int | None:
        with self._lock:
            return self._waiting.pop() if self._waiting else None

    def _count_timeout(self) -> None:
        with self._lock:
            self._timeouts_in_a_row += 1
            hopeless = self._timeouts_in_a_row >= self._patience
        if hopeless:
            message = f"not tried: the {self._patience} answers before it each took longer than {self._timeout:g} s"
            self._fail_waiting({"failure": ["timeout", message]})

    def _fail_waiting(self, outcome: Outcome) -> None:
        with self._lock:
            for index in self._waiting:
                self.outcomes[index] = outcome
            self._waiting.clear()


def _wire(index: int, item: RewardInput) -> dict[str, Any]:
    """Return `item` as a worker reads it."""
    _check_json(item.metadata, f"metadata of answer {index}")
    return {
        "response": item.response,
        "response_length": item.response_length,
        "ground_truth": item.ground_truth,
        "prompt": item.prompt,
        "metadata": dict(item.metadata),
    }


def _check_json(values: Mapping[str, Any], what: str) -> None:
    for key, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{what}: {key!r} is {type(value).__name__}, which is not a JSON value: {error}") from error
