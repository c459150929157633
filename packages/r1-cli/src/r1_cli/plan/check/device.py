"""Compute on the device in each way that a run may take, each in a process of its own, and compare with the CPU."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from r1_cli.hardware import find_hardware
from r1_cli.plan.check.device_kernels import check_attention, check_head, check_tower
from r1_cli.plan.check.device_runs import check_run
from r1_cli.plan.check.device_steps import (
    check_collectives,
    check_engine,
    check_offload,
    check_optimizer,
    check_training,
)
from r1_cli.plan.check.findings import Finding
from r1_data.workers import WorkerDied, Workers

SECONDS = 180.0  # of one check, at most
MEMORY = 1 << 60  # bytes that a check's process may reserve: CUDA reserves far more than it takes
# Largest difference from the CPU, as a share of the largest number: rounding, and no more.
BOUNDS = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PADDED, UNSHARED = "worker.actor.padding_free=false", "worker.actor.share_prompts=false"
STRATEGY, EAGER = "worker.actor.optim.strategy", "worker.rollout.enforce_eager=true"
OTHER = {
    "embedded": "worker.rollout.name=vllm",
    # On GPUs vLLM takes its second model runner, which no test on a CPU can run.
    "vllm": "worker.rollout.name=embedded, or try VLLM_USE_V2_MODEL_RUNNER=0 in the environment",
}
DIRECT = "NCCL_P2P_DISABLE=1 in the environment, so that no GPU reads another's memory, or trainer.n_gpus_per_node=1"
RANKS = 8  # at most
NO_OFFLOAD = "worker.actor.offload.offload_params=false and worker.actor.offload.offload_optimizer=false"


@dataclass(frozen=True, slots=True)
class DeviceCheck:
    """What a run computes, and the setting that avoids it."""

    name: str
    compute: Callable[..., tuple[Tensor, Tensor]]  # on a device; returns what the device and what the CPU have found
    dtype: torch.dtype
    avoid: str
    options: Sequence[object] = ()
    ranks: int = 1  # processes, each with a device of its own on GPUs

    def run(self, rank: int = 0, meeting: str = "") -> float:
        """Return the largest difference as a share of the largest number.

        Args:
            rank: which of the `ranks` this process is.
            meeting: the path of a file that does not exist, by which they find one another.
        """
        device, options = find_hardware().device, list(self.options)
        if self.ranks > 1:
            options += [rank, self.ranks, meeting]
        found, exact = (tensor.detach() for tensor in self.compute(device, self.dtype, *options))
        if not found.isfinite().all():
            return float("inf")
        return float((found.double() - exact).abs().max() / exact.abs().max())


def list_checks(*, runs: bool = True) -> list[DeviceCheck]:
    """Return the checks of this machine; with `runs` also short trainings by each engine that is installed.

    With several GPUs also their collectives, and the trainings on two of them.
    """
    gpus = len(find_hardware().gpus)
    ranks = min(gpus or 2, RANKS)
    engines = [name for name in ("embedded", "vllm") if runs and (name != "vllm" or find_spec("vllm"))]
    causal = [(f"heads of {size}, causal", one, size, None) for one in (BF16, FP16, FP32) for size in (64, 128)]
    causal += [("heads of 80, causal", BF16, 80, None)]
    window = [("heads of 128, window", one, 128, 24) for one in (BF16, FP32)]
    sharded, shared, on_host = (False, False), (True, False), (False, True)  # options of `check_training`
    no_activations = "worker.actor.model.enable_activation_offload=false"
    return [
        *(
            DeviceCheck(f"attention, {what}", check_attention, one, PADDED, rest)
            for what, one, *rest in causal + window
        ),
        *(DeviceCheck("vision tower's attention, heads of 80", check_tower, one, PADDED) for one in (BF16, FP32)),
        *(DeviceCheck("log-probs and their gradients", check_head, one, "") for one in (BF16, FP32)),
        DeviceCheck("optimizer, adamw", check_optimizer, FP32, f"{STRATEGY}=adamw_bf16", ("adamw",)),
        DeviceCheck("optimizer, adamw_bf16", check_optimizer, BF16, f"{STRATEGY}=adamw", ("adamw_bf16",)),
        DeviceCheck("states to host memory and back", check_offload, FP32, NO_OFFLOAD),
        *(DeviceCheck("a training step, sharded", check_training, one, PADDED, sharded) for one in (BF16, FP32)),
        DeviceCheck("a training step that shares prompts", check_training, FP32, UNSHARED, shared),
        DeviceCheck("a training step, activations in host memory", check_training, FP32, no_activations, on_host),
        *(DeviceCheck("embedded engine", check_engine, one, OTHER["embedded"], (False,)) for one in (BF16, FP32)),
        DeviceCheck("embedded engine, steps as CUDA graphs", check_engine, FP32, EAGER, (True,)),
        *_list_runs(engines, 1),
        *(_list_together(ranks, engines if gpus > 1 else []) if ranks > 1 else []),
    ]


def _list_runs(engines: Sequence[str], devices: int) -> list[DeviceCheck]:
    on = "" if devices == 1 else f" on {devices} GPUs"
    return [
        DeviceCheck(f"`r1 train`, two steps with {name}{on}", check_run, BF16, OTHER[name] if devices == 1 else DIRECT,
                    (name, devices))
        for name in engines
    ]  # fmt: skip


def _list_together(ranks: int, engines: Sequence[str]) -> list[DeviceCheck]:
    collectives = DeviceCheck(f"collectives of {ranks} ranks", check_collectives, FP32, DIRECT, ranks=ranks)
    return [collectives, *_list_runs(engines, 2)]


def run_device_checks(checks: Iterable[DeviceCheck]) -> Iterator[Finding]:
    """Yield one finding for each check."""
    for check in checks:
        name = f"{check.name}, {str(check.dtype).removeprefix('torch.')}"
        # A kernel that fails spoils its process.
        with (
            Workers(check, check.ranks, memory_bytes=MEMORY, seconds=SECONDS) as workers,
            TemporaryDirectory() as folder,
        ):
            meeting = str(Path(folder, "meeting"))
            running = [workers.submit("run", rank, meeting) for rank in range(check.ranks)]
            try:
                worst = max(one.result() for one in running)
            except WorkerDied as error:
                yield _fault(check, name, str(error))
            except Exception as error:  # whatever a kernel, a driver or a library raises
                yield _fault(check, name, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            else:
                bound = BOUNDS[check.dtype]
                said = f"differs by {worst:.1e} of the largest number, at most {bound:g} is rounding"
                yield Finding("device.ok", "note", f"{name}: {said}") if worst <= bound else _fault(check, name, said)


def _fault(check: DeviceCheck, name: str, message: str) -> Finding:
    return Finding("device.failed", "error", f"{name}: {message}", f"set {check.avoid}" if check.avoid else "")
