"""Describe the episodes of a multi-turn run: what answers the policy, limits, and the chat template."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from r1_cli.train.episodes.player import EpisodePlayer


def describe_player(player: "EpisodePlayer") -> list[str]:
    """Return lines for `r1 check` and the plan at the start of a run."""
    template = [f"chat template: {line}" for line in player.renderer.info.lines()]
    return [_describe_environments(player), _describe_limits(player), *template]


def _describe_environments(player: "EpisodePlayer") -> str:
    environments = player.environments
    names = ", ".join(str(tool["function"]["name"]) for tool in environments.tools)
    if environments.setup.environment:
        actor = f"the environment {environments.setup.environment} answers the policy"
        actor += f" with the tools {names}" if names else ", reading the text of its turns"
    else:
        actor = f"tools answer the policy: {names}"
    judge = "its own score" if environments.scores else "the run's reward function"
    written = f", calls written as {player.renderer.tool_format.name}" if names else ""
    return f"episodes: {actor}{written}; {judge} judges an episode"


def _describe_limits(player: "EpisodePlayer") -> str:
    return f"limits of an episode: {', '.join(_limits(player))}; scheduling: {'rounds' if player.rounds else 'arrival'}"


def _limits(player: "EpisodePlayer") -> Iterator[str]:
    limits, setup = player.limits, player.environments.setup
    if limits.max_turns < limits.max_tokens:  # else the tokens end an episode first
        yield f"{limits.max_turns} turns of the policy"
    yield f"{limits.max_tokens:,} tokens behind the prompt"
    if limits.max_turn_tokens is not None:
        yield f"{limits.max_turn_tokens:,} tokens a turn"
    yield f"{setup.tool_timeout:g} s a call"
    if setup.episode_timeout is not None:
        yield f"{setup.episode_timeout:g} s in all"
    if player.max_concurrent is not None:
        yield f"{player.max_concurrent} episodes at a time"
