"""What an environment's `reset` returns belongs to the first prompt of its episode."""

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from cli_players import MODEL, PARAMS, TOYS, Toy
from transformers import AutoModelForImageTextToText

from r1_cli.jobs.play_environment import play_by_hand
from r1_cli.models.attention import attend_packed
from r1_cli.plan.check.try_environment import try_environment
from r1_cli.train.groups.group import Group, Response, to_reward_inputs, to_samples
from r1_cli.train.groups.trajectory import Trajectory
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.learner import Learner
from r1_core.learner.pack import SharedPrompts
from r1_core.types import Sample
from r1_data.types import Prompt
from r1_rewards.environments.pool import EnvironmentPool
from r1_rewards.environments.types import EnvironmentSetup
from r1_rewards.types import Score


@pytest.fixture(scope="module")
def learner() -> Learner:
    model = AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32)
    attend_packed(model)
    batching = Batching(True, MicroLimit(4), MicroLimit(4), share_prompts=True)
    return Learner(model, torch.optim.SGD(model.parameters(), lr=0.0), lambda step: 1.0, batching=batching)


def samples_of(prompt: Prompt, episodes: list[Trajectory]) -> list[Sample]:
    return to_samples([Group(prompt, [Response(one, "", Score(0.0), 0.0) for one in episodes])])


def assert_agreement(learner: Learner, samples: list[Sample]) -> None:
    for sample in learner.add_logprobs(samples, ["old_logprobs"]):
        assert sample.old_logprobs is not None
        assert sample.rollout_logprobs is not None
        assert sample.loss_mask.any()
        assert (sample.old_logprobs - sample.rollout_logprobs)[sample.loss_mask].abs().max() < 1e-5


def test_a_text_for_all_episodes_of_a_group_is_a_prompt_that_they_share(
    toy: Toy, prompts: list[Prompt], learner: Learner
) -> None:
    with ExitStack() as stack:
        groups = toy.play(toy.player(stack, "Telling"), prompts)
    for prompt, group, answer in zip(prompts, groups, "32", strict=True):
        own = group[0].prompt
        assert own is not None
        assert all(one.prompt is own for one in group)
        said = f"How many shapes are there? Hint: {answer}.<|im_end|>"
        assert own.text == prompt.text.replace("How many shapes are there?", said)
        assert own.token_ids.count(toy.end) == prompt.token_ids.count(toy.end)  # what it says is no control token
        assert own.model_inputs is prompt.model_inputs
        samples = samples_of(prompt, group)
        assert {one.prompt_length for one in samples} == {len(own.token_ids)}
        assert len(SharedPrompts.find(samples).lengths) == 1
        assert_agreement(learner, samples)
        [item, *_] = to_reward_inputs(prompt, group, toy.tokenizer)
        assert item.messages[0]["content"][-1] == {"type": "text", "text": said}
    assert len({tuple(one.token_ids.tolist()) for one in groups[0]}) > 1  # they sample different turns


def test_what_differs_between_the_episodes_of_a_group_gives_each_its_own_prompt(
    toy: Toy, prompts: list[Prompt], learner: Learner
) -> None:
    with ExitStack() as stack:
        [group] = toy.play(toy.player(stack, "Telling", what="own"), prompts[:1], replace(PARAMS, max_tokens=150))
    own = [one.prompt for one in group]
    assert len({prompt.text for prompt in own if prompt}) == len(group)
    for episode, prompt in zip(group, own, strict=True):
        assert prompt is not None
        assert [picture.size for picture in prompt.images] == [(56, 56), (84, 56)]
        assert [picture.size for picture in episode.images] == [(56, 84)]
        assert prompt.messages[0]["content"][-1] == {"type": "image"}
    assert_agreement(learner, samples_of(prompts[0], group))


def test_rounds_sample_the_same_tokens_however_long_reset_takes(toy: Toy, prompts: list[Prompt]) -> None:
    found = []
    for seconds in (0.0, 0.01):
        with ExitStack() as stack:
            found.append(toy.play(toy.player(stack, "Telling", seconds=seconds), prompts))
    assert found[0] == found[1]


def test_what_leaves_no_room_fails_its_own_episodes(toy: Toy, prompts: list[Prompt]) -> None:
    with ExitStack() as stack:
        long, short = toy.play(toy.player(stack, "Telling", what="long", rounds=False), prompts)
    assert {one.stop_reason for one in long} == {"failed"}
    assert all(one.failure and "no room in data.max_response_length" in one.failure.message for one in long)
    assert {one.stop_reason for one in short} == {"done"}
    assert all(one.prompt is None for one in short)


def test_the_commands_for_environments_show_what_reset_adds() -> None:
    setup = EnvironmentSetup(environment=f"{TOYS}:Telling")
    rows = [({"answer": "5", "ground_truth": "5"}, [])]
    checks = {one.check: one.result for one in try_environment(setup, rows, episodes=4, turns=2, workers=2)}
    assert checks["added to the prompt"] == "by reset(), the same in all episodes of a row:  Hint: 5.<|im_end|>"
    lines: list[str] = []
    play_by_hand(setup, *rows[0], read=lambda: None, write=lines.append)
    assert lines == ["(reset() adds this to the row's prompt)", " Hint: 5.<|im_end|>"]


def test_an_episode_that_is_over_its_time_in_reset_ends_with_its_first_turn(toy: Toy, prompts: list[Prompt]) -> None:
    with ExitStack() as stack:
        player = toy.player(stack, "Telling", seconds=0.2)
        setup = replace(player.environments.setup, episode_timeout=0.05)
        pool = stack.enter_context(EnvironmentPool(setup, workers=2))
        [group] = toy.play(replace(player, environments=pool), prompts[:1])
    late = [one for one in group if one.stop_reason == "timeout"]
    assert late
    assert all(len(one.assistant_turns) == 1 and one.failure is None for one in late)
