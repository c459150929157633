import json
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
from cli_players import LIMITS, PARAMS, ScriptedEngine, Toy, call

from r1_cli.build.episodes import score_episodes
from r1_cli.train.episodes.episode import Episode, EpisodeLimits
from r1_cli.train.episodes.player import EpisodePlayer, Play
from r1_cli.train.groups.group import to_reward_inputs
from r1_cli.train.groups.saved_episodes import load_episodes, save_episodes
from r1_cli.train.groups.trajectory import Trajectory, describe_turns
from r1_cli.train.metrics.step import episode_metrics
from r1_data.turns.probe import probe_template
from r1_data.turns.turn_renderer import TurnRenderer
from r1_data.types import Prompt
from r1_rewards.environments.pool import EnvironmentPool
from r1_rewards.environments.types import EnvironmentSetup
from r1_rewards.types import FailureRule, RewardFailure, Score
from r1_rollout.errors import EngineError
from r1_rollout.types import Completion


def test_each_turn_goes_on_from_the_exact_tokens_before_it(toy: Toy, groups: list[list[Trajectory]]) -> None:
    for episode in (one for group in groups for one in group):
        assert [turn.role for turn in episode.turns] == ["assistant", "environment"] * 3
        assert [turn.begin for turn in episode.turns] == [0, *(turn.end for turn in episode.turns[:-1])]
        assert episode.turns[-1].end == episode.turns[-1].begin  # nobody reads the last answer
        assert episode.turns[-1].end == len(episode.token_ids)
        by_role = np.concatenate([[turn.role == "assistant"] * (turn.end - turn.begin) for turn in episode.turns])
        assert episode.sampled.tolist() == by_role.tolist()
        for turn in episode.assistant_turns:
            tokens = episode.token_ids[turn.begin : turn.end].tolist()
            assert toy.tokenizer.decode(tokens, skip_special_tokens=True) == turn.messages[0]["content"]
            assert 1 <= len(tokens) <= 9
            assert (turn.finish_reason == "stop") == (tokens[-1] == toy.end)
        assert not episode.logprobs[~episode.sampled].any()
        assert episode.stop_reason == "done"


def test_the_text_of_an_environment_spells_no_control_token(toy: Toy, groups: list[list[Trajectory]]) -> None:
    answers = [(episode, turn) for group in groups for episode in group for turn in episode.turns[1:4:2]]
    for episode, turn in answers:
        tokens = episode.token_ids[turn.begin : turn.end].tolist()
        cut = episode.turns[episode.turns.index(turn) - 1].finish_reason == "length"
        assert tokens.count(toy.end) == 1 + cut  # behind the user's message, and behind a turn that was cut


def test_engine_and_model_agree_over_an_episode_with_a_picture_in_its_middle(
    toy: Toy, prompts: list[Prompt], groups: list[list[Trajectory]]
) -> None:
    for prompt, group in zip(prompts, groups, strict=True):
        for sample in (sample for episode in group for sample in episode.to_samples(prompt, 0, 0.0)):
            inputs = {
                name: torch.cat([prompt.model_inputs[name], value]) for name, value in sample.later_inputs.items()
            }
            ids = sample.token_ids[None]
            kinds = (ids == toy.model.config.image_token_id).int()
            own, _ = toy.model.model.get_rope_index(
                input_ids=ids, mm_token_type_ids=kinds, image_grid_thw=inputs["image_grid_thw"]
            )
            assert torch.equal(own[:, 0], sample.position_ids[1:])
            with torch.inference_mode():
                logits = toy.model(input_ids=ids, position_ids=own, mm_token_type_ids=kinds, **inputs).logits[0, :-1]
            expected = logits.float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            mask = sample.loss_mask[1:]
            assert sample.rollout_logprobs is not None
            assert (expected - sample.rollout_logprobs[1:])[mask].abs().max() < 2e-5
            assert mask.any()


def test_rounds_sample_the_same_tokens_however_long_the_environment_takes(
    toy: Toy, prompts: list[Prompt], groups: list[list[Trajectory]]
) -> None:
    with ExitStack() as stack:
        again = toy.play(toy.player(stack, seconds=0.003), prompts)
    for group, same in zip(groups, again, strict=True):
        for episode, repeated in zip(group, same, strict=True):
            assert episode == repeated  # tokens and log-probs, to the bit


