"""What becomes of an answer that could not be scored."""

from dataclasses import dataclass
from typing import get_args

from r1_rewards.types import Failure, FailurePolicy, RewardFailure, Score
from r1_rewards.workers.frames import Outcome


@dataclass(frozen=True, slots=True)
class FailureRule:
    """`policy` "score": it gets `score`; "drop": that, and the mark not to be kept; "stop": RewardFailure is raised."""

    policy: FailurePolicy = "score"
    score: float = 0.0

    def __post_init__(self) -> None:
        if self.policy not in get_args(FailurePolicy):
            raise ValueError(f"failure_policy is 'score', 'drop' or 'stop', got {self.policy!r}")

    def settle(self, reward: str, index: int, outcome: Outcome) -> Score:
        """Return the score of answer `index` by `reward`. Raises RewardFailure under the policy "stop"."""
        if "parts" in outcome:
            return Score(outcome["parts"]["overall"], outcome["parts"])
        failure = Failure(*outcome["failure"])
        if self.policy == "stop":
            raise RewardFailure(
                f"the reward {reward!r} could not score answer {index} ({failure.cause}): {failure.message}"
            )
        keep = self.policy == "score"
        return Score(self.score, {"overall": self.score} if keep else {}, failure, keep)
