"""A reward that a test takes from a module: its worker imports this file and nothing of the tests."""

from collections.abc import Mapping, Sequence


def module_level_reward(reward_inputs: Sequence[Mapping[str, str]]) -> list[float]:
    return [float(len(one["response"])) for one in reward_inputs]
