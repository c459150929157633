"""Run and grade untrusted programs behind the kernel's protections."""

from r1_rewards.sandbox.execution import Execution, Limits, Sandbox, SandboxError, describe

__all__ = ["Execution", "Limits", "Sandbox", "SandboxError", "describe"]
