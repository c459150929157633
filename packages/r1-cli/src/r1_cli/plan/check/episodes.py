"""Check what answers the policy of a multi-turn run, and the chat template that writes its turns."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from r1_cli.plan.check.findings import Finding, Level, Subject

if TYPE_CHECKING:
    from r1_cli.build.rows import OpenSource
    from r1_cli.plan.check.try_environment import Played
    from r1_rewards.environments.pool import EnvironmentPool
    from r1_rewards.environments.types import EnvironmentSetup

KEY = "episodes"
TURNS = 2  # of the scripted episode
FIX = "r1 env test {spec} shows what else goes wrong"


def check_episodes(subject: Subject) -> Iterator[Finding]:
    """Load the tools, the environment or the agent, describe the episodes, and play one on the first row.

    Raises ConfigError or DataError as `build.episodes.open_player` does.
    """
    if not subject.config.worker.rollout.multi_turn.enable:
        return
    from r1_cli.build.episodes import open_player
    from r1_cli.build.rendering import build_renderer
    from r1_cli.plan.announce import describe_player
    from r1_cli.train.episodes.player import EpisodePlayer
    from r1_rewards.environments.pool import EnvironmentPool

    with ExitStack() as stack:
        renderer = build_renderer(subject.config, subject.model)
        player = open_player(subject.config, subject.model, renderer, stack)
        for line in describe_player(player):
            yield Finding(KEY, "note", line)
        if player.environments.setup.agent:
            yield Finding(f"{KEY}.not played", "note", "no episode was played: an agent needs the policy")
        elif isinstance(player, EpisodePlayer) and isinstance(pool := player.environments, EnvironmentPool):
            for kind in pool.kinds:
                chosen = [one for one in subject.sources if player.sources.get(one.source.name, "") == kind]
                yield from _play_one(chosen, pool, kind)


def _play_one(sources: "Sequence[OpenSource]", pool: "EnvironmentPool", kind: str) -> Iterator[Finding]:
    """Play an episode of a kind with scripted turns, as `r1 env test` does, on the first row of its sources."""
    from r1_cli.plan.check.data import questions_of
    from r1_cli.plan.check.environment_turns import make_plans
    from r1_cli.plan.check.try_environment import play

    actor = pool.kinds[kind]
    question = next((one for source in sources for one in questions_of(source)), None)
    if question is None:
        told = f" of {kind}" if kind else ""
        yield Finding(f"{KEY}.not played", "note", f"no episode{told} was played: there is no row here")
        return
    row = {"answer": question.ground_truth, "ground_truth": question.ground_truth, **question.metadata}
    (played,) = play(pool, make_plans([(row, question.images)], actor.tools, 1, TURNS), 1, kind)
    yield from _findings(played, actor.setup)


def _findings(played: "Played", setup: "EnvironmentSetup") -> Iterator[Finding]:
    from r1_cli.plan.check.try_environment import describe_content, shorten

    spec = setup.environment or setup.tools[0]
    fix = FIX.format(spec=spec)
    if failure := played.failure:
        # What a turn's text can cause, a policy will cause; what fails before the first turn fails in every episode.
        level: Level = "warning" if played.results else "error"
        when = "at a scripted turn" if played.results else "at its first row"
        yield Finding(f"{KEY}.environment", level, f"{spec} fails {when}: {failure.cause}: {failure.message}", fix)
    for call in played.calls:
        if call.error:
            yield Finding(f"{KEY}.tool", "warning", f"the tool {call.name} fails: {call.error}", fix)
    if played.results and (added := describe_content(played.results[0].messages)):
        yield Finding(f"{KEY}.reset", "note", f"{spec}: reset() adds to the first row's prompt: {shorten(added)}")
