"""What a verifier is given and what it gives back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Cause = Literal["timeout", "exception", "crash", "non_finite", "wrong_shape"]


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One answer to score.

    Example: `RewardInput(response="<think>…</think>\\\\boxed{3}", ground_truth="3", response_length=9)`
    """

    response: str
    ground_truth: str
    response_length: int = 0  # tokens
    prompt: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # the data row's other columns; JSON values


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sample could not be scored. A failure is data: it is counted and shown, and the run goes on."""

    cause: Cause
    message: str


@dataclass(frozen=True, slots=True)
class Score:
    """One answer's reward. `parts` holds every number the verifier reported, each of which becomes a metric.

    Example: `Score(value=1.0, parts={"overall": 1.0, "accuracy": 1.0, "format": 1.0})`
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    error: Failure | None = None


class Verifier(Protocol):
    """Scores a batch; returns one score per input, in order, and never raises because of an answer."""

    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score]: ...
