"""Rewards that are files of the user's, tried before a run: without torch, for a dry run takes a second."""

from collections.abc import Sequence

from r1_cli.config import RunConfig
from r1_cli.config.sources import Source
from r1_rewards.load import load
from r1_rewards.spec import parse_spec


def try_rewards(config: RunConfig, sources: Sequence[Source]) -> None:
    """Load the rewards that are files of the user's, each in a process of its own that then ends.

    Raises:
        RewardSpecError: one cannot be imported, is no function, or cannot be called with its keywords.
    """
    reward = config.worker.reward
    named = [(source.reward_function, source.reward_function_kwargs) for source in sources]
    named.append((reward.reward_function, reward.reward_function_kwargs))
    files = {(name, repr(kwargs)): (name, kwargs) for name, kwargs in named if name and parse_spec(name).path}
    for name, kwargs in files.values():
        load(name, kwargs).close()
