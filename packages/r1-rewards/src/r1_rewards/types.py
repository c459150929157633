"""The inputs and outputs of verifiers, their errors, and what happens to samples that cannot be scored."""

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Literal, Protocol, Self, SupportsFloat, get_args

# Why a sample could not be scored.
Cause = Literal["timeout", "exception", "crash", "out_of_memory", "non_finite", "wrong_shape", "too_long", "remote"]
FailurePolicy = Literal["score", "drop", "stop"]  # give a failed sample a score, leave it out, or raise RewardFailure
EXPECTED = 'RewardInput(response="…", ground_truth="…")'


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One response to score.

    Example: `RewardInput(response="<think>…</think>\\\\boxed{3}", ground_truth="3", response_length=9)`
    """

    response: str
    ground_truth: str
    response_length: int = 0  # tokens
    prompt: str = ""  # as the model read it
    metadata: Mapping[str, object] = field(default_factory=dict)  # the data row's other columns; JSON values
    messages: Sequence[Mapping[str, object]] = ()  # the conversation before the response, OpenAI style; JSON values
    images: Sequence[object] = ()  # the prompt's pictures: PIL images, encoded bytes or paths
    step: int = 0  # of the training run
    source: str = ""  # which of several data sources the prompt is from


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sample could not be scored."""

    cause: Cause
    message: str


@dataclass(frozen=True, slots=True)
class Score:
    """One response's reward. `parts` holds every number of the verifier; each becomes a metric.

    Example: `Score(1.0, {"overall": 1.0, "accuracy": 1.0, "format": 1.0}, extracted="3", reason="the same text")`
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    error: Failure | None = None
    keep: bool = True  # False: leave the sample out, as the failure policy "drop" wants
    extracted: str | None = None  # the final answer that was read out of the response; None where nothing was read
    reason: str = ""  # why it got this score, in a few words; "" where the verifier does not say

    @property
    def is_correct(self) -> bool:
        """Whether the response is correct: by the verifier's `accuracy` if it reports one, else by its value."""
        return self.error is None and self.parts.get("accuracy", self.value) > 0.5


Outcome = Score | Failure  # of one response; a Score here is one that the verifier itself gave


def read_score(score: object) -> Outcome:
    """Convert a Score, a number or a mapping with `overall`; return a Failure for anything that is not finite."""
    if isinstance(score, Score):
        read = read_score({**score.parts, "overall": score.value})
        return replace(score, parts=read.parts) if isinstance(read, Score) else read
    named = score if isinstance(score, Mapping) else {"overall": score}
    if "overall" not in named:
        return Failure("wrong_shape", f"the score has no 'overall', only {sorted(map(str, named))}")
    parts = {}
    for key, value in named.items():
        if isinstance(value, (str, bytes)) or not isinstance(value, SupportsFloat):
            return Failure("wrong_shape", f"{key!r} is {str(value)[:80]!r}, not a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        except (TypeError, ValueError) as error:
            return Failure("wrong_shape", f"{key!r} is not one number: {error}")
        if not math.isfinite(number):
            return Failure("non_finite", f"{key!r} is {number}")
        parts[str(key)] = number
    return Score(parts["overall"], parts)


class RewardFailure(RuntimeError):
    """A sample could not be scored, and the failure policy is "stop"."""


@dataclass(frozen=True, slots=True)
class FailureRule:
    """The score of a failed sample; "stop" raises RewardFailure."""

    policy: FailurePolicy = "score"
    score: float = 0.0

    def __post_init__(self) -> None:
        if self.policy not in get_args(FailurePolicy):
            raise ValueError(f"failure_policy is 'score', 'drop' or 'stop', got {self.policy!r}")

    def apply(self, reward: str, index: int, outcome: Outcome) -> Score:
        if isinstance(outcome, Score):
            return outcome
        if self.policy == "stop":
            raise RewardFailure(
                f"the reward {reward!r} could not score response {index} ({outcome.cause}): {outcome.message}"
            )
        keep = self.policy == "score"
        return Score(self.score, {"overall": self.score} if keep else {}, outcome, keep)


class RewardSpecError(ValueError):
    """A reward that cannot be used as configured."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the known name nearest to `name`, and all known names."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1)
    suggestion = f"; did you mean {nearest[0]!r}?" if nearest else ""
    listing = f" (there are: {', '.join(known)})" if known else " (there are none)"
    return suggestion + listing


def check_inputs(inputs: Sequence[RewardInput]) -> None:
    if isinstance(inputs, RewardInput | str | bytes | Mapping):
        raise TypeError(f"a verifier takes a list of RewardInput, got one {type(inputs).__name__}: write [{EXPECTED}]")
    for number, item in enumerate(inputs):
        if not isinstance(item, RewardInput):
            raise TypeError(f"input {number} is a {type(item).__name__}, {str(item)[:80]!r}; write {EXPECTED}")
        if not isinstance(item.response, str):
            raise TypeError(f"the response of input {number} is a {type(item.response).__name__}; it must be a str")


class Verifier(Protocol):
    """Scores a batch; returns one score per input, in order, and never raises because of a response."""

    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score]: ...


class OpenVerifier(ABC):
    """A verifier that holds processes or connections until it is closed."""

    @property
    def per_sample(self) -> bool:
        """Whether a score depends on its own response only, bit for bit, so that responses may be scored one by one.

        False by default: a server may compare responses, and a model's logits depend on the padding.
        """
        return False

    @abstractmethod
    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score]: ...

    def close(self) -> None:  # noqa: B027 - some hold nothing
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