def test_arrival_samples_the_same_tokens_up_to_rounding(toy: Toy, prompts: list[Prompt]) -> None:
    with ExitStack() as stack:
        found = toy.play(toy.player(stack, rounds=False, seconds=0.003), prompts)
        several = toy.play(replace(toy.player(stack, rounds=False), max_concurrent=3), prompts)
    for group, same in zip(found, several, strict=True):
        assert [one.token_ids.tolist() for one in group] == [one.token_ids.tolist() for one in same]
        assert all(np.abs(one.logprobs - two.logprobs).max() < 1e-4 for one, two in zip(group, same, strict=True))


def test_the_engine_reports_how_busy_it_was_and_prefills_each_token_once(toy: Toy, prompts: list[Prompt]) -> None:
    with ExitStack() as stack:
        player = toy.player(stack, rounds=False, seconds=0.003)
        groups = toy.play(player, prompts)
        found = player.use.metrics()
        assert player.use.metrics() == {}
        player = replace(toy.player(stack, rounds=True, seconds=0.02), use=player.use)
        toy.play(player, prompts)
    tokens = sum(len(p.token_ids) + len(e.token_ids) for p, g in zip(prompts, groups, strict=True) for e in g)
    # A group's prompt is computed once, then what is new: the answers, and the last token of the turn before each.
    new = sum(
        len(one.token_ids) - one.sampled_length + len(one.assistant_turns) - 1 for group in groups for one in group
    )
    prefilled = sum(len(prompt.token_ids) for prompt in prompts) + new
    assert found["gen/prefilled_per_token"] == prefilled / tokens
    assert 0 < found["gen/busy"] <= 1
    waited = player.use.metrics()
    assert waited["timing_s/tools"] > 0
    assert waited["gen/busy"] < 1


def test_a_tool_starts_when_its_own_episodes_turn_ends(toy: Toy, prompts: list[Prompt]) -> None:
    """Samples of a group come one by one: the first goes on before the others have come."""

    class OneByOne(ScriptedEngine):
        def poll(self, timeout: float | None = None) -> list[tuple[str, list[Completion]]]:
            if self.finished and len(self.asked) == 1 and not self.given:
                self.given = True
                return [self.finished.pop(0)]
            return [self.finished.pop(0)] if self.finished and len(self.asked) > 1 else []

        given = False

    engine = OneByOne(toy, ["a", "b", "c"], ["a", "b", "c"], ["a", "b", "c"])
    with ExitStack() as stack:
        player = toy.player(stack, rounds=False)
        ((_, group),) = player.generate(engine, prompts[:1], PARAMS)
    assert [key for key, _ in engine.asked][:2] == [prompts[0].id, f"{prompts[0].id}/0/1"]
    assert len(group) == 3


def test_a_verifier_gets_the_last_turn_and_the_conversation_before_it(
    toy: Toy, prompts: list[Prompt], groups: list[list[Trajectory]]
) -> None:
    for item, episode in zip(to_reward_inputs(prompts[0], groups[0], toy.tokenizer), groups[0], strict=True):
        assert item.response == episode.assistant_turns[-1].messages[0]["content"]
        assert item.response_length == episode.sampled.sum()
        assert [message["role"] for message in item.messages] == ["user", "assistant", "user", "assistant", "user"]
        assert json.loads(json.dumps(item.messages))[-1]["content"][-1] == {"type": "image"}
        assert [picture.size for picture in item.images] == [(56, 56), (56, 84)]


def test_an_environment_judges_its_episodes_and_others_go_to_the_verifier(toy: Toy, prompts: list[Prompt]) -> None:
    asked: list[int] = []

    def verifier(inputs: object) -> list[Score]:
        asked.append(len(inputs))
        return [Score(-1.0) for _ in inputs]

    with ExitStack() as stack:
        judged = toy.play(toy.player(stack, "Judge"), prompts)
    values = [
        [
            score.value
            for score in score_episodes(verifier, FailureRule(), to_reward_inputs(prompt, group, toy.tokenizer))
        ]
        for prompt, group in zip(prompts, judged, strict=True)
    ]
    assert values == [[30.0] * 3, [3.0] * 3]
    assert not asked


