"""Options of a vLLM engine, and vLLM's arguments for them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from r1_rollout.types import Json, JsonObject
from r1_rollout.vllm.limits import BANNED

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.32 makes room for
CPU_CACHE = 1 << 30  # bytes; vLLM would take a share of the whole machine
PROCESSOR = "r1_rollout.vllm.plain_logprobs:PlainLogprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    end_token_ids: frozenset[int]  # tokens that end an answer
    banned_token_ids: frozenset[int] = frozenset()  # never sampled, such as the placeholders of pictures
    dtype: str = "bfloat16"
    tokenizer: str | None = None  # a folder, where it is not the model's
    dummy_weights: bool = False  # start with random weights, because `active` will bring the right ones
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.6  # share of a GPU's memory for weights, activations and cache
    kv_cache_bytes: int | None = None  # the cache's size instead; on processors one GiB if not given
    max_model_len: int | None = None  # prompt and answer together; None: the model's own
    max_num_batched_tokens: int = 8192
    max_sequences: int = 256  # samples that decode at the same time
    enforce_eager: bool = False  # no CUDA graphs
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    limit_images: int = 0  # pictures a prompt that room is reserved for; 0: vLLM's own
    pixels: Mapping[str, int | None] = field(default_factory=dict)  # min_pixels and max_pixels of a picture, likewise
    lora_rank: int = 0  # the largest rank of an adapter; 0: none will come
    transfer: str | None = None  # backend of vLLM's weight transfer over which a sender elsewhere brings the weights
    starts_asleep: bool = False  # leave the device to others until `active` brings weights
    log_stats: bool = False
    trust_remote_code: bool = False
    hf_overrides: Mapping[str, Json] = field(default_factory=dict)  # changes to the model's configuration
    deadline: float = 600.0  # seconds that one call to vLLM, such as one step of all samples, may take

    def arguments(self, path: str, *, on_cpu: bool) -> JsonObject:
        lora = {"enable_lora": True, "max_lora_rank": self._room_for_rank, "max_loras": 1} if self.lora_rank else {}
        several = {"distributed_executor_backend": "mp"} if self.tensor_parallel_size > 1 else {}  # under Ray, too
        transfer = self.transfer or ("ipc" if self.tensor_parallel_size > 1 and not on_cpu else None)
        return {
            **{name: value for name, value in self._common(on_cpu).items() if value is not None},
            "model": path,
            "skip_tokenizer_init": not self.has_tokenizer(path),
            "tensor_parallel_size": self.tensor_parallel_size,
            "enable_chunked_prefill": self.enable_chunked_prefill,
            "enable_prefix_caching": self.enable_prefix_caching,
            "mm_processor_cache_gb": 0,  # prompts come processed
            "mm_device_do_normalize": False,  # and their pixels normalised
            "enable_sleep_mode": not on_cpu,
            "generation_config": "vllm",  # sampling is what the caller says and nothing else
            "logprobs_mode": "processed_logits",
            "logits_processors": [PROCESSOR],
            "weight_transfer_config": {"backend": transfer} if transfer else None,
            # Whose import makes backends of ours known to a worker.
            **({"worker_extension_cls": "r1_rollout.vllm.receiver.WeightReceiver"} if self.transfer else {}),
            **lora,
            **several,
        }

    def server_options(self, *, on_cpu: bool, transfer: str | None = None) -> JsonObject:
        """Return the options of `vllm serve`. `transfer`: the backend of direct weight transfer; None: a folder."""
        return {
            **self._common(on_cpu),
            "tensor_parallel_size": None if on_cpu else self.tensor_parallel_size,
            "no_enable_chunked_prefill": not self.enable_chunked_prefill and not on_cpu,
            "no_enable_prefix_caching": not self.enable_prefix_caching,
            # On the device a layer normalises pictures whose mean and deviation are buffers: dummy weights replace them
            # by noise, and no push brings them back, as no checkpoint has them.
            "no_mm_device_do_normalize": self.dummy_weights,
            "enable_lora": bool(self.lora_rank),
            "max_lora_rank": self._room_for_rank or None,
            "weight_transfer_config": {"backend": transfer} if transfer else None,
        }

    def _common(self, on_cpu: bool) -> JsonObject:
        cache = self.kv_cache_bytes or (CPU_CACHE if on_cpu and "VLLM_CPU_KVCACHE_SPACE" not in os.environ else None)
        return {
            "tokenizer": self.tokenizer,
            "trust_remote_code": self.trust_remote_code,
            "dtype": self.dtype,
            "load_format": "dummy" if self.dummy_weights else "auto",
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_bytes": cache,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": max(self.max_num_batched_tokens, self.max_sequences),
            "max_num_seqs": self.max_sequences,
            "enforce_eager": self.enforce_eager or on_cpu,
            "hf_overrides": dict(self.hf_overrides) or None,
            "mm_processor_kwargs": {name: value for name, value in self.pixels.items() if value is not None} or None,
            "limit_mm_per_prompt": {"image": self.limit_images} if self.limit_images else None,
            "disable_log_stats": not self.log_stats,
            "additional_config": {BANNED: sorted(self.banned_token_ids)},
        }

    @property
    def _room_for_rank(self) -> int:
        return next((room for room in LORA_RANKS if 0 < self.lora_rank <= room), self.lora_rank)

    def has_tokenizer(self, path: str) -> bool:
        folder = Path(self.tokenizer or path)
        return not folder.is_dir() or (folder / "tokenizer_config.json").is_file()


def explain_failed_start(path: str, error: Exception) -> str:
    message = " ".join(str(error).split())[:800]
    if "memory" in message.lower() or "KV cache" in message:
        advice = "Lower max_model_len, or change gpu_memory_utilization"
    elif "not supported" in message.lower() or "architectures" in message:
        advice = "Use the embedded engine for this model"
    else:
        advice = "The embedded engine needs no vLLM"
    return f"{path}: vLLM cannot start: {message} ({advice})"
