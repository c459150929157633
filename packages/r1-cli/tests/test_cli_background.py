"""A thread for writing and tracking: what it may not cost the training that goes on meanwhile."""

import ctypes
import os
from pathlib import Path

import pytest
import torch

from r1_cli.checkpoint.background import Background

THREADS = Path("/proc/self/task")


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not THREADS.exists(), reason="threads of a process are listed by Linux only")
def test_a_task_that_computes_starts_no_helper_threads_that_would_let_the_main_threads_helpers_sleep(three_threads):
    """Recording summed a large tensor once: every step after the first took 1.5 times as long."""
    much = torch.ones(1 << 20)
    thread = Background("r1-computing", 1)
    thread.do(lambda: None).result()  # starts it
    before = len(os.listdir(THREADS))
    assert thread.do(lambda: float(much.mul(2.0).sum())).result() == 2.0 * len(much)
    square = much.view(1024, 1024)
    assert float(thread.do(lambda: square @ square).result()[0, 0]) == 1024.0  # by MKL, which counts its own threads
    assert len(os.listdir(THREADS)) == before
    assert thread.do(torch.get_num_threads).result() == 1
    thread.close()
    assert torch.get_num_threads() == 3


def test_a_thread_whose_helpers_cannot_be_limited_does_its_work(monkeypatch):
    def missing(path: str) -> None:
        raise OSError(f"{path}: cannot be opened")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    thread = Background("r1-recording", 1)
    assert thread.do(lambda: "written").result() == "written"
    thread.close()
