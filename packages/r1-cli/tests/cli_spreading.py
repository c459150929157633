"""The weights of a learner in gloo ranks as a `WeightSource` of the tests' own process, and what ranks do for it."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import cli_adapters
import cli_ranks
import ranks
import torch
import torch.distributed as dist
from torch import Tensor

from r1_cli.cluster.rank import Rank
from r1_cli.models.adapters import Form
from r1_core.learner import Learner
from r1_core.learner.parallel import Parallel
from r1_core.objective import Objective
from r1_rollout.lora import Adapter
from r1_rollout.transports.folder import ShardWriter
from r1_rollout.weights import BucketWriter, Shapes, Weights

Make = Callable[[Parallel], tuple[Learner, Objective]]
all_weights: Make = partial(cli_ranks.build, "text", "KL")


def adapter(base: Path, folder: Path, parallel: Parallel) -> tuple[Learner, Objective]:
    """A learner of an adapter alone."""
    return cli_adapters.build(base, Form(4, 8, "all-linear", ".*visual.*", folder), parallel), Objective()


@dataclass
class OnRanks:
    """What `RankedWeights` is where ranks are actors; an error comes from the first of them that has raised one."""

    make: Make
    version: int = 0
    form: Adapter | None = None
    written: list[list[int]] | None = None  # numbers of the buckets that each rank has written, of the last pass

    def names(self) -> Weights:
        return [] if self.form is None else self.form

    def tensors(self) -> Weights:
        raise AssertionError("a tensor was asked for here")

    def run_with_weights(self, task: Callable[[Weights], Any]) -> Any:
        return first(ranks.run(tried, self.make, "run_with_weights", task))

    def spread(self, write: BucketWriter, max_bytes: int, dtype: torch.dtype | None) -> Shapes:
        noting = Noting(write)
        answers = ranks.run(tried, self.make, "spread_weights", noting, max_bytes, dtype)
        shapes: Shapes = first([answer for answer, _ in answers])
        self.written = [written for _, written in answers]
        return shapes


def first(answers: list[Any]) -> Any:
    """What rank 0 has answered, unless some rank has raised an error."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers[0]


def tried(make: Make, verb: str, *args: Any) -> Any:
    """A case for ranks: what a verb gives or raises, and, where it writes, which buckets this rank has written."""
    rank: Rank = cli_ranks.meet(make)
    answer: Any
    try:
        answer = getattr(rank, verb)(*args)
    except Exception as error:
        answer = error
    dist.barrier()  # all have ended the pass, whatever this one met
    return (answer, NOTED.copy()) if verb == "spread_weights" else answer


NOTED: list[int] = []


@dataclass
class Noting:
    """A writer that says afterwards what it has written in this process."""

    write: BucketWriter

    def reaches(self) -> bool:
        NOTED.clear()
        return self.write.reaches()

    def __call__(self, number: int, bucket: list[tuple[str, Tensor]]) -> None:
        self.write(number, bucket)
        NOTED.append(number)


@dataclass(frozen=True)
class OfOneRank:
    """A writer that, on one rank, finds the disk full, or the folder not there."""

    write: ShardWriter
    rank: int
    fault: str

    def reaches(self) -> bool:
        return not (self.fault == "unseen" and dist.get_rank() == self.rank) and self.write.reaches()

    def __call__(self, number: int, bucket: list[tuple[str, Tensor]]) -> None:
        if self.fault == "full" and dist.get_rank() == self.rank:
            raise OSError(28, f"{os.strerror(28)}, rank {self.rank}", str(self.write.folder))
        self.write(number, bucket)


@dataclass
class Faulty(OnRanks):
    """Ranks of which one cannot write as long as there is a `fault`."""

    fault: str = "full"
    faulty: int = 1

    def spread(self, write: BucketWriter, max_bytes: int, dtype: torch.dtype | None) -> Shapes:
        assert isinstance(write, ShardWriter)
        return super().spread(OfOneRank(write, self.faulty, self.fault) if self.fault else write, max_bytes, dtype)


def factors(base: Path, folder: Path) -> Adapter:
    """The adapter as one process has it, factors and all."""
    learner = cli_adapters.build(base, Form(4, 8, "all-linear", ".*visual.*", folder))
    return replace(learner.form, weights=list(learner.weights()))
