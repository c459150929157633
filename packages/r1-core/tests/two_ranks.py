"""Runs a script of these tests as two gloo ranks: started with `run`, joined by each rank with `join`."""

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from r1_core.learner.parallel import Parallel


def run(script: Path, folder: Path) -> None:
    """Start `script` twice, with a rank and `folder` as arguments, and wait; fails with what the ranks wrote."""
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=600)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)


def join(rank: str, folder: str) -> Parallel:
    """Called by a rank with its arguments."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=int(rank), world_size=2, timeout=timedelta(seconds=300)
    )
    return Parallel.join("cpu")
