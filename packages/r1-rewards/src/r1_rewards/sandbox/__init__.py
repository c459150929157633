"""Untrusted programs, run and graded behind the kernel's own protections."""

from r1_rewards.sandbox.execution import Execution, Limits, Sandbox, SandboxError, describe

__all__ = ["Execution", "Limits", "Sandbox", "SandboxError", "describe"]
