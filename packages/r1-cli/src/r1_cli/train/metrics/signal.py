"""End a run that has no learning signal for many steps."""

import logging
from collections.abc import Sequence

from r1_cli.train.groups.group import Group
from r1_core.types import Sample
from r1_rewards.types import RewardFailure

log = logging.getLogger("r1")


class NothingToLearn(RewardFailure):
    """No step had a learning signal."""


def count_idle(idle: int, failed: int, groups: Sequence[Group], samples: Sequence[Sample]) -> tuple[int, int]:
    """Return how many steps in a row, including this one, had no signal, and in how many all rewards failed.

    A single step without signal is common in small batches, so logging starts with the second in a row.
    """
    failures = describe_all_failed(groups)
    equal = describe_all_equal(groups, samples)
    if not failures and not equal:
        return 0, 0
    if failures or idle:
        log.warning("nothing to learn from, %d step(s) in a row: %s", idle + 1, failures or equal)
    return idle + 1, failed + 1 if failures else 0


def require_signal(idle: int, limit: int) -> None:
    """Raise NothingToLearn after `limit` steps in a row without signal; never if it is below 1."""
    if 0 < limit <= idle:
        raise NothingToLearn(
            f"{idle} steps in a row had nothing to learn from, see the warnings above. Test the reward with r1 reward "
            "test (is it constant? is its sign right?), run r1 diagnose, read generations.jsonl. Make the task easier "
            "(or harder, if all is correct) or the groups larger. trainer.max_idle_steps=-1 switches this check off"
        )


def require_rewards(failed: int, steps: int, limit: int) -> None:
    """Raise NothingToLearn if all rewards of all steps failed; never if `limit` is below 1."""
    if 0 < steps <= failed and limit > 0:
        raise NothingToLearn(
            f"no step learned anything: the reward failed on every response of all {steps} steps, see the warnings "
            "above; the weights have not changed. Test the reward by itself: r1 reward test"
        )


def describe_all_failed(groups: Sequence[Group]) -> str:
    """Return a message if no response of the step could be scored, else ""."""
    scores = [score for group in groups for score in (*group.scores, *group.dropped)]
    errors = [score.error for score in scores if score.error]
    if len(errors) < len(scores):
        return ""
    return f"the reward failed on all {len(scores)} responses, on the first by {errors[0].cause}: {errors[0].message}"


def describe_all_equal(groups: Sequence[Group], samples: Sequence[Sample]) -> str:
    """Return a message if all advantages of the step are 0, else ""."""
    if any(sample.advantages is not None and bool(sample.advantages.any()) for sample in samples):
        return ""
    rewards = {reward for group in groups for reward in group.rewards}
    if len(rewards) == 1:
        return f"all {len(samples)} rewards are {rewards.pop():g}, so that every advantage is 0"
    return f"rewards differ between the {len(groups)} groups, within none, so that every advantage is 0"
