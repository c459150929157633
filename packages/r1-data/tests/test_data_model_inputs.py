"""Tests of model inputs by reference: loaded when first read, sent without their tensors, equal by content."""

import pickle
from functools import partial

import pytest
import torch

from r1_data.formats import Columns
from r1_data.messages import to_example
from r1_data.model_inputs import LazyInputs, LazyMedia, join, joined_shape
from r1_data.render import Renderer
from r1_data.types import DataError

LOADED = []


def render_inputs(renderer, example):
    LOADED.append(example.id)
    return renderer.render(example).model_inputs


def test_inputs_are_loaded_once_where_they_are_first_read_and_not_sent(processor, picture):
    example = to_example("t:1", {"prompt": "<image>?", "answer": "1", "images": [picture(60, 40)]}, Columns())
    renderer = Renderer(processor)
    whole = dict(renderer.render(example).model_inputs)
    inputs = LazyInputs(tuple(whole), b"digest", partial(render_inputs, renderer, example))
    LOADED.clear()
    assert ("pixel_values" in inputs, len(inputs), list(inputs)) == (True, len(whole), list(whole))
    assert not LOADED
    assert all(torch.equal(inputs[name], tensor) for name, tensor in whole.items())
    assert LOADED == ["t:1"]
    sent = pickle.loads(pickle.dumps(inputs))
    assert (sent == inputs, hash(sent) == hash(inputs), repr(sent)) == (True, True, repr(sent))
    assert LOADED == ["t:1"]
    assert "not loaded" in repr(sent)
    assert torch.equal(sent["pixel_values"], whole["pixel_values"])


def test_inputs_of_another_content_or_name_differ():
    inputs = LazyInputs(("a",), b"1", dict)
    assert inputs != LazyInputs(("a",), b"2", dict)
    assert inputs != LazyInputs(("b",), b"1", dict)
    assert inputs != {"a": torch.zeros(1)}
    with pytest.raises(KeyError):
        inputs["b"]
    with pytest.raises(DataError, match=r"\[\] were loaded in the place of \['a'\]"):
        inputs["a"]


def test_pictures_are_counted_before_they_are_loaded_and_loaded_once():
    loads = []
    media = LazyMedia(2, lambda: loads.append(1) or ["a", "b"])
    assert (len(media), bool(media), "not loaded" in repr(media), loads) == (2, True, True, [])
    assert [*media] == ["a", "b"] == [media[0], *media[1:]]
    assert (loads, bool(LazyMedia(0, list))) == ([1], False)
    with pytest.raises(DataError, match="1 pictures or videos were loaded in the place of 2"):
        LazyMedia(2, lambda: ["a"])[0]


@pytest.mark.parametrize("axis", [0, 1])
def test_pictures_of_several_sizes_are_joined_along_an_axis_and_filled_with_zeros(axis):
    one, other = torch.ones(2, 3, 4), torch.full((1, 5, 2), 2.0)
    whole = join([one, other], axis)
    assert list(whole.shape) == joined_shape([one.shape, other.shape], axis) == ([3, 5, 4] if axis == 0 else [2, 8, 4])
    begin = (2, 0) if axis == 0 else (0, 3)
    assert torch.equal(whole[:2, :3, :4], one)
    assert torch.equal(whole[begin[0] : begin[0] + 1, begin[1] : begin[1] + 5, :2], other)
    assert float(whole.sum()) == float(one.sum() + other.sum())
    assert join([one.long()]).dtype == torch.int64
    with pytest.raises(ValueError, match="argument"):
        join([one, other[0]], axis)
