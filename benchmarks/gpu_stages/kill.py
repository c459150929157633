"""How soon the others learn that a rank was killed while they waited for it in a collective."""

import os
import signal
import tempfile
import time
from pathlib import Path

import torch
import torch.multiprocessing

from gpu_stages.bench import Bench, Row, run_ranks
from r1_core.learner.parallel import Parallel


def measure(bench: Bench) -> list[Row]:
    bench.require(2)
    with tempfile.TemporaryDirectory() as folder:
        died = Path(folder) / "died"
        try:
            run_ranks(bench, 2, _job, str(died))
        except (torch.multiprocessing.ProcessExitedException, torch.multiprocessing.ProcessRaisedException) as error:
            taken = time.time() - float(died.read_text())
            return [{"first named": f"rank {error.error_index}", "how": type(error).__name__, "seconds": taken}]
    raise RuntimeError("no rank was missed")


def _job(parallel: Parallel, bench: Bench, died: str) -> None:
    parallel.barrier()
    if parallel.rank == 1:
        Path(died).write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    parallel.sum(torch.ones(1, device=bench.kind))
    parallel.barrier()
