"""The devices, what links them, and how fast a matrix product and a copy are on each."""

import subprocess
from collections.abc import Iterator

import torch

from gpu_stages.bench import Bench, Row, seconds
from r1_cli.hardware import peak_flops


def measure(bench: Bench) -> Iterator[Row]:
    if bench.kind == "cuda":
        print(subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False).stdout)
    yield from (_device(bench, index) for index in range(bench.devices))


def _device(bench: Bench, index: int) -> Row:
    device = torch.device(bench.kind, index) if bench.kind == "cuda" else torch.device("cpu")
    size = 256 if bench.tiny else 8192
    dtype = torch.float32 if bench.tiny else torch.bfloat16
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    rate = 2 * size**3 / seconds(bench, lambda: left @ right)
    peak = peak_flops(bench.device_name)
    copied = left.nbytes / seconds(bench, lambda: left.to("cpu"))
    row: Row = {"device": index, "name": bench.device_name, "product TFLOP/s": rate / 1e12}
    row |= {"of the peak": rate / peak if peak else None, "to the host GB/s": copied / 1e9}
    for other in range(bench.devices if bench.kind == "cuda" else 0):
        if other != index:
            there = left.to(torch.device("cuda", other))
            row[f"to {other} GB/s"] = left.nbytes / seconds(bench, lambda there=there: there.copy_(left)) / 1e9
    return row
