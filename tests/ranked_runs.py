"""Whole runs of `r1 train` on gloo ranks without Ray: each rank is also a driver and samples the same."""

import contextlib
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from click.testing import CliRunner
from endtoend import ROOT, read_log
from ranks import patches

from r1_cli.config import RunConfig
from r1_cli.hardware import Hardware
from r1_cli.jobs import context
from r1_cli.jobs import models as job
from r1_cli.jobs.learner import load_ranked
from r1_cli.main import main
from r1_cli.models.files import ModelFiles
from r1_cli.placement import Node, Placement, place_ranks
from r1_cli.train.types import Schedule


@dataclass(frozen=True)
class Value:
    """A value that is as good as put down where it is needed: every driver has made it for its own rank."""

    value: Any

    def load(self) -> Any:
        return self.value


class Together:
    """A `WorkerGroup` that this process is one of: all drivers make the same calls, each of its own rank.

    What crosses is pickled, as it would be on its way to other processes.
    """

    remote_put = Value

    beside: dist.ProcessGroup

    def create(self, maker: Callable[..., Any], each: list[tuple[Any, ...]]) -> None:
        self.rank = maker(*each[dist.get_rank()])

    def call(self, verb: str, *args: Any, label: str = "") -> Any:
        return self.call_all(verb, *args)[0]

    def call_first(self, verb: str, *args: Any) -> Any:
        return of_first(getattr(self.rank, verb)(*args) if dist.get_rank() == 0 else None, self.group())

    def group(self) -> dist.ProcessGroup | None:
        """Whom to ask: checkpoints are written by a thread, whose asking must not meet that of the next step."""
        return None if threading.current_thread() is threading.main_thread() else self.beside

    def call_all(self, verb: str, *args: Any, label: str = "") -> list[Any]:
        # They write one checkpoint together, where the first driver wants it; each driver goes on in its own folder.
        group = self.group()

        def shared(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: shared(one) for name, one in value.items()}
            if not isinstance(value, Path):
                return value
            value.mkdir(parents=True, exist_ok=True)
            return of_first(value, group)

        args = tuple(map(shared, args))
        answers: list[Any] = [None] * dist.get_world_size()
        if verb == "join":
            dist.destroy_process_group()  # the ranks make their own
        answer = getattr(self.rank, verb)(*pickle.loads(pickle.dumps(args, protocol=5)))
        if verb == "join":
            self.beside = dist.new_group()
        dist.all_gather_object(answers, answer, group)
        return answers

    def put(self, value: Any) -> Value:
        return Value(value)


def of_first(value: Any, group: dist.ProcessGroup | None) -> Any:
    """What rank 0 has given."""
    given = [value]
    dist.broadcast_object_list(given, group=group)
    return given[0]


def prepare_learner(
    config: RunConfig,
    hardware: Hardware,
    model: ModelFiles,
    schedule: Schedule,
    placements: Any,
    ranks: Any,
    stack: ExitStack,
) -> Callable[[], Any]:
    """In the place of the run's own, which would start processes under Ray."""
    here = place_ranks([Node("here", "127.0.0.1", ("cpu",) * dist.get_world_size())])
    return partial(load_ranked, config, hardware, schedule, here, Together())


def train(folder: Path, *words: str) -> list[dict[str, Any]]:
    """A case for ranks: run `r1` on all that were called; return what it logged. The checkpoints are in `folder`/0."""
    own = folder / str(dist.get_rank())
    patches.setattr(job, "prepare_learner", prepare_learner)
    patches.setattr(context, "open_placement", lambda *args, **how: nullcontext(Placement()))  # else Ray starts, too
    # Pictures are read by processes of their own, which a daemon may not start.
    patches.setitem(multiprocessing.current_process()._config, "daemon", False)  # type: ignore[attr-defined]
    with contextlib.chdir(ROOT):
        result = CliRunner(env={"COLUMNS": "200"}).invoke(main, [*words, f"trainer.save_checkpoint_path={own}"])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return read_log(own)
