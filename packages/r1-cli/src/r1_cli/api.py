"""`r1_cli.open_run`: what `r1 train` and `r1 sft` do, from Python, a step at a time."""

import signal
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from r1_cli.build.algorithm import try_algorithm
from r1_cli.build.own_functions import ESTIMATOR, LOSS, REWARD, TOOLS, OwnFunctions
from r1_cli.checkpoint.stop import Stopped
from r1_cli.config import ConfigError, Problem, Provenance, RunConfig, require_available
from r1_cli.config.fine_tuning import as_training
from r1_cli.config.load import Source, load_source
from r1_cli.jobs.context import RunFolder, open_folder
from r1_cli.jobs.next_steps import print_next_steps
from r1_cli.jobs.sft import open_fine_tuning_run
from r1_cli.jobs.train import Opened, open_training_run, validate_only
from r1_cli.plan.disk import require_disk_space
from r1_cli.runs.reader import RunReader
from r1_cli.runs.track.console import logging_to
from r1_cli.script import require_main_guard
from r1_cli.train import loop
from r1_cli.train.groups.group import Group
from r1_cli.train.run import Taken
from r1_data.workers import start_early

WORKERS, STALENESS = "data.filter_overlong_prompts_workers=1", "trainer.max_staleness=0"
Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was taken and logged."""

    number: int  # from 1
    metrics: Mapping[str, float]  # as in `experiment_log.jsonl`; with `val/…` if the step was validated
    groups: Sequence[Group]  # that it trained on: prompts, each with its scored responses; none in fine-tuning


class OpenRun:
    """A run of `r1 train` or `r1 sft` whose steps a Python program takes, by iterating it.

    `config` is its checked configuration, `folder` the path of its folder, and `total_steps` the number of its steps.

    It is closed after its last step and after an error in a step. `close`, or the end of a `with` block, saves the last
    whole step and closes it earlier. If a program does neither, the steps since the last checkpoint are lost.
    """

    def __init__(self, config: RunConfig, opened: Opened, stack: ExitStack, console: Console) -> None:
        self.config, self.folder = config, opened.run.store.root
        self.total_steps = opened.run.schedule.total_steps
        self._opened: Opened | None = opened  # None once it is closed
        self._at, self._steps, self._next_steps = opened.at, _take_steps(config, opened), opened.next_steps
        self._console = console
        opened.manifest_entry["end"] = "left without being closed"
        stack.callback(self._steps.close)
        self._end_processes = weakref.finalize(self, stack.close)  # also when the program drops this, or ends
        self._begun = self._stopping = False

    @property
    def step(self) -> int:
        """The number of steps that were taken, also by earlier starts."""
        return self._at.step

    @property
    def reader(self) -> RunReader:
        """Read what the run has written to its folder so far."""
        if self._opened is not None:
            loop.flush(self._opened.run)
        return RunReader(self.folder)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Step:
        """Take a step.

        Raises:
            RewardFailure, RolloutError, OwnCodeError, AdvantageError, DataError: it failed; the step before it is
                saved.
            NothingToLearn, CheckpointError, ClusterError, BrokenStepError: as `r1 train`.
            KeyboardInterrupt, SystemExit: SIGINT or SIGTERM came; the last whole step is saved.
        """
        if self._opened is None or self._stopping:
            self.close()
            raise StopIteration
        stop, self._begun = self._opened.run.stop, True
        try:
            with stop.listening():
                taken = next(self._steps)
        except StopIteration:
            self._end(stop.exit_code)
            raise
        except BaseException as error:
            self._close(_first_line(error))
            raise
        self._at = taken.at
        return Step(self.step, taken.metrics, taken.groups)

    def stop(self) -> None:
        """Save this step and end the iteration after it. `open_run` with the same configuration resumes the run."""
        self._stopping = True

    def close(self) -> None:
        """Save the last whole step, and end the run's processes."""
        self._leave("the program left the run", "by the program")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            by = "by a signal" if isinstance(error, KeyboardInterrupt) else f"by the program's {_first_line(error)}"
            self._leave(type(error).__name__, by)

    def _leave(self, reason: str, by: str) -> None:
        """Close the run between two steps."""
        if self._opened is None:
            return
        run, end = self._opened.run, f"left after step {self.step}, {by}"
        advance: Callable[[], object] = partial(self._steps.throw, Stopped(reason))
        if self.step >= run.schedule.last_step:
            advance, end = partial(next, self._steps), "complete"
        try:
            with run.stop.listening():
                if self._begun:
                    advance()
        except StopIteration:
            pass
        finally:
            self._close(end)

    def _end(self, exit_code: int) -> None:
        """Close the run after its last step, or after a signal; then raise what a signal raises."""
        assert self._opened is not None
        store = self._opened.run.store
        if not exit_code:
            self._close("complete")
            print_next_steps(self._console, store, self._at, self.total_steps, **self._next_steps)
            return
        self._close(f"left after step {self.step}, by a signal")
        raise KeyboardInterrupt if exit_code == 128 + signal.SIGINT else SystemExit(exit_code)

    def _close(self, end: str) -> None:
        if self._opened is not None:
            self._opened.manifest_entry["end"] = end
            self._opened = None
            self._end_processes()


