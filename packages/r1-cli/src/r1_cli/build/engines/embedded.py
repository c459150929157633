"""The embedded engine, which runs in the learner's process on its device."""

from contextlib import ExitStack
from typing import TYPE_CHECKING

from r1_cli.build.engines import EngineSetup

if TYPE_CHECKING:
    from r1_rollout.types import Generator

IGNORES = {
    "gpu_memory_utilization": "the embedded engine takes what it needs",
    "max_num_batched_tokens": "the embedded engine batches by itself",
    "max_model_len": "the embedded engine goes as far as the prompt and response lengths",
    "enable_chunked_prefill": "the embedded engine fills prompts in one go",
    "limit_images": "the embedded engine takes any number of pictures",
    "disable_log_stats": "the embedded engine prints none",
}


def missing() -> str | None:
    return None


def preferred() -> bool:
    return False


def open_engine(setup: EngineSetup, stack: ExitStack) -> "Generator":
    """Build the engine. Raises ValueError if it cannot sample from this kind of model."""
    from r1_rollout.embedded import EmbeddedEngine

    return EmbeddedEngine(
        setup.load_weights(),
        end_token_ids=setup.end_token_ids,
        banned_token_ids=setup.banned_token_ids,
        max_sequences=setup.max_sequences,
        device=setup.hardware.device,
        read_only=setup.read_only,
        eager=setup.config.worker.rollout.enforce_eager,
        tokenizer=setup.model.tokenizer,
        prefix_cache_bytes=int(setup.config.worker.rollout.multi_turn.prefix_cache_gb * (1 << 30)),
        return_routed_experts=setup.config.worker.actor.router_replay,
    )
