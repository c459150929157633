"""Group sampling with token log-probs and hot weight updates."""

from r1_rollout.loading import LoadedEngine, load
from r1_rollout.types import Completion, SamplingParams

__all__ = ["Completion", "LoadedEngine", "SamplingParams", "load"]
