"""Scores of episodes: the environment's own or the run's reward function, and the rewards of turns."""

from collections.abc import Sequence
from dataclasses import replace

from r1_cli.train.groups.group import SampledInput
from r1_cli.train.groups.trajectory import Trajectory
from r1_rewards.types import FailureRule, RewardInput, Score, Verifier


def score_episodes(verifier: Verifier, rule: FailureRule, inputs: Sequence[RewardInput]) -> list[Score]:
    """Return one score per episode, in order.

    An environment that failed gives what the failure policy of rewards says. An environment without a score of its own
    leaves the episode to the verifier. The rewards of turns are added, and reported as the part `turns`.

    Raises:
        RewardFailure: an environment failed, and the policy is "stop".
    """
    scores: dict[int, Score] = {}
    for index, item in enumerate(inputs):
        episode = item.completion if isinstance(item, SampledInput) else None
        if not isinstance(episode, Trajectory):
            continue
        if episode.failure is not None:
            scores[index] = rule.apply("environment", index, episode.failure)
        elif episode.score is not None:
            scores[index] = episode.score
    others = [index for index in range(len(inputs)) if index not in scores]
    scores |= dict(zip(others, verifier([inputs[index] for index in others]) if others else [], strict=True))
    return [_with_turns(scores[index], inputs[index]) for index in range(len(inputs))]


def _with_turns(score: Score, item: RewardInput) -> Score:
    episode = item.completion if isinstance(item, SampledInput) else None
    if not isinstance(episode, Trajectory) or score.error or not any(turn.reward for turn in episode.turns):
        return score
    turns = episode.turn_rewards
    return replace(score, value=score.value + turns, parts={**score.parts, "turns": turns})
