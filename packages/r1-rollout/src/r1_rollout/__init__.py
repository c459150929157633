"""Group sampling with token log-probs and hot weight updates."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r1_rollout.embedded import EmbeddedEngine as EmbeddedEngine
    from r1_rollout.fault import find_fault as find_fault
    from r1_rollout.loading import LoadedEngine as LoadedEngine
    from r1_rollout.loading import load as load
    from r1_rollout.probes import text_probes as text_probes
    from r1_rollout.types import Completion as Completion
    from r1_rollout.types import SamplingParams as SamplingParams
    from r1_rollout.vllm.client import Endpoint as Endpoint
    from r1_rollout.vllm.engine import VllmEngine as VllmEngine
    from r1_rollout.vllm.servers.pool import ServerPool as ServerPool
    from r1_rollout.vllm.servers.pooled_server import Deadlines as Deadlines
    from r1_rollout.vllm.servers.server import LocalServer as LocalServer
    from r1_rollout.vllm.servers.server import vllm_command as vllm_command
    from r1_rollout.weight_checks import TOLERANCE as TOLERANCE
    from r1_rollout.weight_checks import Canary as Canary
    from r1_rollout.weights import LocalWeights as LocalWeights

    __version__: str

# Public names, and the module that has each, imported at first use.
PUBLIC = {
    "Canary": "weight_checks",
    "Completion": "types",
    "Deadlines": "vllm.servers.pooled_server",
    "EmbeddedEngine": "embedded",
    "Endpoint": "vllm.client",
    "LoadedEngine": "loading",
    "LocalWeights": "weights",
    "LocalServer": "vllm.servers.server",
    "SamplingParams": "types",
    "ServerPool": "vllm.servers.pool",
    "TOLERANCE": "weight_checks",
    "VllmEngine": "vllm.engine",
    "find_fault": "fault",
    "load": "loading",
    "text_probes": "probes",
    "vllm_command": "vllm.servers.server",
}
__all__ = [*PUBLIC]


if not TYPE_CHECKING:  # which would accept any name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return import_module("importlib.metadata").version("r1-rollout")
        if name in PUBLIC:
            return getattr(import_module(f"r1_rollout.{PUBLIC[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *PUBLIC, "__version__"])
