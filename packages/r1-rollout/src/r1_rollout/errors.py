"""Errors of sampling, all of them a `RolloutError`.

None of them changes the learner, so a run can save its last step first.
"""


class RolloutError(Exception):
    """An engine did not sample, or not from the expected weights; the message says why, and what to do."""


class EngineError(RolloutError, RuntimeError): ...


class PromptError(EngineError, ValueError):
    """A prompt that the engine cannot process; the engine itself is well."""


class EngineMemoryError(EngineError, MemoryError):
    """Too little memory for the running samples; the engine itself is well."""


class NonFiniteLogits(RolloutError, FloatingPointError):
    """The model's logits hold NaN or infinity under the engine's weights."""


class WeightsError(RolloutError, ValueError):
    """The weights are not the engine's model's, or older than its own; the message names what differs."""


class StaleWeights(RolloutError, RuntimeError):
    """The engine does not compute what the learner does; `group` names the parameters at fault."""

    def __init__(self, group: str, found: str, *, version: int, seen: str, gap: float | None = None) -> None:
        self.group, self.version, self.gap = group, version, gap
        super().__init__(
            f"after the sync of weight version {version} {seen}. At fault: {group} ({found}). Nothing was "
            "sampled with these weights; the learner, and every checkpoint of it, is not touched by this"
        )


class EnginesDisagree(EngineError):
    """Two engines of a pool have different weights."""


class ServerError(RolloutError): ...
