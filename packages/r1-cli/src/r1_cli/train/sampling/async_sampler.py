"""Sample later steps while the learner computes, with weights that are a fixed number of steps old.

Version max(f, s − k) samples step s (from 0), where f is this process's first step, independent of timing. A checkpoint
after step s holds the groups of steps s to s + k − 1, because their weights are gone; it is complete when they are
sampled.
"""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from r1_cli.runs.track.timing import Record, Stopwatch
from r1_cli.train.groups.stream_position import load_groups, load_stream, save_groups, save_stream
from r1_cli.train.sampling.collect import DynamicSampling
from r1_cli.train.sampling.weight_check import CheckedGenerator, canary_metrics
from r1_cli.train.types import Collected, Position
from r1_data.types import Prompt
from r1_rollout.lora import Adapter
from r1_rollout.types import Generator
from r1_rollout.weights import LocalWeights, WeightSource

STATE_FILE = "position.json"

Wake = Callable[[], AbstractContextManager[None]]  # activates the engine with certain weights


class AsyncSampler:
    """Samples in a thread, with an engine that has its own devices or process."""

    def __init__(
        self,
        collector: DynamicSampling,
        engine: Generator,
        *,
        staleness: int,
        total_steps: int,
        resumed: Sequence[Collected] = (),
        ended: Record | None = None,
    ) -> None:
        """Prepare the thread.

        Args:
            staleness: k, steps between the weights that sample a step's groups and those that train on them.
            total_steps: steps of the run.
            resumed: a checkpoint's groups of the first steps.
            ended: called with name, begin and end of each stage.
        """
        self._collector, self._engine = collector, engine
        self._staleness, self._total_steps, self._ended = staleness, total_steps, ended
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="r1-sampling")
        self._steps: deque[Future[Collected]] = deque(map(_done, resumed))  # pending steps, in order

    def collect(self, at: Position, source: WeightSource, watch: Stopwatch) -> Collected:
        """Start to sample later steps with the weights of step `at`; return this step's groups.

        Raises what sampling has raised; the next call samples them again.
        """
        begun = at.step + len(self._steps)
        wanted = range(begun, min(at.step + self._staleness + 1, self._total_steps))
        if wanted:
            with watch("sync"):
                wake = self._wake(snapshot(source))
            for step in wanted:
                before = self._steps[-1] if self._steps else None
                self._steps.append(self._thread.submit(self._sample, replace(at, step=step), before, wake))
        with watch("wait"):
            collected = self._steps[0].result()
        self._steps.popleft()
        return collected

    def drain(self) -> list[Collected]:
        """Wait for all pending steps; return their groups. Raises what sampling them raised."""
        return [step.result() for step in self._steps]

    def pending(self) -> list[Future[Collected]]:
        return list(self._steps)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _wake(self, source: WeightSource) -> Wake:
        if isinstance(self._engine, CheckedGenerator):  # while the learner has these weights
            return partial(self._engine.active_later, source, self._engine.expect(source))
        return partial(self._engine.active, source)

    def _sample(self, at: Position, before: Future[Collected] | None, wake: Wake) -> Collected:
        if before is not None:
            at = replace(before.result()[1], step=at.step)
        watch = Stopwatch(ended=self._ended)
        with wake():
            groups, after, metrics = self._collector.collect(at, watch)
        seconds = {f"timing_s/{stage}": value for stage, value in watch.lap().items()}
        return groups, after, metrics | canary_metrics(self._engine) | seconds


def snapshot(source: WeightSource) -> LocalWeights:
    """Copy the weights to host memory: the learner changes its own before engines read them."""
    weights = source.tensors()
    named = weights.weights if isinstance(weights, Adapter) else weights
    pairs = named.items() if isinstance(named, Mapping) else named
    copied = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in pairs]
    return LocalWeights(replace(weights, weights=copied) if isinstance(weights, Adapter) else copied, source.version)


def _done(collected: Collected) -> Future[Collected]:
    future: Future[Collected] = Future()
    future.set_result(collected)
    return future


# --- in a checkpoint -------------------------------------------------------------------------------------------------


def save_pending_steps(ahead: Sequence[Collected], folder: Path) -> None:
    """Write the groups of later steps into a checkpoint folder, the next one's into `ahead_0`."""
    for number, (groups, after, metrics) in enumerate(ahead):
        own = folder / f"ahead_{number}"
        (own / "after").mkdir(parents=True)
        save_groups(groups, own)
        save_stream(after.stream, own / "after")
        (own / STATE_FILE).write_text(json.dumps({**after.state(), "metrics": metrics}) + "\n", encoding="utf-8")


def load_pending_steps(folder: Path, begin: Position, render: Callable[[int], Prompt]) -> list[Collected]:
    """Return what `save_pending_steps` wrote, up to the first step whose rows have all changed."""
    ahead: list[Collected] = []
    while (own := folder / f"ahead_{len(ahead)}").is_dir():
        state = json.loads((own / STATE_FILE).read_text(encoding="utf-8"))
        after = begin.resume(state)
        after = replace(after, stream=load_stream(after.stream, own / "after", render))
        if not (groups := load_groups(own, render)):
            break  # sampled again, and later steps with it
        ahead.append((list(groups), after, state["metrics"]))
    return ahead
