"""Episodes whose chat template changes earlier turns: what the policy saw, what is trained, and the limits."""

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from cli_players import FORGETFUL, MODEL, PARAMS, ScriptedEngine, Toy, call
from transformers import AutoModelForImageTextToText

from r1_cli.models.attention import attend_packed
from r1_cli.plan.announce import describe_player
from r1_cli.train.episodes.episode import Episode, EpisodeLimits
from r1_cli.train.episodes.player import EpisodePlayer
from r1_cli.train.groups.group import Group, Response, to_samples
from r1_cli.train.groups.trajectory import Trajectory
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.learner import Learner
from r1_data.turns.probe import probe_template
from r1_data.turns.turn_renderer import TurnRenderer
from r1_data.types import Prompt
from r1_rewards.environments.pool import EnvironmentPool
from r1_rewards.environments.types import EnvironmentSetup
from r1_rewards.types import Score
from r1_rollout.types import Completion


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy(FORGETFUL, "template")


def shown(toy: Toy, prompt: Prompt, turns: list[str], forgotten: int) -> str:
    """The conversation as the template shows it, the first turns without their thoughts."""
    text = prompt.text
    answers = ["<|im_end|> is no control token here.", "Look:<|vision_start|><|image_pad|><|vision_end|>"]
    for number, turn in enumerate(turns):
        said = turn.split("</think>")[-1].lstrip("\n") if number < forgotten else turn
        text += f"{said}<|im_end|>\n<|im_start|>user\n{answers[number]}<|im_end|>\n<|im_start|>assistant\n"
    return text


def test_a_turn_whose_past_the_template_changes_begins_a_new_path(
    toy: Toy, prompts: list[Prompt], groups: list[list[Trajectory]]
) -> None:
    forked = 0
    for prompt, group in zip(prompts, groups, strict=True):
        for episode in group:
            turns = [turn.messages[0]["content"] for path in episode.paths for turn in path.assistant_turns]
            assert len(turns) == 3
            assert [path.prompt is None for path in episode.paths] == [True] + [False] * len(episode.forks)
            assert [path.stop_reason for path in episode.forks] == ["forked"] * len(episode.forks)
            seen = 0
            for path in episode.paths:
                if path.prompt is not None:
                    seen = len([m for m in path.prompt.messages if m["role"] == "assistant"])
                    assert path.prompt.text == shown(toy, prompt, turns[:seen], seen)
                    assert len(path.prompt.images) == len(prompt.images) + (seen > 1)
                assert path.turns[0].role == "assistant"
                assert len(path.assistant_turns) >= 1
            assert len(episode.calls) == 3  # each once
            forked += len(episode.forks)
    assert forked >= 6


def test_the_learner_computes_the_engines_logprobs_of_forked_turns(
    prompts: list[Prompt], groups: list[list[Trajectory]]
) -> None:
    whole = [
        Group(prompt, [Response(one, "", Score(0.0), 0.0) for one in group])
        for prompt, group in zip(prompts, groups, strict=True)
    ]
    samples = to_samples(whole)
    model = AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32)
    attend_packed(model)
    batching = Batching(True, MicroLimit(4), MicroLimit(4), share_prompts=True)
    learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.0), lambda step: 1.0, batching=batching)
    trained = 0
    for sample in learner.add_logprobs(samples, ["old_logprobs"]):
        assert sample.old_logprobs is not None
        assert sample.rollout_logprobs is not None
        assert (sample.old_logprobs - sample.rollout_logprobs)[sample.loss_mask].abs().max() < 1e-5
        trained += sample.response_length
    paths = [path for group in groups for episode in group for path in episode.paths]
    assert trained == sum(turn.end - turn.begin for path in paths for turn in path.assistant_turns)


def test_rounds_repeat_forked_episodes_to_the_bit(
    toy: Toy, prompts: list[Prompt], groups: list[list[Trajectory]]
) -> None:
    with ExitStack() as stack:
        again = toy.play(toy.player(stack, seconds=0.003), prompts)
    for group, same in zip(groups, again, strict=True):
        assert [one.paths for one in group] == [one.paths for one in same]


def test_history_as_sampled_never_forks(toy: Toy, prompts: list[Prompt]) -> None:
    with ExitStack() as stack:
        player = toy.player(stack)
        assert "every turn with <think> forks" in "\n".join(describe_player(player))
        player = replace(player, renderer=TurnRenderer(toy.renderer, player.renderer.info))
        assert "as it sampled them" in "\n".join(describe_player(player))
        [group] = toy.play(player, prompts[:1])
    assert not any(one.forks for one in group)


def test_the_limit_of_tokens_counts_what_the_policy_sees_behind_the_first_prompt(
    toy: Toy, prompts: list[Prompt]
) -> None:
    thought = f"<think>{'long ' * 40}</think>"
    engine = ScriptedEngine(toy, [f"{thought}{call('calculator', expression='6*7')}"] * 4 + ["Done."])
    length = len(engine.say(thought, 9999).token_ids)
    with ExitStack() as stack:
        pool = stack.enter_context(EnvironmentPool(EnvironmentSetup(tools=["calculator"]), workers=2))
        info = replace(probe_template(toy.renderer, end_token_ids=[toy.end]), results="user")
        turns = TurnRenderer(toy.renderer, info, tools=pool.tools, history="template")
        limits = EpisodeLimits(max_tokens=9000, max_turns=9)
        player = EpisodePlayer(pool, turns, toy.tokenizer, frozenset({toy.end}), limits)
        stops = []
        for most in (9000, 3 * length):
            [(_, [episode])] = player.generate(engine, prompts[:1], replace(PARAMS, max_tokens=most, n=1))
            assert isinstance(episode, Trajectory)
            stops.append(episode.stop_reason)
            for path in episode.paths:
                start = prompts[0] if path.prompt is None else path.prompt
                assert len(start.token_ids) + len(path.token_ids) <= len(prompts[0].token_ids) + most
            assert episode.sampled_length > 4 * length or most < 9000
    assert stops == ["answered", "max_tokens"]


def test_a_later_path_has_the_pictures_of_all_answers_before_it(toy: Toy, prompts: list[Prompt]) -> None:
    with ExitStack() as stack:
        [group] = toy.play(toy.player(stack, "Showing"), prompts[:1], replace(PARAMS, max_tokens=200))
    forked = [one.prompt for one in group if len(one.forks) == 2]
    assert forked
    for prompt in forked:
        assert prompt is not None
        assert [picture.size for picture in prompt.images] == [(56, 56), (56, 84)]
        assert prompt.engine_token_ids.count(toy.model.config.image_token_id) == 2


def test_a_path_whose_prompt_leaves_no_room_is_not_begun(toy: Toy, prompts: list[Prompt]) -> None:
    start = prompts[0]
    for added, begun in ((9, True), (10, False)):
        episode = Episode(start, 0, EpisodeLimits(max_tokens=10, max_turns=4))
        episode.add_turn(Completion([toy.end], [-0.1], "stop", 7), {"role": "assistant", "content": ""})
        tokens = [*start.token_ids, *[toy.end] * added]
        longer = replace(start, token_ids=tokens, position_ids=torch.arange(len(tokens)).expand(4, -1))
        assert episode.fork(longer, [{"role": "user", "content": "?"}], []) == begun
        assert (episode.context is longer) == begun
