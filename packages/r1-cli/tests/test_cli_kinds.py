"""Sources whose rows are answered by tools or an environment of their own, in one run."""

import logging
from contextlib import ExitStack
from dataclasses import replace

import pytest
from cli_players import LIMITS, PARAMS, TOYS, ScriptedEngine, Toy, call

from r1_cli.plan.announce import describe_player
from r1_cli.train.episodes.player import EpisodePlayer
from r1_cli.train.groups.trajectory import Trajectory
from r1_data.turns.probe import probe_template
from r1_data.turns.turn_renderer import TurnRenderer
from r1_data.types import Example
from r1_rewards.environments.pool import EnvironmentPool
from r1_rewards.environments.types import EnvironmentSetup


def test_each_source_is_answered_by_its_own_tools_or_environment() -> None:
    toy = Toy()
    first, second = toy.prompts("3", "2")
    prompts = [replace(first, source="sums"), replace(second, source="pictures")]
    engine = ScriptedEngine(toy, [call("calculator", expression="6*7"), "Done.", "Never said."])
    others = {"pictures": EnvironmentSetup(environment=f"{TOYS}:Judge", tool_timeout=20.0)}
    with ExitStack() as stack:
        pool = stack.enter_context(EnvironmentPool(EnvironmentSetup(tools=["calculator"]), workers=2, others=others))
        info = probe_template(toy.renderer, end_token_ids=[toy.end])
        turns, plain = (TurnRenderer(toy.renderer, info, tools=tools) for tools in (pool.tools, ()))
        player = EpisodePlayer(
            pool, turns, toy.tokenizer, frozenset({toy.end}), replace(LIMITS, max_tokens=900, max_turn_tokens=None),
            sources={"pictures": "pictures"}, renderers={"pictures": plain},
        )  # fmt: skip
        found = dict(player.generate(engine, prompts, replace(PARAMS, max_tokens=900, n=1)))
        sums, pictures = (one for index in range(2) for one in found[index])
        assert isinstance(sums, Trajectory)
        assert isinstance(pictures, Trajectory)
        assert (sums.stop_reason, [one.tool for one in sums.calls], sums.score) == ("answered", ["calculator"], None)
        assert (pictures.stop_reason, [one.tool for one in pictures.calls]) == ("done", ["step"] * 3)
        assert pictures.score is not None
        assert pictures.score.value == 3.0
        tags = ("</tool_call>",)
        assert engine.stops == {
            "row:0": tags, "row:0/0/1": tags, "row:1": (), "row:1/0/1": (), "row:1/0/2": (),
        }  # fmt: skip
        lines = describe_player(player)
        assert lines[0].startswith("episodes: tools answer the policy: calculator, calls written as hermes")
        assert lines[1].startswith(f"episodes of pictures: the environment {TOYS}:Judge answers the policy, reading")
        example = Example("row:1", [{"role": "user", "content": "?"}], (), "3", source="sums")
        assert "calculator" in str(player.prepare(example).messages)
        assert player.prepare(replace(example, source="pictures")) == replace(example, source="pictures")
        assert "calculator" in str(player.prepare(replace(example, source="others")).messages)


@pytest.mark.parametrize(("name", "warned"), [("Album", True), ("Paying", False), ("Judge", False)])
def test_an_environment_without_any_reward_is_warned_of_once(
    name: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    toy = Toy()
    with ExitStack() as stack, caplog.at_level(logging.WARNING, "r1"):
        player = replace(toy.player(stack, name), needs_score={""})
        for _ in range(2):
            engine = ScriptedEngine(toy, ["a", "b", "c"], ["a", "b", "c"])
            list(player.generate(engine, toy.prompts("3"), replace(PARAMS, n=2)))
    assert [record.getMessage() for record in caplog.records] == warned * [
        f"{TOYS}:Album gave no reward in the first 2 episodes, whose scores are all 0: it has no score(), and "
        "worker.reward.reward_function is missing"
    ]
