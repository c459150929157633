"""Tools and environments of multi-turn episodes, in worker processes that can be killed."""

from r1_rewards.environments.types import Observation as Observation
