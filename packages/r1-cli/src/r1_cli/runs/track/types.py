"""Records, generations and run information for loggers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from r1_cli.runs.history import JsonObject

Record = dict[str, float]


@dataclass(frozen=True, slots=True)
class Generation:
    r"""One response as a line of `generations.jsonl`.

    Example: `Generation("val", "val.parquet:3", 0, "How many?", "\\boxed{2}", "2", 1.0, {"accuracy": 1.0}, "2", …)`.
    """

    split: Literal["train", "val"]
    id: str  # of the prompt
    sample: int  # its place among the responses to the prompt
    prompt: str
    response: str
    ground_truth: str
    score: float
    parts: Mapping[str, float]  # every number that the verifier reported
    extracted: str | None  # the final answer that the verifier read out of the response
    reason: str  # why the verifier gave this score, where it says so
    failure: str | None  # why it could not be scored
    reward: float  # what the estimator saw
    tokens: int
    finish_reason: str
    pictures: int  # of the prompt


@dataclass(frozen=True, slots=True)
class RunInfo:
    project: str
    experiment: str
    folder: Path  # the run's checkpoint folder; logs live beside the checkpoints
    config: JsonObject
    resumed_from: int  # the step the run goes on from; 0 for a new run


class Logger(Protocol):
    """One destination. It never ends a run: it reports a failure once and is dropped."""

    def log(self, step: int, record: Record) -> None: ...
    def log_generations(self, step: int, rows: list[JsonObject]) -> None: ...
    def close(self) -> None: ...