def _first_line(error: BaseException) -> str:
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def _take_steps(config: RunConfig, opened: Opened) -> Generator[Taken, None, None]:
    if config.trainer.val_only:
        validate_only(opened.run, opened.at)
    else:
        yield from loop.steps(opened.run, opened.at)


def read_config(config: Source, *settings: str) -> RunConfig:
    """Return a checked configuration of `r1 train` as typed sections, which cannot be changed.

    If it sets a key of `sft`, it is checked as one of `r1 sft`.

    Args:
        config: its file, a mapping of its sections, or a `RunConfig`, such as one to change.
        settings: `key=value`, as on the command line.

    Raises:
        ConfigError: lists all problems.

    Example: `read_config("config.yaml", "trainer.max_steps=3").trainer.max_steps`
    """
    return load_source(config, settings)[0]


def open_run(
    config: Source,
    *settings: str,
    reward: Function | None = None,
    tools: Sequence[str | Function] | None = None,
    loss: Function | None = None,
    estimator: Function | None = None,
    quiet: bool = False,
) -> OpenRun:
    """Open the run that `r1 train` would start or resume with this configuration, before its next step.

    If the configuration sets a key of `sft`, it is the run of `r1 sft`.

    Functions have the forms that r1 takes from files. A function of a script or a notebook is written, with what it
    uses, to `code/` in the run's folder. A reward, loss or estimator that cannot be written (a lambda, a closure, a
    method) is called in this process.

    Args:
        config: its file, a mapping of its sections, or a `RunConfig`.
        settings: `key=value`, as on the command line.
        reward: in place of `worker.reward.reward_function`.
        tools: in place of `worker.rollout.multi_turn.tools`: functions, and names of built-in tools.
        loss: in place of `worker.actor.loss_type`.
        estimator: in place of `algorithm.adv_estimator`.
        quiet: print nothing.

    Raises:
        ConfigError, DataError, ModelError, RewardSpecError: something cannot work; found before the first step.
        RuntimeError: worker processes would run the caller's script again; it says where to put the call.

    Example: `for step in open_run("config.yaml"): print(step.number, step.metrics["reward/overall"])`
    """
    console = Console()
    if quiet or console.is_jupyter:  # lines only: the view of a terminal would take what the program prints
        console = Console(quiet=quiet, force_jupyter=False, force_terminal=False)
    with ExitStack() as stack:
        stack.enter_context(logging_to(console))
        own = OwnFunctions(Path(stack.enter_context(TemporaryDirectory(prefix="r1-code-"))))
        for key, function in ((REWARD, reward), (LOSS, loss), (ESTIMATOR, estimator)):
            if function is not None:
                own.add(key, function)
        if tools is not None:
            own.add_tools(tools)
        checked, provenance = load_source(config, [*settings, *own.words()])
        require_available(checked, provenance)
        _require_usable(checked, own, tunes=provenance.is_set("sft"))
        if checked.trainer.max_staleness and checked.colocated:
            require_main_guard(STALENESS)
        if checked.data.filter_overlong_prompts_workers != 1:
            require_main_guard(WORKERS)
        if checked.reads_media:
            start_early()
        folder = open_folder(checked, stack)
        checked = own.moved(checked, folder.path)
        stack.enter_context(own.given())
        opened = _open(checked, provenance, folder, console, stack)
        return OpenRun(checked, opened, stack.pop_all(), console)


def _open(config: RunConfig, provenance: Provenance, folder: RunFolder, console: Console, stack: ExitStack) -> Opened:
    """Open the run of `r1 sft` if the configuration sets a key of `sft`, else that of `r1 train`."""
    if provenance.is_set("sft"):
        require_disk_space(as_training(config))
        return open_fine_tuning_run(config, provenance, folder, console, stack)
    try_algorithm(config)
    require_disk_space(config)
    return open_training_run(config, provenance, folder, console, stack)


def _require_usable(config: RunConfig, own: OwnFunctions, *, tunes: bool) -> None:
    """Raise ConfigError if fine-tuning would not call a function, or ranks need a loss that only this process has."""
    if tunes and (unused := [key for key in (LOSS, ESTIMATOR, TOOLS) if key in own.specs]):
        message = "is for r1 train, and this configuration sets a key of sft: leave the function out, and set sft.loss"
        raise ConfigError([Problem(unused[0], message)])
    if config.on_cluster and own.specs.get(LOSS) in own.called_here:
        message = "is a function that only this process can call, and ranks have their own: write it to a file"
        raise ConfigError([Problem(LOSS, message)])
