"""The embedded engine: group sampling in the caller's process, on any device."""

from r1_rollout.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
