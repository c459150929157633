"""Errors of rewards, and what happens to samples that cannot be scored."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from r1_rewards.types import FailurePolicy, Outcome, RewardFailure, Score


class RewardSpecError(ValueError):
    """A reward that cannot be used as configured."""


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


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the known name nearest to `name`, and all known names."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1)
    suggestion = f"; did you mean {nearest[0]!r}?" if nearest else ""
    listing = f" (there are: {', '.join(known)})" if known else " (there are none)"
    return suggestion + listing