def test_rewards_of_turns_stand_on_their_last_tokens_and_add_up_to_the_score(toy: Toy, prompts: list[Prompt]) -> None:
    with ExitStack() as stack:
        [group] = toy.play(toy.player(stack, "Paying"), prompts[:1])
    inputs = to_reward_inputs(prompts[0], group, toy.tokenizer)
    scores = score_episodes(lambda inputs: [Score(2.0, {"accuracy": 2.0}) for _ in inputs], FailureRule(), inputs)
    assert scores == [Score(2.75, {"accuracy": 2.0, "turns": 0.75})] * 3
    states = set()
    for episode in group:
        [sample] = episode.to_samples(prompts[0], 0, 2.75)
        start = len(prompts[0].token_ids)
        assert sample.reward == 2.0
        assert sample.token_rewards is not None
        assert sample.turn_ids is not None
        assert sample.state_ids is not None
        paid = {int(place): float(sample.token_rewards[place]) for place in sample.token_rewards.nonzero()[:, 0]}
        first, _, last = episode.assistant_turns
        assert paid == {start + first.end - 1: 0.5, start + last.end - 1: 0.25}
        assert sample.turn_ids[sample.loss_mask].unique().tolist() == [0, 1, 2]
        assert (sample.turn_ids[~sample.loss_mask] == -1).all()
        assert not sample.state_ids[~sample.loss_mask].any()
        states |= {tuple(sample.state_ids[start + turn.begin].item() for turn in episode.assistant_turns)}
    assert len(states) == 1  # the episodes of a group begin alike, and the environment names the other states


def test_an_environment_that_dies_costs_its_own_episodes_only(toy: Toy) -> None:
    prompts = toy.prompts("3", "die", "2")
    with ExitStack() as stack:
        groups = toy.play(toy.player(stack, "Mortal", rounds=False), prompts)
    stops = [{episode.stop_reason for episode in group} for group in groups]
    assert stops == [{"done"}, {"failed"}, {"done"}]
    inputs = to_reward_inputs(prompts[1], groups[1], toy.tokenizer)
    scores = score_episodes(lambda inputs: [], FailureRule("drop"), inputs)
    assert [score.keep for score in scores] == [False] * 3
    assert all(score.error and "code 3" in score.error.message for score in scores)


def test_a_reset_or_a_score_that_fails_is_scored_dropped_or_stops_the_run(toy: Toy) -> None:
    prompts = toy.prompts("reset", "score", "3")
    with ExitStack() as stack:
        groups = toy.play(toy.player(stack, "Failing"), prompts)
    assert [{(one.stop_reason, len(one.assistant_turns)) for one in group} for group in groups] == [
        {("failed", 1)}, {("done", 3)}, {("done", 3)},
    ]  # fmt: skip
    inputs = [
        one for pair in zip(prompts, groups, strict=True) for one in to_reward_inputs(*pair, tokenizer=toy.tokenizer)
    ]
    scored = score_episodes(lambda inputs: [], FailureRule("score", -1.0), inputs)
    assert [(score.value, score.keep) for score in scored[::3]] == [(-1.0, True), (-1.0, True), (30.0, True)]
    dropped = score_episodes(lambda inputs: [], FailureRule("drop"), inputs)
    assert [score.keep for score in dropped[::3]] == [False, False, True]
    with pytest.raises(RewardFailure, match="RuntimeError: no reset"):
        score_episodes(lambda inputs: [], FailureRule("stop"), inputs)


def test_an_engine_that_dies_in_an_episode_ends_its_environments(toy: Toy, prompts: list[Prompt]) -> None:
    class Dying(ScriptedEngine):
        def poll(self, timeout: float | None = None) -> list[tuple[str, list[Completion]]]:
            if len(self.asked) > len(prompts):
                raise EngineError("the engine is gone")
            return super().poll(timeout)

    with ExitStack() as stack:
        player = toy.player(stack)
        with pytest.raises(EngineError, match="the engine is gone"):
            dict(player.generate(Dying(toy, *[["one", "two"]] * 3), prompts, PARAMS))
        again = toy.play(player, prompts)  # the same episodes, anew
    assert {one.stop_reason for group in again for one in group} == {"done"}


def test_a_picture_that_cannot_be_used_becomes_an_error_text(toy: Toy, prompts: list[Prompt]) -> None:
    answer = {"role": "user", "content": [{"type": "image", "image": b"no picture"}]}
    episode = Episode(prompts[0], 0, LIMITS)
    episode.add_turn(Completion([toy.end], [-0.1], "stop", 7), {"role": "assistant", "content": ""})
    with ExitStack() as stack:
        play = Play(toy.player(stack), ScriptedEngine(toy), prompts, 1)
        piece = play._continue(episode, [answer])
    assert piece.text.startswith("\n<|im_start|>user\nerror: ")
    assert not piece.model_inputs


