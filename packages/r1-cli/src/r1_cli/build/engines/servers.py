"""The pool of vLLM servers of `worker.rollout.servers`, started by r1 on separate GPUs, or given."""

import os
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from r1_cli.build.engines import EngineSetup
from r1_cli.build.engines.vllm import vllm_options
from r1_cli.config.rollout import TOKEN_VARIABLE

if TYPE_CHECKING:
    from r1_cli.config import RunConfig
    from r1_cli.hardware import Hardware
    from r1_rollout.types import Generator
    from r1_rollout.vllm.servers.direct import Backend

IGNORES: dict[str, str] = {}


def missing() -> str | None:
    return None


def preferred() -> bool:
    return False


def open_engine(setup: EngineSetup, stack: ExitStack) -> "Generator":
    """Build the pool. Its servers start with the first weights.

    Raises:
        ModelError: there are too few GPUs for the servers, or vLLM, needed for broadcasting, is missing.
    """
    from r1_cli.models.frozen_base import find_folder
    from r1_cli.models.load import ModelError
    from r1_rollout.vllm.client import Endpoint
    from r1_rollout.vllm.servers.pool import ServerPool
    from r1_rollout.vllm.servers.pooled_server import Deadlines
    from r1_rollout.vllm.servers.server import LocalServer, vllm_command

    config, hardware = setup.config, setup.hardware
    rollout, wanted = config.worker.rollout, config.worker.rollout.servers
    token = os.environ.get(TOKEN_VARIABLE)
    backend = transfer_backend(config, hardware)
    if backend == "nccl" and not find_spec("vllm"):
        raise ModelError("worker.rollout.servers.transfer=broadcast on GPUs needs vLLM here: r1-rollout[vllm]")
    options = vllm_options(setup).server_options(on_cpu=not hardware.on_gpu, transfer=backend)
    local = [
        LocalServer(
            vllm_command(setup.model.path, options),
            name=f"vLLM server {number}",
            environment=_device_environment(
                hardware, number, wanted.count, rollout.tensor_parallel_size, ranks=config.trainer.n_gpus_per_node
            ),
            start_timeout=wanted.start_timeout,
        )
        for number in range(wanted.count)
    ]
    pool = ServerPool(
        [*local, *(Endpoint(url, token) for url in wanted.urls)],
        end_token_ids=setup.end_token_ids,
        banned_token_ids=setup.banned_token_ids,
        max_sequences=setup.max_sequences,
        deadlines=Deadlines(stall=wanted.stall_timeout, load=wanted.load_timeout, recovery=wanted.recovery_timeout),
        folder=Path(wanted.weights_folder) if wanted.weights_folder else None,
        dtype=hardware.engine_dtype(rollout.dtype),
        broadcast=backend,
        base=find_folder(setup.model.path) if config.worker.actor.model.lora.used else None,
    )
    return stack.enter_context(pool)


def transfer_backend(config: "RunConfig", hardware: "Hardware") -> "Backend | None":
    """Return the backend that broadcasts weights; None if servers read them from files."""
    if config.worker.rollout.servers.transfer == "folder":
        return None
    return "nccl" if hardware.on_gpu else "r1_tcp"


def _device_environment(hardware: "Hardware", number: int, count: int, size: int, *, ranks: int = 1) -> dict[str, str]:
    """Assign GPUs behind the learner's `ranks` to server `number`, on CPUs all cores to each."""
    if not hardware.on_gpu:
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    devices = hardware.gpus
    if len(devices) < ranks + count * size:
        from r1_cli.models.load import ModelError

        raise ModelError(
            f"worker.rollout.servers.count={count} servers of tensor_parallel_size={size} need {count * size} GPUs "
            f"beside the learner's, and {len(devices)} are visible: lower them, or let one engine sample (count=0)"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[ranks + number * size : ranks + (number + 1) * size])}
