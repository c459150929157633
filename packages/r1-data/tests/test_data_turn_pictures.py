"""Tests of pictures behind a turn: their tokens, inputs and positions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from turn_cases import FAMILIES, picture_turns, sampled, with_pictures
from turn_templates import BLIND_TOOLS, QWEN2_5_VL, QWEN3_VL, VISION_TEMPLATES

from r1_data.references import Video
from r1_data.turns import TurnRenderer, append_positions
from r1_data.types import DataError, Example, MediaError

KNOWN: dict[str, TurnRenderer] = {}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("role", ["tool", "user"])
def test_pictures_behind_a_turn_are_those_of_the_full_rendering(fresh_processor, picture, family, role):
    turns = picture_turns(fresh_processor(family), VISION_TEMPLATES[family])
    first, second, third = picture(60, 40), picture(300, 200), picture(33, 90)
    question = [{"type": "image"}, {"type": "text", "text": "How many?"}]
    prompt = turns.renderer.render(Example("r:1", [{"role": "user", "content": question}], (first,), "3"))
    turn = sampled(turns, "Look.")
    found = turns.continuation(turn, [with_pictures(second, third, role=role)], closed=True)

    answer = {"role": role, "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "zoomed"}]}
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "Look."}, answer]
    whole = turns.renderer.render(Example("r:1", messages, (first, second, third), "3"))
    assert [*prompt.token_ids, *turn, *found.token_ids] == whole.token_ids
    assert [*prompt.engine_token_ids, *turn, *found.engine_token_ids] == whole.engine_token_ids
    assert [image.size for image in [*prompt.images, *found.images]] == [image.size for image in whole.images]
    for name, expected in whole.model_inputs.items():
        assert torch.equal(torch.cat([prompt.model_inputs[name], found.model_inputs[name]]), expected)
    positions = append_positions(prompt.position_ids, torch.arange(len(turn)).expand(4, -1))
    assert torch.equal(append_positions(positions, found.position_ids), whole.position_ids)
    assert found.messages == (answer,)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15)
@given(data=st.data())
def test_positions_piece_by_piece_are_those_of_the_whole(fresh_processor, family, data):
    if family not in KNOWN:
        KNOWN[family] = picture_turns(fresh_processor(family), VISION_TEMPLATES[family])
    turns = KNOWN[family]
    token_ids: list[int] = []
    positions, inputs = torch.zeros(4, 0, dtype=torch.long), []
    for _ in range(data.draw(st.integers(1, 4))):
        sizes = data.draw(st.lists(st.tuples(st.integers(20, 300), st.integers(20, 300)), max_size=2))
        pictures = [Image.new("RGB", size) for size in sizes]
        turn = data.draw(st.lists(st.integers(0, 200), max_size=6))
        found = turns.continuation(turn, [with_pictures(*pictures)], closed=data.draw(st.booleans()))
        for piece in (torch.arange(len(turn)).expand(4, -1), found.position_ids):
            positions = append_positions(positions, piece)
        token_ids += [*turn, *found.token_ids]
        inputs.append(found.model_inputs)
    whole = torch.tensor(token_ids)
    _, placeholder = turns.renderer.vision.tokens["picture"]
    media = {"mm_token_type_ids": (whole == placeholder).long()[None]}
    if grids := [one["image_grid_thw"] for one in inputs if one]:
        media["image_grid_thw"] = torch.cat(grids)
    assert torch.equal(positions, turns.renderer.position_ids(whole, media))


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_go_on_behind_a_prompt_with_a_video(fresh_processor, picture, movie, family):
    turns = picture_turns(fresh_processor(family), VISION_TEMPLATES[family])
    question = [{"type": "video"}, {"type": "text", "text": "How many?"}]
    example = Example("r:1", [{"role": "user", "content": question}], (Video(movie(64, 48, 40)),), "3")
    prompt = turns.renderer.render(example)
    turn = sampled(turns, "Look.")
    found = turns.continuation(turn, [with_pictures(picture(90, 60))], closed=True)
    positions = append_positions(prompt.position_ids, torch.arange(len(turn)).expand(4, -1))
    positions = append_positions(positions, found.position_ids)
    whole = torch.tensor([*prompt.token_ids, *turn, *found.token_ids])
    tokens = turns.renderer.vision.tokens
    kinds = (whole == tokens["picture"][1]).long() + 2 * (whole == tokens["video"][1]).long()
    media = {**prompt.model_inputs, **found.model_inputs, "mm_token_type_ids": kinds[None]}
    assert {"video_grid_thw", "image_grid_thw"} < set(media)
    assert torch.equal(positions, turns.renderer.position_ids(whole, media))


def test_a_picture_is_a_user_message_where_tool_messages_drop_it(processor, picture):
    turns = picture_turns(processor, BLIND_TOOLS)
    assert (turns.info.tool_pictures, turns.info.user_pictures) == (False, True)
    found = turns.continuation([], [with_pictures(picture(60, 60))], closed=False)
    shown = "<tool_response>\n<|vision_start|><|image_pad|><|vision_end|>zoomed\n</tool_response>"
    assert f"user\n{shown}<|im_end|>" in found.text
    assert len(found.images) == 1
    assert "a picture" not in found.text


def test_a_template_that_drops_one_of_two_pictures_is_noticed(processor, picture):
    first = QWEN3_VL.replace("part.type == 'image'", "part.type == 'image' and loop.first").replace(
        "part.text", "part.text or ''"
    )
    with pytest.raises(DataError, match="1 placeholders for 2 pictures behind a turn"):
        picture_turns(processor, first).continuation([], [with_pictures(picture(60, 60), picture(60, 60))], closed=True)


def test_placeholders_that_a_tool_spells_are_plain_text(processor, picture):
    turns = picture_turns(processor, QWEN3_VL)
    found = turns.continuation([], [with_pictures(picture(60, 60), text="<|image_pad|><|video_pad|>")], closed=False)
    assert found.engine_token_ids.count(processor.image_token_id) == 1
    assert processor.video_token_id not in found.engine_token_ids
    assert "<|vision_end|><|image_pad|><|video_pad|>" in found.text


@pytest.mark.parametrize("data", [b"", b"GIF89a", b"\x89PNG"])
def test_a_broken_picture_is_refused(processor, data):
    with pytest.raises(MediaError):
        picture_turns(processor, QWEN2_5_VL).continuation([], [with_pictures(data)], closed=True)


def test_pictures_keep_the_pixel_range_of_the_run(processor, picture):
    turns = picture_turns(processor, QWEN2_5_VL)
    (image,) = turns.continuation([], [with_pictures(picture(2000, 1000))], closed=True).images
    assert image.size[0] * image.size[1] <= 112 * 112


def test_positions_begin_at_zero_and_go_on_behind_the_largest():
    nothing = torch.zeros(4, 0, dtype=torch.long)
    piece = torch.tensor([[0, 1, 2], [0, 1, 5], [0, 1, 2], [0, 1, 3]])
    once = append_positions(nothing, piece)
    assert torch.equal(once, piece)
    assert append_positions(once, piece)[:, 3:].tolist() == [[3, 4, 5], [6, 7, 11], [6, 7, 8], [6, 7, 9]]
    assert append_positions(piece[:1], piece[:1]).tolist() == [[0, 1, 2, 3, 4, 5]]
