"""What loggers are given: records, generations, and what they need to know of the run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Record = dict[str, float]


@dataclass(frozen=True, slots=True)
class Generation:
    """One logged validation answer. Example: `Generation("val.parquet:3", "How many?", "\\\\boxed{2}", "2", 1.0)`."""

    id: str
    prompt: str
    response: str
    ground_truth: str
    score: float


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a logger needs to know of the run when it opens."""

    project: str
    experiment: str
    folder: Path  # the run's checkpoint folder; logs live beside the checkpoints
    config: dict[str, Any]
    resumed_from: int  # the step the run goes on from; 0 for a new run


class Logger(Protocol):
    """One destination. A logger never ends a run: what it cannot deliver it says once, and goes on."""

    def log(self, step: int, record: Record) -> None: ...
    def log_generations(self, step: int, rows: list[dict[str, Any]]) -> None: ...
    def close(self) -> None: ...


class Console(Logger, Protocol):
    """The logger that is watched as the run goes."""

    def stage(self, name: str) -> None:
        """Show what the step that is running has come to."""
