"""What gloo ranks do in the tests of checkpoints."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from core_toy import Toy, samples
from safetensors import SafetensorError
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from r1_core.learner import Learner, checkpoint, tensor_files
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.optim import build_optimizer
from r1_core.learner.parallel import Parallel, find_blocks, shard_model
from r1_core.objective import Objective

FILE_BYTES = 400


def learner_for(parallel: Parallel | None = None) -> Learner:
    model = Toy()
    if parallel is not None and parallel.mesh is not None:
        shard_model(model, find_blocks(model), parallel.mesh)
    optimizer, batching = build_optimizer(model.named_parameters(), lr=1e-2), Batching(True, MicroLimit(1))
    return Learner(model, optimizer, lambda step: 1.0, batching=batching, parallel=parallel)


def step(learner: Learner) -> dict[str, float]:
    annotated = learner.add_logprobs(samples(), ["old_logprobs"])
    return learner.forward_backward(annotated, Objective()) | learner.optim_step()


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights()}


def copy(source: Path, target: Path, shard_size: int) -> None:
    """Take up a checkpoint and write another, at once and again after it was copied and a step was taken."""
    learner = learner_for(Parallel.join("cpu", shard_size=shard_size))
    learner.load(source)
    learner.save(target, file_bytes=FILE_BYTES)
    taken = learner.snapshot(file_bytes=FILE_BYTES)
    assert learner.snapshot(file_bytes=FILE_BYTES, max_bytes=FILE_BYTES) is None
    assert taken is not None
    step(learner)
    taken.write(target.with_name(f"{target.name}_later"))


def stop_and_go(folder: Path, shard_size: int) -> bool:
    """Whether a learner that has stopped takes the step, to the bit, of one that has not."""
    parallel = Parallel.join("cpu", shard_size=shard_size)
    learner, resumed = learner_for(parallel), learner_for(parallel)
    step(learner)
    learner.save(folder, file_bytes=FILE_BYTES)
    resumed.load(folder)
    same = step(resumed) == step(learner)
    return same and all(tensor.equal(weights(resumed)[name]) for name, tensor in weights(learner).items())


class Held(TorchDispatchMode):
    """Counts the bytes of tensors that have been made since and are still there, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in before | self.known:
                self._take(tensor.untyped_storage())
        return result

    def _take(self, storage: Any) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        self.known.add(key)
        self.now += num_bytes
        self.most = max(self.most, self.now)

        def gone() -> None:
            self.known.discard(key)
            self.now -= num_bytes

        weakref.finalize(storage, gone)


def wide(parallel: Parallel) -> nn.Module:
    """48 layers of 16 KB and one of 7 rows."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(48)], nn.Linear(64, 7))
    assert parallel.mesh is not None
    shard_model(model, list(model), parallel.mesh)
    return model


def measure_save(folder: Path, shard_size: int, file_bytes: int) -> tuple[int, int]:
    """The most bytes that this rank held beside its shards while it saved, and those that it wrote."""
    parallel = Parallel.join("cpu", shard_size=shard_size)
    model, written = wide(parallel), 0
    save_file = tensor_files.save_file

    def save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        nonlocal written
        written += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        save_file(tensors, path, metadata=metadata)

    with pytest.MonkeyPatch.context() as patch, Held() as held:
        patch.setattr(tensor_files, "save_file", save)
        checkpoint.save(folder, model, None, {}, parallel, file_bytes)
    return held.most, written


def measure_load(folder: Path) -> tuple[int, int]:
    """The numbers that this rank read from files, and those of its shards."""
    model, read = wide(Parallel.join("cpu")), 0
    safe_open = safetensors.safe_open

    class Slice:
        def __init__(self, part: Any) -> None:
            self.part = part

        def __getitem__(self, rows: Any) -> torch.Tensor:
            nonlocal read
            tensor: torch.Tensor = self.part[rows]
            read += tensor.numel()
            return tensor

        def __getattr__(self, name: str) -> Any:
            return getattr(self.part, name)

    class Opened:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = safe_open(*args, **kwargs)

        def __enter__(self) -> "Opened":
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def get_slice(self, name: str) -> Slice:
            return Slice(self.file.get_slice(name))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors, "safe_open", Opened)
        checkpoint.load_model(folder, model)
    return read, sum(p.to_local().numel() for p in model.parameters())


def save_to_full_disk(folder: Path, full: int) -> str:
    """What the ranks say when the disk of one of them is full."""
    parallel = Parallel.join("cpu")
    learner = learner_for(parallel)
    with pytest.MonkeyPatch.context() as patch:
        if parallel.rank == full:

            def fail(tensors: Any, path: Path, metadata: Any) -> None:
                raise SafetensorError("I/O error: No space left on device")

            patch.setattr(tensor_files, "save_file", fail)
        with pytest.raises(OSError, match=r"No space left") as error:
            learner.save(folder, file_bytes=FILE_BYTES)
    return str(error.value)
