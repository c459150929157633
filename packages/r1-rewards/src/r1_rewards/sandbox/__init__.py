"""Run and grade untrusted programs behind the kernel's protections."""

import warnings

from r1_rewards.sandbox.execution import Execution, Sandbox, SandboxError, SandboxLimits, describe

__all__ = ["Execution", "Sandbox", "SandboxError", "SandboxLimits", "describe"]


def __getattr__(name: str) -> type[SandboxLimits]:
    if name == "Limits":
        warnings.warn("Limits is SandboxLimits now", DeprecationWarning, stacklevel=2)
        return SandboxLimits
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
