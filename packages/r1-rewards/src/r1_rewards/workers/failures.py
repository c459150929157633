"""What becomes of a response that could not be scored."""

from dataclasses import dataclass
from typing import get_args

from r1_rewards.types import FailurePolicy, Outcome, RewardFailure, Score


@dataclass(frozen=True, slots=True)
class FailureRule:
    """`policy` "score": it gets `score`; "drop": that, and the mark not to be kept; "stop": RewardFailure is raised."""

    policy: FailurePolicy = "score"
    score: float = 0.0

    def __post_init__(self) -> None:
        if self.policy not in get_args(FailurePolicy):
            raise ValueError(f"failure_policy is 'score', 'drop' or 'stop', got {self.policy!r}")

    def apply(self, reward: str, index: int, outcome: Outcome) -> Score:
        """Return the score of response `index` by `reward`. Raises RewardFailure under the policy "stop"."""
        if isinstance(outcome, Score):
            return outcome
        if self.policy == "stop":
            raise RewardFailure(
                f"the reward {reward!r} could not score response {index} ({outcome.cause}): {outcome.message}"
            )
        keep = self.policy == "score"
        return Score(self.score, {"overall": self.score} if keep else {}, outcome, keep)