def test_a_limit_ends_an_episode_and_an_answer_that_does_not_fit_is_left_out_whole(
    toy: Toy, prompts: list[Prompt]
) -> None:
    for most, turns in ((90, 2), (24, 4)):
        with ExitStack() as stack:
            player = toy.player(stack)
            limits = replace(player.limits, max_turns=turns, max_turn_tokens=6)
            with toy.engine.active():
                params = replace(PARAMS, max_tokens=most)
                found = dict(replace(player, limits=limits).generate(toy.engine, prompts[:1], params))
        for episode in found[0]:
            assert isinstance(episode, Trajectory)
            assert episode.stop_reason == ("max_turns" if turns == 2 else "max_tokens")
            assert episode.finish_reason == "length"
            assert len(episode.token_ids) <= most
            assert episode.sampled[-1]


def test_an_episode_survives_a_checkpoint(prompts: list[Prompt], groups: list[list[Trajectory]]) -> None:
    episodes = [episode for group in groups for episode in group]
    tensors, entries = save_episodes(episodes)
    entries = json.loads(json.dumps(entries))
    plain = [Completion(one.token_ids, one.logprobs, one.finish_reason, one.weight_version) for one in episodes]
    for episode, loaded in zip(episodes, load_episodes(plain, entries, tensors, 0, prompts[0]), strict=True):
        assert loaded == episode
        assert loaded.turns == episode.turns
        assert loaded.sampled.tolist() == episode.sampled.tolist()
        assert torch.equal(loaded.position_ids, episode.position_ids)
        assert {name: value.sum() for name, value in loaded.later_inputs.items()} == {
            name: value.sum() for name, value in episode.later_inputs.items()
        }
        assert [image.tobytes() for image in loaded.images] == [image.tobytes() for image in episode.images]
        assert (loaded.stop_reason, loaded.score, loaded.text) == (episode.stop_reason, episode.score, episode.text)


def test_turns_and_metrics_describe_episodes(groups: list[list[Trajectory]]) -> None:
    episodes = [episode for group in groups for episode in group]
    found = episode_metrics(episodes)
    assert found["episode/turns/mean"] == found["episode/turns/max"] == 3
    assert found["episode/stop/done"] == 1
    assert found["episode/pictures"] == 1
    assert found["episode/sampled_share"] == pytest.approx(
        sum(one.sampled.sum() for one in episodes) / sum(len(one.token_ids) for one in episodes)
    )
    described = describe_turns(episodes[0])
    assert [turn["role"] for turn in described] == ["assistant", "environment"] * 3
    assert [call["tool"] for turn in described for call in turn["calls"]] == ["step"] * 3
    assert json.loads(described[3]["messages"])[0]["content"] == [{"type": "text", "text": "Look:"}, {"type": "image"}]


def test_tools_are_called_until_a_turn_has_no_call(toy: Toy, prompts: list[Prompt]) -> None:
    right, wrong = call("calculator", expression="6*7"), call("calculator", formula="6*7")
    engine = ScriptedEngine(
        toy,
        [f"Let me see. {right}", "It is 42."],
        ["I know it."],
        [wrong, wrong, right, wrong, "Done."],
        [wrong, wrong, wrong],
        [right] * 6,
        [f"{right} {'long ' * 200}"],
    )
    with ExitStack() as stack:
        pool = stack.enter_context(EnvironmentPool(EnvironmentSetup(tools=["calculator"]), workers=2))
        turns = TurnRenderer(toy.renderer, probe_template(toy.renderer, end_token_ids=[toy.end]), tools=pool.tools)
        limits = EpisodeLimits(max_tokens=9000, max_turns=5, max_turn_tokens=200)
        player = EpisodePlayer(pool, turns, toy.tokenizer, frozenset({toy.end}), limits)
        [(_, episodes)] = player.generate(engine, prompts[:1], replace(PARAMS, max_tokens=9000, n=6))
    assert [one.stop_reason for one in episodes] == [
        "answered", "answered", "answered", "malformed_calls", "max_turns", "turn_tokens",
    ]  # fmt: skip
    assert [len(one.assistant_turns) for one in episodes] == [2, 1, 5, 3, 5, 1]
    assert not episodes[5].calls  # a whole call of a turn that was cut is not executed
    [executed] = episodes[0].calls
    assert (executed.tool, dict(executed.arguments), executed.error) == ("calculator", {"expression": "6*7"}, "")
    assert "42" in episodes[0].messages[1]["content"]
    assert [bool(one.error) for one in episodes[2].calls] == [True, True, False, True]
    assert "expression" in episodes[2].messages[1]["content"]  # the error names the parameter
    for key, prompt in engine.asked:  # every prompt is what its episode had sampled, and what was answered
        if "/" in key:
            tokens = [*prompts[0].token_ids, *episodes[int(key.split("/")[1])].token_ids.tolist()]
            assert tokens[: len(prompt)] == prompt
