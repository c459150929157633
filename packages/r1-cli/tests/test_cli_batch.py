"""Columns are samples again where they arrive, and take few bytes."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from cli_ranks import Stored, crossed, step_samples
from core_models import Fetched, picture_samples, text_samples
from torch import Tensor

from r1_cli.cluster.batch_transfer import (
    diff_fields,
    pack_samples,
    to_array,
    to_tensor,
    unpack_samples,
    update_fields,
    view_as_tensor,
)
from r1_cli.train.groups.group import Group, Response, to_samples
from r1_core.types import PER_TOKEN, Sample
from r1_data.model_inputs import LazyInputs
from r1_data.types import Prompt
from r1_rewards.types import Score
from r1_rollout.types import Completion


def same(one: Sample, other: Sample) -> bool:
    """Whether two samples are equal but for the reward, which no rank asks for."""

    def equal(a: Tensor | None, b: Tensor | None) -> bool:
        return (a is None) == (b is None) and (a is None or b is None or torch.equal(a.to(b.dtype), b))

    names = ("token_ids", "loss_mask", "position_ids", *PER_TOKEN)
    return (
        all(equal(getattr(one, name), getattr(other, name)) for name in names)
        and (one.group_id, one.episode_id) == (other.group_id, other.episode_id)
        and same_inputs(one.model_inputs, other.model_inputs)
        and same_inputs(one.later_inputs, other.later_inputs)
    )


def same_inputs(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def arrived(samples: list[Sample]) -> list[Sample]:
    """Samples as a rank has them: columns and changes have crossed as bytes, read in place."""
    there = unpack_samples(Stored.put(pack_samples(samples, Stored.put)).load())
    update_fields(there, Stored.put(diff_fields(there, samples, range(len(samples)))).load())
    return there


@pytest.mark.parametrize("name", ["text", "pictures", "video"])
def test_samples_arrive_as_they_are(name: str) -> None:
    samples = step_samples(name)
    samples[1] = replace(samples[1], selected=torch.arange(len(samples[1].token_ids)) % 2 == 0, advantages=None)
    there = arrived(samples)
    assert len(there) == len(samples)
    assert all(map(same, there, samples))


def test_an_episode_arrives_with_its_turns_states_and_later_pictures() -> None:
    first, second, *others = picture_samples((1, 1, 0))
    length = len(second.token_ids)
    second = replace(
        second, later_inputs={"pixel_values": torch.rand(2, 3)}, episode_id=2**40,
        turn_ids=torch.arange(length, dtype=torch.int32), state_ids=2**62 + torch.arange(length),
        token_rewards=torch.rand(length),
    )  # fmt: skip
    there = arrived([first, second, *others])
    assert all(map(same, there, [first, second, *others]))
    assert there[1].state_ids is not None
    assert torch.equal(there[1].state_ids, 2**62 + torch.arange(length))
    assert there[0].model_inputs is there[1].model_inputs


def test_positions_of_any_kind_arrive_as_they_are() -> None:
    backwards, still, late = torch.tensor([[3, 2, 1]]), torch.zeros(1, 3).long(), torch.tensor([[7, 8, 9]])
    for positions in (backwards, still, late, torch.cat([backwards, still, late, late]), torch.tensor([[5]])):
        length = positions.shape[1]
        one = Sample(torch.arange(length), torch.ones(length, dtype=torch.bool), positions, group_id=2**40, reward=1.0)
        assert same(arrived([one, text_samples()[0]])[0], one)


def test_no_samples_are_no_samples() -> None:
    assert unpack_samples(crossed(pack_samples(text_samples()[:1], Stored.put)))[0].reward == 0.0


def rollouts(prompts: int, answers: int, prompt: int, response: int, axes: int = 1) -> list[Sample]:
    """A step's samples as `to_samples` makes them."""
    groups = []
    for row in range(prompts):
        positions = torch.arange(prompt).repeat(axes, 1)
        if axes > 1:
            positions[1:, 5:40] = 5  # a picture
        one = Prompt(str(row), "", list(range(prompt)), [], positions, "")
        said = Completion([*range(response)], [-1.0] * response, "stop", 0)
        groups.append(Group(one, [Response(said, "", Score(0.0), 0.0)] * answers))
    return to_samples(groups)


@pytest.mark.parametrize("axes", [1, 4])
def test_a_token_crosses_in_at_most_12_bytes(axes: int) -> None:
    samples = rollouts(prompts=4, answers=8, prompt=64, response=448, axes=axes)
    columns = pack_samples(samples, Stored.put)
    changes = diff_fields(unpack_samples(columns), samples, range(len(samples)))
    num_bytes = Stored.put(columns).num_bytes + Stored.put(changes).num_bytes
    assert num_bytes / (32 * 512) < (8.5 if axes == 1 else 9)


def test_columns_are_read_in_place_and_positions_are_shared() -> None:
    there = unpack_samples(Stored.put(pack_samples(rollouts(1, 3, 8, 8), Stored.put)).load())
    assert there[0].token_ids.untyped_storage().data_ptr() == there[2].token_ids.untyped_storage().data_ptr()
    assert there[0].position_ids.data_ptr() == there[2].position_ids.data_ptr()


def test_model_inputs_cross_once_a_prompt_in_the_precision_asked_for() -> None:
    pixels, grid = torch.randn(32, 48), torch.tensor([[1, 4, 8]])
    inputs = {"pixel_values": pixels, "image_grid_thw": grid}
    samples = [replace(one, model_inputs=inputs) for one in text_samples()]
    put: list[Stored] = []

    def remember(value: object) -> Stored:
        put.append(Stored.put(value))
        return put[-1]

    columns = crossed(pack_samples(samples, remember, torch.bfloat16))
    assert len(put) == len(columns.inputs) == 1
    assert put[0].num_bytes < 2 * pixels.numel() + 500
    there = unpack_samples(columns)
    assert all(one.model_inputs is there[0].model_inputs for one in there)
    assert torch.equal(there[0].model_inputs["pixel_values"], pixels.bfloat16())
    assert torch.equal(there[0].model_inputs["image_grid_thw"], grid)


def test_model_inputs_that_are_references_cross_as_they_are_without_being_read() -> None:
    inputs = LazyInputs(("pixel_values",), b"content", load=fail)
    columns = pack_samples([replace(text_samples()[0], model_inputs=inputs)], fail)
    assert crossed(columns).inputs == (inputs,)


def fail(*args: object) -> Stored:
    raise AssertionError("was read")


def test_model_inputs_may_be_fetched_when_they_are_put_down() -> None:
    inputs = Fetched({"pixel_values": torch.ones(2, 2)})
    samples = [replace(one, model_inputs=inputs) for one in text_samples()]
    assert torch.equal(arrived(samples)[0].model_inputs["pixel_values"], torch.ones(2, 2))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
def test_tensors_are_arrays_and_back(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.5], [-2.0, 3e4]]).to(dtype)
    for one in (tensor, tensor.T, tensor[0, 0], tensor[:0]):
        back = to_tensor(*crossed(to_array(one)))
        assert back.dtype == one.dtype
        assert torch.equal(back, one)
    assert view_as_tensor(to_array(tensor)[0]).data_ptr() == tensor.data_ptr()
