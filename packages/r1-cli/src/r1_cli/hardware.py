"""The devices and precisions of a run, chosen without a device in the driver."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

# Dense bf16 tensor-core peaks in FLOP/s from the makers' data sheets. The first name found in the device's wins, so
# that "H200" is never taken for "H20".
PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "RTX 4090": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
}

# Files with the memory limit and usage of a container, for both versions of Linux control groups.
CONTAINER_MEMORY = tuple(
    (Path("/sys/fs/cgroup", limit), Path("/sys/fs/cgroup", used))
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    )
)


@dataclass(frozen=True, slots=True)
class Hardware:
    """The devices of learner and engines, all of one kind.

    Example: `Hardware("cuda", ("0", "1"))`, where the learner has GPU 0; `Hardware("cpu")`.
    """

    kind: Literal["cpu", "cuda"]
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them; the learner's first

    @property
    def on_gpu(self) -> bool:
        return self.kind == "cuda"

    @property
    def device(self) -> "torch.device":
        import torch

        return torch.device(self.kind)

    def engine_dtype(self, requested: str) -> "torch.dtype":
        """Return the engine's precision: float32 on CPUs, which are slower in half precision."""
        return dtype(requested if self.on_gpu else "fp32")

    def computing_dtype(self, kept: str, requested: str) -> "torch.dtype":
        """Return the precision of the learner's matrix products for weights kept in `kept`.

        It is never finer than the weights; half precision is for GPUs.
        """
        return dtype(requested if self.on_gpu and kept == "fp32" else kept)


def find_hardware() -> Hardware:
    import torch

    if not torch.cuda.is_available():
        return Hardware("cpu")
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else map(str, range(torch.cuda.device_count()))
    return Hardware("cuda", tuple(name.strip() for name in names))


def device_name() -> str:
    """Return what this process computes on, such as "NVIDIA H100 80GB HBM3"."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "this machine's CPU"


def find_card() -> int | None:
    """Return the bytes of this machine's smallest GPU from nvidia-smi, so that torch need not load."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return min(int(line) << 20 for line in output.split())
    except (OSError, ValueError, subprocess.SubprocessError):  # no working driver
        return None


def free_memory() -> int:
    """Return how many bytes the processes of this machine, or of this container, may still use."""
    import psutil

    free = psutil.virtual_memory().available
    for limit, used in CONTAINER_MEMORY:
        try:
            numbers = dict(line.split() for line in limit.with_name("memory.stat").read_text().splitlines())
            files = int(numbers["active_file"]) + int(numbers["inactive_file"])  # reclaimable page cache
            free = min(free, int(limit.read_text()) - int(used.read_text()) + files)
        except (OSError, ValueError, KeyError):  # no such container, or no limit ("max")
            continue
    return max(free, 0)


def release_memory() -> None:
    """Free what nothing refers to any more, also on the GPUs of this process."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def dtype(name: str) -> "torch.dtype":
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def generation(gpu: "torch.device") -> int:
    """Return the major compute capability of a GPU: 8 for an A100."""
    import torch

    return torch.cuda.get_device_capability(gpu)[0]


def peak_flops(device: str) -> float | None:
    """Return the peak FLOP/s of a device by its name; None if it is unknown."""
    for known, peak in PEAK_FLOPS.items():
        if known in device:
            return peak
    return None
