"""Sampling ahead of the learner: groups of the steps to come, by weights that are a fixed number of steps older.

Which weights sample which step is a rule and no matter of who is first: the groups of step s (from 0) are all sampled
by version max(f, s − k), with f the step that this process began at. Sampling goes on from group to group as it does
without, so that prompts, noise, filter and surplus of a step follow from those of the step before. What the clock
decides is only who waits for whom.

A checkpoint after step s holds the groups of steps s to s + k − 1, whose weights are gone; it is complete when they are
done, and the run goes on meanwhile. So a resumed run trains on the very same.
"""

import json
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from r1_cli.runs.track.stopwatch import Stopwatch
from r1_cli.runs.track.timeline import Record
from r1_cli.train.groups.stream_position import load_groups, save_groups
from r1_cli.train.roles import Collected, Collector, Position
from r1_cli.train.sampling.weight_check import CheckedGenerator, canary_metrics
from r1_data.types import Prompt
from r1_rollout.lora import Adapter
from r1_rollout.types import Generator
from r1_rollout.weight_source import LocalWeights, WeightSource

STATE_FILE = "position.json"

Wake = Callable[[], AbstractContextManager[None]]  # wakes the engine with certain weights


class AsyncSampler:
    """Samples in a thread, by an engine that has devices or a process of its own, while the learner computes."""

    def __init__(
        self,
        collector: Collector,
        engine: Generator,
        *,
        staleness: int,
        total_steps: int,
        resumed: Sequence[Collected] = (),
        ended: Record | None = None,
    ) -> None:
        """Begin nothing yet.

        Args:
            staleness: k, steps between the weights that sample a step's groups and those that learn from them.
            total_steps: of the run; no further is sampled.
            resumed: what a checkpoint holds for the first steps.
            ended: is told what the thread did when.
        """
        self._collector, self._engine = collector, engine
        self._staleness, self._total_steps, self._ended = staleness, total_steps, ended
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="r1-sampling")
        self._steps: deque[Future[Collected]] = deque(map(_done, resumed))  # of the steps to come, in their order

    def collect(self, at: Position, source: WeightSource, watch: Stopwatch) -> Collected:
        """Hand the weights of step `at` over, with which sampling goes on, and return the groups of that step.

        Raises what sampling them has raised; they are asked for again then.
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
        """Wait until all that has begun is sampled; return what the next steps train on. The engine is free then.

        Raises what sampling it has raised.
        """
        return [step.result() for step in self._steps]

    def pending(self) -> list[Future[Collected]]:
        """Return what the next steps train on as it comes; it may have begun only."""
        return list(self._steps)

    def close(self) -> None:
        """Begin nothing more; who ends the engine ends what is under way."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _wake(self, source: WeightSource) -> Wake:
        if isinstance(self._engine, CheckedGenerator):  # the learner is asked while it has these weights
            return partial(self._engine.active_later, source, self._engine.expect(source))
        return partial(self._engine.active, source)

    def _sample(self, at: Position, before: Future[Collected] | None, wake: Wake) -> Collected:
        """Sample the groups of one step, in the thread, where those of the step before have left off."""
        if before is not None:
            at = replace(before.result()[1], step=at.step)
        watch = Stopwatch(ended=self._ended)
        with wake():
            groups, after, metrics = self._collector.collect(at, watch)
        seconds = {f"timing_s/{stage}": value for stage, value in watch.lap().items()}
        return groups, after, metrics | canary_metrics(self._engine) | seconds


def snapshot(source: WeightSource) -> LocalWeights:
    """Return a copy of the weights in the processor's memory: the learner's own change before an engine reads them."""
    weights = source.tensors()
    named = weights.weights if isinstance(weights, Adapter) else weights
    pairs = named.items() if hasattr(named, "items") else named
    copied = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in pairs]
    return LocalWeights(replace(weights, weights=copied) if isinstance(weights, Adapter) else copied, source.version)


def _done(collected: Collected) -> Future[Collected]:
    future: Future[Collected] = Future()
    future.set_result(collected)
    return future


# --- in a checkpoint -------------------------------------------------------------------------------------------------


def save_pending_steps(ahead: Sequence[Collected], folder: Path) -> None:
    """Write the groups of the next steps into the checkpoint `folder`, a folder each: `ahead_0` is the next."""
    for number, (groups, after, metrics) in enumerate(ahead):
        own = folder / f"ahead_{number}"
        (own / "after").mkdir(parents=True)
        save_groups(groups, own)
        save_groups(after.stream.carried_over, own / "after")
        (own / STATE_FILE).write_text(json.dumps({**after.state(), "metrics": metrics}) + "\n", encoding="utf-8")


def load_pending_steps(folder: Path, begin: Position, render: Callable[[int], Prompt]) -> list[Collected]:
    """Return what `save_ahead` wrote; of steps whose rows have changed since, what is left of them.

    Args:
        begin: a position with the run's settings.
    """
    ahead: list[Collected] = []
    while (own := folder / f"ahead_{len(ahead)}").is_dir():
        state = json.loads((own / STATE_FILE).read_text(encoding="utf-8"))
        after = begin.resume(state)
        after = replace(after, stream=replace(after.stream, carried_over=load_groups(own / "after", render)))
        if not (groups := load_groups(own, render)):
            break  # it is sampled again, and what follows it
        ahead.append((list(groups), after, state["metrics"]))
    return ahead
