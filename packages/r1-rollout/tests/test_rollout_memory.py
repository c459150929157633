"""Memory of syncs: the model and one bucket at the peak, flat over ten thousand cycles, and the cache gone in sleep."""

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from r1_rollout.weights import buckets, load_weights

FOLDER = Path(__file__).parent
MEGABYTE = 2**20


class Source:
    """Makes tensors one by one, and counts the bytes of those that are alive; even a detached one counts."""

    def __init__(self, count: int, num_bytes: int) -> None:
        self.count, self.num_bytes, self.alive, self.peak = count, num_bytes, 0, 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for i in range(self.count):
            array = np.full(self.num_bytes // 4, i, dtype=np.float32)  # lives as long as the tensor's storage
            weakref.finalize(array, self._free)
            self.alive += self.num_bytes
            self.peak = max(self.peak, self.alive)
            yield str(i), torch.from_numpy(array)
            del array

    def _free(self) -> None:
        self.alive -= self.num_bytes


def test_one_bucket_is_alive_at_a_time() -> None:
    source = Source(64, 4096)
    for bucket in buckets(source, 8 * 4096):
        assert len(bucket) <= 8
    # One more than the bucket: the one that did not fit into it.
    assert source.peak <= 9 * 4096
    assert source.alive == 0


def test_a_cast_bucket_does_not_keep_the_masters() -> None:
    source = Source(64, 4096)
    for bucket in buckets(source, 8 * 4096, torch.bfloat16):
        assert len(bucket) <= 16
    assert source.peak <= 2 * 4096


def test_a_sync_holds_one_tensor_of_the_source_at_a_time() -> None:
    model = torch.nn.ParameterDict({str(i): torch.zeros(1024, dtype=torch.bfloat16) for i in range(64)})
    source = Source(64, 4096)
    load_weights(model, source)
    assert source.peak <= 2 * 4096
    assert model["63"].tolist() == [63.0] * 1024


def run(what: str) -> dict[str, Any]:
    """What `sync_process.py` says, from a process whose memory nothing else moves."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path])}
    process = subprocess.run(
        [sys.executable, FOLDER / "sync_process.py", what], env=environment, capture_output=True, text=True, timeout=900
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


asks_the_kernel = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc/self/clear_refs"
)


@pytest.mark.slow
@asks_the_kernel
def test_the_peak_of_a_sync_is_the_model_and_one_bucket() -> None:
    found = run("peak")
    assert found["model"] > 100 * MEGABYTE
    # A bucket, the float32 tensor that is being cast (4 MB), and what the allocator has to spare.
    assert found["above"] < found["bucket"] + 24 * MEGABYTE


@pytest.mark.slow
@asks_the_kernel
def test_ten_thousand_syncs_and_sleeps_leave_memory_flat() -> None:
    found = run("cycles")
    assert found["cycles"] == 10_000
    assert found["grown"] < 4 * MEGABYTE  # less than half a kilobyte a cycle


@pytest.mark.slow
@asks_the_kernel
def test_sleep_gives_the_cache_back() -> None:
    found = run("sleep")
    assert found["active"] > 50 * MEGABYTE
    assert found["left"] < 0.1 * found["active"]
