"""Episodes of several paths: what is trained of them, how they count, and that checkpoints and the record hold them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from cli_players import MODEL, Toy
from transformers import AutoModelForImageTextToText

from r1_cli.models.attention import attend_packed
from r1_cli.runs.reader import RunReader
from r1_cli.train.groups.group import Group, Response, to_reward_inputs, to_samples
from r1_cli.train.groups.stream_position import load_groups, save_groups
from r1_cli.train.groups.trajectory import StopReason, Trajectory, Turn
from r1_cli.train.metrics.step import step_metrics
from r1_cli.train.recorder import Recorder
from r1_core.advantages import GRPO, assign
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.learner import Learner
from r1_core.types import Sample, with_tokens
from r1_data.types import Prompt
from r1_rewards.types import Score


def prompt(*tokens: int, text: str = "?") -> Prompt:
    ids = list(tokens)
    messages = [{"role": "user", "content": text}]
    return Prompt("rows.parquet:0", text, ids, ids, torch.arange(len(ids))[None], "3", messages=messages)


def path(
    of: Prompt, *pieces: tuple[bool, int], number: int = 1, rewards: tuple[float, ...] = (), **more: object
) -> Trajectory:
    """A path of turns (sampled, length) behind a prompt."""
    lengths = [length for _, length in pieces]
    ends = np.cumsum([0, *lengths]).tolist()
    sampled = np.repeat([chosen for chosen, _ in pieces], lengths)
    turns = [
        Turn(
            "assistant",
            begin,
            end,
            ({"role": "assistant", "content": f"turn {place}"},),
            reward=reward,
            state=place + 9,
        )
        for place, (begin, end, reward) in enumerate(
            zip(ends[:-1], ends[1:], rewards or [0.0] * len(pieces), strict=True)
        )
    ]
    stop: StopReason = "answered"
    length = ends[-1]
    positions = torch.arange(len(of.token_ids) + length).expand(len(of.position_ids), -1)
    return Trajectory(
        np.arange(length) + 10 * number, np.where(sampled, -0.5, 0), sampled, turns, positions, stop, 4, **more
    )  # fmt: skip


def forked(start: Prompt, seen: Prompt, **more: object) -> Trajectory:
    """Two turns, of which the second saw another rendering of the first."""
    first = path(start, (True, 2), number=1, rewards=(0.25,))
    return path(seen, (True, 3), number=2, rewards=(0.5,), prompt=seen, forks=[first], **more)


def group_of(start: Prompt, episodes: list[Trajectory], rewards: list[float]) -> Group:
    pairs = zip(episodes, rewards, strict=True)
    return Group(start, [Response(one, "text", Score(value), value) for one, value in pairs], row=0)


def test_each_sampled_turn_is_trained_in_one_sample_of_its_episode() -> None:
    start, seen = prompt(1, 2, 3), prompt(1, 2, 3, 8, 9, text="other")
    first, second = forked(start, seen).to_samples(start, 5, 2.0, episode_id=7)
    assert first.token_ids.tolist() == [1, 2, 3, 10, 11]
    assert second.token_ids.tolist() == [1, 2, 3, 8, 9, 20, 21, 22]
    assert [one.loss_mask.sum().item() for one in (first, second)] == [2, 3]
    assert not first.loss_mask[:3].any()
    assert not second.loss_mask[:5].any()
    assert [one.prompt_length for one in (first, second)] == [3, 5]
    assert [(one.group_id, one.episode_id, one.reward) for one in (first, second)] == [(5, 7, 1.25)] * 2
    assert first.turn_ids is not None
    assert second.turn_ids is not None
    assert first.turn_ids.tolist() == [-1] * 3 + [0] * 2
    assert second.turn_ids.tolist() == [-1] * 5 + [1] * 3
    assert first.token_rewards is not None
    assert second.token_rewards is not None
    assert (first.token_rewards.tolist()[-1], second.token_rewards.tolist()[-1]) == (0.25, 0.5)


def test_a_turn_that_stands_in_another_path_is_context_there_and_its_reward_counts_once() -> None:
    start = prompt(1, 2, 3)
    fork = path(start, (True, 2), (True, 2), number=1, rewards=(0.25, 1.0))
    main = path(start, (False, 2), (True, 3), number=1, rewards=(0.25, 0.5), forks=[fork])
    assert main.turn_rewards == 1.75
    assert main.sampled_length == 7
    first, second = main.to_samples(start, 0, 1.75)
    assert second.loss_mask.tolist() == [False] * 5 + [True] * 3
    assert second.turn_ids is not None
    assert second.turn_ids.tolist() == [-1] * 5 + [2] * 3
    assert second.token_rewards is not None
    assert second.token_rewards.sum() == 0.5
    assert [first.reward, second.reward] == [0.0, 0.0]


def test_forks_count_once_in_the_statistics_of_their_group() -> None:
    start, seen = prompt(1, 2, 3), prompt(1, 2, 3, 8, 9)
    rewards = [3.0, 0.0, 1.0]
    plain = [path(start, (True, 2)), path(start, (True, 4)), path(start, (True, 1))]
    whole = path(seen, (True, 3), number=2, prompt=seen, forks=[path(start, (True, 2))])
    episodes = [whole, *plain[1:]]
    expected = [one.advantages[one.loss_mask][0] for one in advantages(group_of(start, plain, rewards))]
    found = advantages(group_of(start, episodes, rewards))
    assert [one.episode_id for one in found] == [0, 0, -1, -1]
    assert [one.advantages[one.loss_mask].unique().tolist() for one in found] == [
        [expected[0]], [expected[0]], [expected[1]], [expected[2]],
    ]  # fmt: skip
    metrics = step_metrics(4, [group_of(start, episodes, rewards)], found)
    assert metrics["episode/forks"] == pytest.approx(1 / 3)
    assert metrics["episode/turns/mean"] == pytest.approx(4 / 3)
    assert metrics["critic/rewards/mean"] == pytest.approx(4 / 3)
    assert metrics["response_length/max"] == 5
    assert metrics["staleness/mean"] == 0


def advantages(group: Group) -> list[Sample]:
    return assign(to_samples([group]), GRPO())


def test_the_reward_sees_the_conversation_of_the_main_path() -> None:
    start, seen = prompt(1, 2, 3), prompt(1, 2, 3, 8, 9, text="the history, as the template shows it")

    class Words:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return ""

    [item] = to_reward_inputs(start, [forked(start, seen)], Words())
    assert item.messages == list(seen.messages)
    assert (item.response, item.response_length) == ("turn 0", 5)


def test_a_checkpoint_restores_paths_and_what_they_share_to_the_bit(tmp_path: Path) -> None:
    start, seen = prompt(1, 2, 3), prompt(1, 2, 3, 8, 9, text="other")
    seen = replace(seen, model_inputs={"pixel_values": torch.rand(2, 3)})
    groups = [
        group_of(
            start, [forked(start, seen), path(start, (True, 2), number=3), forked(start, seen)], [1.0, 0.0, reward]
        )
        for reward in (2.0, 3.0)
    ]
    save_groups(groups, tmp_path)
    for group, loaded in zip(groups, load_groups(tmp_path, lambda row: start), strict=True):
        for one, again in zip(group.episodes, loaded.episodes, strict=True):
            assert [p == q for p, q in zip(one.paths, again.paths, strict=True)] == [True] * len(one.paths)
            assert [p.turns for p in one.paths] == [p.turns for p in again.paths]
        first, second, third = loaded.episodes
        assert first.prompt is third.prompt  # so that the two share it in a micro-batch, as they did
        assert second.prompt is None
        assert first.prompt is not None
        assert torch.equal(first.prompt.model_inputs["pixel_values"], seen.model_inputs["pixel_values"])
        assert (first.prompt.token_ids, first.prompt.text, first.prompt.messages) == (
            seen.token_ids, seen.text, list(seen.messages),
        )  # fmt: skip
        before, after = to_samples([group]), to_samples([loaded])
        assert all(torch.equal(a.token_ids, b.token_ids) for a, b in zip(before, after, strict=True))
        assert [one.episode_id for one in after] == [0, 0, -1, 3, 3]


def test_the_record_has_a_row_for_each_path_and_readers_count_answers(tmp_path: Path) -> None:
    start, seen = prompt(1, 2, 3), prompt(1, 2, 3, 8, 9, text="other")
    group = group_of(start, [path(start, (True, 2)), forked(start, seen)], [1.0, 0.0])
    samples = to_samples([group])
    trained = sum(sample.response_length for sample in samples)
    samples = with_tokens(samples, advantages=torch.arange(trained).float())
    recorder = Recorder(tmp_path, 10**9)
    recorder.record(3, "train", [group], samples)
    recorder.close()
    reader = RunReader(tmp_path)
    single, fork, main = pq.read_table(reader.sample_path(3)).to_pylist()
    assert [row["episode"] for row in (single, fork, main)] == [None, 1, 1]
    assert [row["sample"] for row in (single, fork, main)] == [0, 1, 1]
    assert [row["stop_reason"] for row in (single, fork, main)] == ["answered", "forked", "answered"]
    assert [row["prompt"] for row in (single, fork, main)] == ["?", "?", "other"]
    assert main["prompt_tokens"] == seen.token_ids
    assert [row["advantages"] for row in (single, fork, main)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [row["sample"] for row in reader.readable_samples(3, "train", ["sample", "score"])] == [0, 1]


@pytest.mark.parametrize("padding_free", [True, False])
def test_prompts_of_single_episodes_are_packed_with_their_own_pictures(padding_free: bool) -> None:
    toy = Toy()
    start, *own = toy.prompts("3", "2", "1")
    longer = torch.cat([own[1].position_ids, own[1].position_ids[:, -1:] + torch.tensor([1, 2])], 1)
    own[1] = replace(own[1], token_ids=[*own[1].token_ids, 5, 6], position_ids=longer)
    episodes = [path(start, (True, 2)), *(path(of, (True, 3), prompt=of) for of in own), path(start, (True, 4))]
    episodes = [replace_positions(one, one.prompt or start) for one in episodes]
    samples = to_samples([group_of(start, episodes, [0.0] * 4)])
    model = AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32)
    attend_packed(model)
    found = []
    for rows, share in ((1, False), (4, padding_free)):
        batching = Batching(padding_free, MicroLimit(rows), MicroLimit(rows), share_prompts=share)
        learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.0), lambda step: 1.0, batching=batching)
        found.append([one.old_logprobs for one in learner.add_logprobs(samples, ["old_logprobs"])])
    for alone, together in zip(*found, strict=True):
        assert alone is not None
        assert together is not None
        assert (alone - together).abs().max() < 1e-5
    swapped = replace(samples[1], model_inputs=samples[0].model_inputs)  # pictures matter
    [other] = learner.add_logprobs([swapped], ["old_logprobs"])
    assert other.old_logprobs is not None
    assert (other.old_logprobs - found[0][1]).abs().max() > 1e-4


def replace_positions(episode: Trajectory, of: Prompt) -> Trajectory:
    """The episode with positions that go on from its prompt's."""
    length = len(episode.token_ids)
    more = of.position_ids.max() + 1 + torch.arange(length)
    positions = torch.cat([of.position_ids, more.expand(len(of.position_ids), -1)], 1)
    positions[0] = torch.arange(len(of.token_ids) + length)
    return Trajectory(
        episode.token_ids, episode.logprobs, episode.sampled, episode.turns, positions, "answered", 4,
        prompt=episode.prompt,
    )  # fmt: skip
