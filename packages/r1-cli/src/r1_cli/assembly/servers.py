"""The pool of vLLM servers of `worker.rollout.servers`: those that r1 starts, each on GPUs of its own, or is given."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from r1_cli.config import RunConfig
from r1_cli.hardware import Hardware
from r1_cli.models import load as models
from r1_cli.models.files import ModelFiles
from r1_rollout.vllm.client import Endpoint
from r1_rollout.vllm.servers.pool import ServerPool
from r1_rollout.vllm.servers.server import LocalServer, vllm_command
from r1_rollout.vllm.servers.supervisor import Deadlines
from r1_rollout.vllm.servers.transfer import Backend

TOKEN_VARIABLE = "R1_SERVERS_TOKEN"  # the token of given servers: a secret, so not a key of the configuration


def build_server_pool(
    config: RunConfig, hardware: Hardware, model: ModelFiles, end_token_ids: frozenset[int], max_sequences: int
) -> ServerPool:
    """Make the pool; its servers are started when it first gets weights, and stopped by its `close`.

    Args:
        max_sequences: samples that a server decodes at the same time.

    Raises:
        ModelError: there are too few GPUs for the servers, no token for the given ones, or no vLLM to broadcast with.
    """
    rollout, wanted = config.worker.rollout, config.worker.rollout.servers
    token = os.environ.get(TOKEN_VARIABLE)
    if wanted.urls and not token:
        raise models.ModelError(f"worker.rollout.servers.urls: put the servers' token into {TOKEN_VARIABLE}")
    backend = transfer_backend(config, hardware)
    if backend == "nccl" and not find_spec("vllm"):
        raise models.ModelError("worker.rollout.servers.transfer=broadcast on GPUs needs vLLM here: r1-rollout[vllm]")
    banned = models.media_token_ids(model.config, model.tokenizer)
    dtype = hardware.engine_dtype(rollout.dtype)
    command = vllm_command(model.path, server_options(config, hardware, model, banned, max_sequences))
    local = [
        LocalServer(
            command,
            name=f"vLLM server {number}",
            environment=_device_environment(hardware, number, wanted.count, rollout.tensor_parallel_size),
            start_timeout=wanted.start_timeout,
        )
        for number in range(wanted.count)
    ]
    return ServerPool(
        [*local, *(Endpoint(url, token) for url in wanted.urls)],
        end_token_ids=end_token_ids,
        banned_token_ids=banned,
        max_sequences=max_sequences,
        deadlines=Deadlines(stall=wanted.stall_timeout, load=wanted.load_timeout, recovery=wanted.recovery_timeout),
        folder=Path(wanted.weights_folder) if wanted.weights_folder else None,
        dtype=dtype,
        broadcast=backend,
    )


def transfer_backend(config: RunConfig, hardware: Hardware) -> Backend | None:
    """Return what weights are broadcast over, for which servers must compute on what the learner does; None: files."""
    if config.worker.rollout.servers.transfer == "folder":
        return None
    return "nccl" if hardware.on_gpu else "r1_tcp"


def server_options(
    config: RunConfig, hardware: Hardware, model: ModelFiles, banned: frozenset[int], max_sequences: int
) -> dict[str, Any]:
    """Return the options of `vllm serve` that the keys of `worker.rollout` stand for."""
    rollout, data, settings = config.worker.rollout, config.data, config.worker.actor.model
    on_cpu = not hardware.on_gpu
    pixels = {"min_pixels": data.min_pixels, "max_pixels": data.max_pixels} if model.vision_language else {}
    backend = transfer_backend(config, hardware)
    return {
        "load_format": "dummy",  # a push comes before the first request
        # On the device a layer normalises pictures whose mean and deviation are buffers: dummy weights replace them by
        # noise, and no push brings them back, as no checkpoint has them.
        "no_mm_device_do_normalize": model.vision_language,
        "tokenizer": settings.tokenizer_path,
        "hf_overrides": settings.override_config or None,
        "trust_remote_code": settings.trust_remote_code,
        "dtype": str(hardware.engine_dtype(rollout.dtype)).removeprefix("torch."),
        "tensor_parallel_size": None if on_cpu else rollout.tensor_parallel_size,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "kv_cache_memory_bytes": 2**30 if on_cpu else None,  # vLLM would take a share of the whole machine
        "max_model_len": rollout.max_model_len or data.max_prompt_length + data.max_response_length,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, max_sequences),
        "max_num_seqs": max_sequences,
        "no_enable_chunked_prefill": not rollout.enable_chunked_prefill and not on_cpu,
        "enforce_eager": rollout.enforce_eager or on_cpu,
        "disable_log_stats": rollout.disable_log_stats,
        "mm_processor_kwargs": {name: value for name, value in pixels.items() if value is not None} or None,
        "limit_mm_per_prompt": {"image": rollout.limit_images} if rollout.limit_images else None,
        "additional_config": {"r1_banned_token_ids": sorted(banned)},
        "weight_transfer_config": {"backend": backend} if backend else None,
    }


def _device_environment(hardware: Hardware, number: int, count: int, size: int) -> dict[str, str]:
    """Give server `number` its GPUs, those behind the learner's; servers on processors share all of them."""
    if not hardware.on_gpu:
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    devices = hardware.gpus
    if len(devices) < 1 + count * size:
        raise models.ModelError(
            f"worker.rollout.servers.count={count} servers of tensor_parallel_size={size} need {count * size} GPUs "
            f"beside the learner's, and {len(devices)} are visible: lower them, or let one engine sample (count=0)"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[1 + number * size : 1 + (number + 1) * size])}
