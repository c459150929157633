"""Whether a step has anything to learn from. A run that has nothing for many steps says so, and ends."""

import logging
from collections.abc import Sequence

from r1_cli.train.groups.group import Group
from r1_core.types import Sample
from r1_rewards.types import RewardFailure

log = logging.getLogger("r1")


class NothingToLearn(RewardFailure):
    """Step after step the rewards told no response from another."""


def count_idle(idle: int, failed: int, groups: Sequence[Group], samples: Sequence[Sample]) -> tuple[int, int]:
    """Return how many steps in a row, this one included, had nothing to learn from, and in how many all rewards failed.

    Warns of it: one step whose rewards are equal is common in small batches; one whose rewards all failed is not.

    Args:
        idle, failed: the same before this step.
    """
    failures = describe_all_failed(groups)
    equal = describe_all_equal(groups, samples)
    if not failures and not equal:
        return 0, 0
    if failures or idle:
        log.warning("nothing to learn from, %d step(s) in a row: %s", idle + 1, failures or equal)
    return idle + 1, failed + 1 if failures else 0


def require_signal(idle: int, limit: int) -> None:
    """Raise NothingToLearn after `limit` steps in a row without anything to learn from; below 1: never."""
    if 0 < limit <= idle:
        raise NothingToLearn(
            f"{idle} steps in a row had nothing to learn from, see the warnings above: look at the reward (r1 reward "
            "test: is it constant? is its sign right?), at what r1 diagnose says of the run and at generations.jsonl, "
            "make the task easier (or harder, if all is right) or the groups larger; trainer.max_idle_steps=-1 goes on "
            "regardless"
        )


def require_rewards(failed: int, steps: int, limit: int) -> None:
    """Raise NothingToLearn at the end of a run if all rewards of all its steps failed, unless the `limit` is off."""
    if 0 < steps <= failed and limit > 0:
        raise NothingToLearn(
            f"no step learned anything: the reward failed on every response of all {steps} steps, see the warnings "
            "above; the weights are those that the run began with. Try the reward by itself: r1 reward test"
        )


def describe_all_failed(groups: Sequence[Group]) -> str:
    """Return what is to be said where not one response of a step could be scored, "" where one could."""
    scores = [score for group in groups for score in (*group.scores, *group.dropped)]
    errors = [score.error for score in scores if score.error]
    if len(errors) < len(scores):
        return ""
    return f"the reward failed on all {len(scores)} responses, on the first by {errors[0].cause}: {errors[0].message}"


def describe_all_equal(groups: Sequence[Group], samples: Sequence[Sample]) -> str:
    """Return what is to be said where every advantage of a step is 0, "" where one is not."""
    if any(sample.advantages is not None and bool(sample.advantages.any()) for sample in samples):
        return ""
    rewards = {reward for group in groups for reward in group.rewards}
    if len(rewards) == 1:
        return f"all {len(samples)} rewards are {rewards.pop():g}, so that every advantage is 0"
    return f"rewards differ between the {len(groups)} groups, within none, so that every advantage is 0"
