"""A checkpoint by N ranks, one after the other in this process, and its files as M others read them."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import safetensors
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from r1_core.learner import checkpoint, tensor_files
from r1_core.learner.parallel import Parallel
from scale_parts.ranks import tensors_of_7b

NARROWER = 512  # times than those of Qwen2.5-7B are the tensors' last dimensions, and the files


def model_of_7b() -> nn.Module:
    """Return 339 parameters with the rows of Qwen2.5-7B's, narrow, and with random values."""
    draw = torch.Generator().manual_seed(0)
    return nn.ParameterDict({
        name.replace(".", "-"): torch.randn(*shape[:1], *(size // NARROWER for size in shape[1:]), generator=draw)
        for name, shape in tensors_of_7b().items()
    })  # fmt: skip


def measure(count: int) -> dict[str, float]:
    """Write by `count` ranks, and read as other numbers of ranks do."""
    model = model_of_7b()
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        state = {"exp_avg": param.detach() / 2, "exp_avg_sq": param.detach().square()}
        optimizer.state[param] = {"step": torch.tensor(1.0), **state}
    with tempfile.TemporaryDirectory() as folder:
        path, shares, seconds = Path(folder), [], []
        for rank in range(count):
            begun = time.process_time()
            taken = checkpoint.snapshot(
                model, optimizer, {}, Parallel(rank, count), tensor_files.FILE_BYTES // NARROWER
            )
            assert taken is not None
            shares.append(sum(tensor.nbytes for file in taken.tensors.values() for tensor in file.values()))
            taken.write(path)
            seconds.append(time.process_time() - begun)
        files = sorted(path.iterdir())
        checksum = crc32(b"".join(file.name.encode() + file.read_bytes() for file in files))
        return {
            "checkpoint files": len(files),
            "checkpoint MB": sum(file.stat().st_size for file in files) / 1e6,
            "CRC-32 of all files": checksum,
            "fullest rank's share %": 100 * max(shares) / sum(shares),
            "ranks that write": sum(map(bool, shares)),
            "slowest rank's processor s": max(seconds),
            **_read(path, model, count),
        }


def _read(path: Path, model: nn.Module, count: int) -> dict[str, float]:
    """Read the weights as the last rank of `count` does."""
    own = dict(_shards(model, count - 1, count))
    with _counted_opens() as seen:
        tensor_files.read_tensors(tensor_files.find_tensors(path, "model"), own, path)
    for name, tensor in own.items():
        assert torch.equal(_local(tensor), _local(_like(model[name].detach(), tensor))), name
    if dist.is_initialized():
        dist.destroy_process_group()
    size = sum(_local(tensor).nbytes for tensor in own.values())
    return {"files that a reading rank opens": len(seen), "MB that a reading rank reads": size / 1e6}


def _shards(model: nn.Module, rank: int, count: int) -> Iterator[tuple[str, torch.Tensor]]:
    if count > 1:
        dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
        mesh = init_device_mesh("cpu", (count,))
    for name, param in model.named_parameters():
        empty = torch.empty_like(param.detach())
        yield name, _shard(empty, mesh) if count > 1 else empty


def _shard(tensor: torch.Tensor, mesh: Any) -> torch.Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)


def _like(whole: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return _shard(whole, tensor.device_mesh) if isinstance(tensor, DTensor) else whole


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _counted_opens() -> Iterator[list[str]]:
    """Yield the safetensors files that are opened inside the block."""
    seen, real = list[str](), safetensors.safe_open

    def counted(filename: Any, *args: Any, **options: Any) -> Any:
        seen.append(str(filename))
        return real(filename, *args, **options)

    safetensors.safe_open = tensor_files.safe_open = counted  # type: ignore[assignment, attr-defined]
    try:
        yield seen
    finally:
        safetensors.safe_open = tensor_files.safe_open = real  # type: ignore[assignment, attr-defined]
