"""The old place of `FailureRule`."""

from r1_rewards.errors import FailureRule as FailureRule
