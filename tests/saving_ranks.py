"""Functions that gloo ranks run in the tests of checkpoints."""

import os
from pathlib import Path

import torch
from loading_ranks import load

from r1_core.learner import Learner, tensor_files
from r1_core.learner.optim import build_optimizer
from r1_core.learner.parallel import Parallel

FILE_BYTES = 40_000


def save(model: str, folder: Path, dies: bool = False) -> None:
    """Load a model in parts, move its weights, and save it; or end without a word while writing."""
    parallel = Parallel.join("cpu")
    learner = learner_for(model, parallel)
    if dies and parallel.rank == 1:
        tensor_files.force_to_disk = lambda path: os._exit(9)
    learner.save(folder / "actor", file_bytes=FILE_BYTES)


def learner_for(model: str, parallel: Parallel | None = None) -> Learner:
    loaded = load(model, parallel)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.mul_(0.5)
            parameter.grad = torch.ones_like(parameter)
    learner = Learner(loaded, build_optimizer(loaded.named_parameters(), lr=1e-2), lambda step: 1.0, parallel=parallel)
    learner.optim_step()
    return learner
