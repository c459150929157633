"""Verifiers that score model answers, without torch.

`math`, `r1v` and `gsm8k` each have `score(response, ground_truth) -> Score`; `load` makes a batch verifier, run in
killable worker processes, of one of these names or of a user's `file.py:function`.
"""

from r1_rewards import gsm8k, math, r1v
from r1_rewards.load import load
from r1_rewards.pool import PooledVerifier
from r1_rewards.spec import RewardSpecError
from r1_rewards.types import Cause, Failure, RewardInput, Score, Verifier

__all__ = [
    "Cause",
    "Failure",
    "PooledVerifier",
    "RewardInput",
    "RewardSpecError",
    "Score",
    "Verifier",
    "gsm8k",
    "load",
    "math",
    "r1v",
]
