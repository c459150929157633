"""Measure time and memory of one pass without changing any state."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from r1_core.learner.adamw_bf16 import AdamWBF16
from r1_core.learner.offload import bytes_on_device, states_of
from r1_core.learner.parallel import abandon_pass, local_part, reshard

# torch's message when host memory runs out, if the system reports it.
HOST_OUT_OF_MEMORY = "can't allocate memory"


@dataclass(frozen=True, slots=True)
class PassProfile:
    seconds: float
    peak: int  # bytes: of the device, with the optimizer's states there; on CPUs, of this process
    available: int | None = None  # bytes of the device for this process; None on CPUs, which report no limit


def merge_profiles(trials: Sequence[PassProfile]) -> PassProfile:
    """Return the longest time and the highest peak of several ranks."""
    available = [trial.available for trial in trials if trial.available is not None]
    peak = max(trial.peak for trial in trials)
    return PassProfile(max(trial.seconds for trial in trials), peak, min(available, default=None))


def profile_pass(
    run: Callable[[], object], models: Sequence[nn.Module], optimizer: Optimizer, device: torch.device, *, away: bool
) -> PassProfile:
    """Run a pass and measure it; models, gradients and random states stay as they were, even if it raises.

    Args:
        run: the pass, which takes no optimizer step. No gradients exist before it.
        models: all models that it uses.
        away: the optimizer's states are offloaded during the pass and loaded for the optimizer step.
    """
    with restoring_state(models, device):
        if device.type != "cuda":
            begun, own = time.perf_counter(), time.process_time()
            run()
            # CPU time excludes other processes' work; threads together compute at least as long as the pass takes.
            return PassProfile(min(time.perf_counter() - begun, time.process_time() - own), host_peak())
        return _profile_on_gpu(run, optimizer, device, away)


def _profile_on_gpu(run: Callable[[], object], optimizer: Optimizer, device: torch.device, away: bool) -> PassProfile:
    """NOT RUN ON A GPU."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    available = torch.cuda.mem_get_info(device)[0] + before
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    try:
        run()
        torch.cuda.synchronize(device)
        seconds, peak = time.perf_counter() - begun, torch.cuda.max_memory_reserved(device)
    finally:
        torch.cuda.reset_peak_memory_stats(device)  # so that a run's own metrics exclude this pass
    trained, states = optimizer_bytes(optimizer)
    if away:  # they load after the activations are freed
        return PassProfile(seconds, max(peak, before + trained + states), available)
    present = bytes_on_device(states_of(optimizer))
    return PassProfile(seconds, peak + max(states - present, 0), available)


def optimizer_bytes(optimizer: Optimizer) -> tuple[int, int]:
    """Return the bytes of this rank's trained parameters and of their optimizer states, also before those exist."""
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    trained = sum(local_part(param.detach()).nbytes for param in params)
    return trained, trained * (3 if isinstance(optimizer, AdamWBF16) else 2)


@contextmanager
def restoring_state(models: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Restore gradients, buffers and random states on exit."""
    restore = [_buffer_restorer(module) for model in models for module in model.modules() if module._buffers]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        except BaseException:
            for model in models:
                abandon_pass(model)
            raise
        finally:
            for model in models:
                for param in model.parameters():
                    param.grad = None
                reshard(model)
            for back in restore:
                back()


def _buffer_restorer(module: nn.Module) -> Callable[[], None]:
    """Return a function that restores buffers and numeric attributes: RoPE caches its longest row."""
    buffers = {name: (own, _copy(own)) for name, own in module._buffers.items()}
    numbers = {name: value for name, value in vars(module).items() if isinstance(value, int | float)}
    numbers.pop("training", None)  # which every pass sets

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
    return buffer.untyped_storage().nbytes() > 0


def host_peak() -> int:
    """Return this process's peak host memory in bytes; 0 on Windows."""
    if sys.platform == "win32":
        return 0
    import resource

    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found << 10


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or HOST_OUT_OF_MEMORY in str(error)
