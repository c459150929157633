"""A pass through a model that shows what it takes, and of which nothing remains."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from r1_core.learner.adamw_bf16 import AdamWBF16
from r1_core.learner.offload import bytes_on_device, states_of
from r1_core.learner.parallel import reshard

# What torch raises where a processor's memory ends, if the system tells at all.
HOST_IS_FULL = "can't allocate memory"


@dataclass(frozen=True, slots=True)
class PassProfile:
    """What a pass took.

    Example: `PassProfile(0.8, peak=61 * 10**9, room=139 * 10**9)`.
    """

    seconds: float
    peak: int  # bytes that were held at most: of the device, with what the optimizer keeps there; of this process
    room: int | None = None  # bytes of the device that there are for it; None on processors, which name no end


def merge_profiles(trials: Sequence[PassProfile]) -> PassProfile:
    """Return what the same pass took on several ranks: as long as the slowest, as much as the fullest."""
    rooms = [trial.room for trial in trials if trial.room is not None]
    peak = max(trial.peak for trial in trials)
    return PassProfile(max(trial.seconds for trial in trials), peak, min(rooms, default=None))


def profile_pass(
    run: Callable[[], object], models: Sequence[nn.Module], optimizer: Optimizer, device: torch.device, *, away: bool
) -> PassProfile:
    """Measure a pass, and leave models, gradients and random numbers as they were.

    Args:
        run: the pass, which takes no optimizer step. There are no gradients before it.
        models: all that it goes through.
        away: the optimizer's states are not on the device meanwhile, and come for the optimizer step.

    Raises torch.OutOfMemoryError, or what else `run` does; then, too, nothing remains.
    """
    with without_trace(models, device):
        if device.type != "cuda":
            begun, own = time.perf_counter(), time.process_time()
            run()
            # What else the machine does must not count: threads together compute for as long at least as it takes.
            return PassProfile(min(time.perf_counter() - begun, time.process_time() - own), host_peak())
        return _profile_on_gpu(run, optimizer, device, away)


def _profile_on_gpu(run: Callable[[], object], optimizer: Optimizer, device: torch.device, away: bool) -> PassProfile:
    """Do what `profile_pass` does on a GPU. NOT RUN ON A GPU."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    room = torch.cuda.mem_get_info(device)[0] + before
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    try:
        run()
        torch.cuda.synchronize(device)
        seconds, peak = time.perf_counter() - begun, torch.cuda.max_memory_reserved(device)
    finally:
        torch.cuda.reset_peak_memory_stats(device)  # what a run reports of itself begins behind this
    trained, states = optimizer_bytes(optimizer)
    if away:  # they come when the activations are gone
        return PassProfile(seconds, max(peak, before + trained + states), room)
    present = bytes_on_device(states_of(optimizer))
    return PassProfile(seconds, peak + max(states - present, 0), room)


def optimizer_bytes(optimizer: Optimizer) -> tuple[int, int]:
    """Return the bytes of what an optimizer trains, which are those of its gradients too, and of the states it keeps.

    Of sharded weights they are this rank's. States come with the first optimizer step: before, they are counted here.
    """
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    trained = sum(_local_bytes(param) for param in params)
    return trained, trained * (3 if isinstance(optimizer, AdamWBF16) else 2)


def _local_bytes(param: Tensor) -> int:
    local: Any = param.to_local() if hasattr(param, "to_local") else param
    return int(local.numel() * local.element_size())


@contextmanager
def without_trace(models: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Leave behind no gradient, no other buffer and no random number, whatever happens inside."""
    restore = [_keep(module) for model in models for module in model.modules() if module._buffers]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        except BaseException:
            for model in models:
                model.zero_grad(set_to_none=True)  # of whole weights, which go with them into the next pass
                if isinstance(model, FSDPModule) and hasattr(model, "reset_iter_state"):
                    model.reset_iter_state()  # torch 2.13: else the next backward pass would end half-way
            raise
        finally:
            for model in models:
                for param in model.parameters():
                    param.grad = None
                reshard(model)
            for back in restore:
                back()


def _keep(module: nn.Module) -> Callable[[], None]:
    """Return what gives a module its buffers back, and the numbers beside them: RoPE remembers its longest row."""
    buffers = {name: (own, _copy(own)) for name, own in module._buffers.items()}
    numbers = {name: value for name, value in vars(module).items() if isinstance(value, int | float)}
    numbers.pop("training", None)  # which every verb sets

    @torch.no_grad()
    def restore() -> None:
        for name, (own, values) in buffers.items():
            module._buffers[name] = own
            if own is not None and values is not None and _is_here(own):
                own.copy_(values)
        for name, value in numbers.items():
            setattr(module, name, value)

    return restore


def _copy(buffer: Tensor | None) -> Tensor | None:
    return buffer.clone() if buffer is not None and _is_here(buffer) else None


def _is_here(buffer: Tensor) -> bool:
    """Whether a buffer's bytes are on its device: those of a reference that is offloaded leave with it."""
    return buffer.untyped_storage().nbytes() > 0


def host_peak() -> int:
    """Return the most bytes of the processor's memory that this process has held so far; 0 where nobody counts."""
    if sys.platform == "win32":
        return 0
    import resource

    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found << 10


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device's memory, or the processor's, has ended."""
    return isinstance(error, torch.OutOfMemoryError) or HOST_IS_FULL in str(error)
