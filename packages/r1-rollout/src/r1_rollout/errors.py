"""What goes wrong while sampling, in words for users: all of it is a `RolloutError`.

After any of these the learner is what it was, so a run that ends by one can save its last step first.
"""


class RolloutError(Exception):
    """An engine did not sample, or not from the weights it was to have; the message says why, and what to do."""


class EngineError(RolloutError, RuntimeError):
    """The engine cannot start, has died or hangs; the message says which, and what to do."""


class PromptError(EngineError, ValueError):
    """A prompt that the engine cannot take; the engine itself is well."""


class EngineMemoryError(EngineError, MemoryError):
    """Too little memory for the samples that run; the engine itself is well."""


class NonFiniteLogits(RolloutError, FloatingPointError):
    """The model's logits hold NaN or infinity under the weights that the engine was given."""


class WeightsError(RolloutError, ValueError):
    """The weights given are not the engine's model's, or older than its own; the message names what differs."""


class StaleWeights(RolloutError, RuntimeError):
    """The engine does not compute what the learner does; `group` names the parameters at fault."""

    def __init__(self, group: str, found: str, *, version: int, seen: str, gap: float | None = None) -> None:
        self.group, self.version, self.gap = group, version, gap
        super().__init__(
            f"after the sync of weight version {version} {seen}. At fault: {group} ({found}). Nothing was "
            "sampled with these weights; the learner, and every checkpoint of it, is not touched by this"
        )


class ServerError(RolloutError):
    """Whatever goes wrong with servers."""
