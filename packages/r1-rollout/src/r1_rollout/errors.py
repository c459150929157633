"""What goes wrong with an engine, in words for users."""


class EngineError(RuntimeError):
    """The engine cannot start, has died or hangs; the message says which, and what to do."""


class PromptError(EngineError, ValueError):
    """A prompt that the engine cannot take; the engine itself is well."""


class EngineMemoryError(EngineError, MemoryError):
    """Too little memory for the samples that run; the engine itself is well."""
