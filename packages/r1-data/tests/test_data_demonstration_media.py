"""Tests of demonstrations with pictures and videos."""

import pytest
import torch
from demonstration_cases import TALK, conversation, trained

from r1_data.demonstrations import ConversationRenderer
from r1_data.references import Video
from r1_data.render import Renderer
from r1_data.types import DataError, Example, MediaError


def shown_media(*kinds, text="How many?"):
    return {"role": "user", "content": [*({"type": kind} for kind in kinds), {"type": "text", "text": text}]}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_tokens_and_inputs_of_pictures_and_videos_are_the_processors_own(fresh_processor, picture, movie, family):
    processor = fresh_processor(family)
    renderer = Renderer(processor, max_pixels=112 * 112)
    media = (picture(60, 40), Video(movie(64, 48, 8)), picture(90, 120))
    messages = [
        shown_media("image", "video"),
        {"role": "assistant", "content": "Three."},
        shown_media("image", text="And <|here|>?"),
        {"role": "assistant", "content": "Four."},
    ]
    conversations = ConversationRenderer(renderer)
    row = conversation(messages, media=media)
    (shown,) = conversations.render(row)
    assert trained(processor.tokenizer, shown) == ["Three.<|im_end|>", "Four.<|im_end|>"]
    assert conversations.measure([row]) == [len(shown.token_ids)]
    whole = renderer.write_chat(messages, generation_prompt=False)
    inputs = renderer.require_vision().process(whole, renderer.load(row))
    assert inputs["input_ids"][0].tolist() == shown.token_ids
    assert {"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"} <= set(shown.model_inputs)
    for name, value in shown.model_inputs.items():
        assert torch.equal(value, inputs[name])
    assert torch.equal(shown.position_ids, renderer.position_ids(inputs["input_ids"][0], inputs))
    first, second = ConversationRenderer(renderer, turns="each").render(row)
    assert (second.token_ids, second.model_inputs.keys()) == (shown.token_ids, shown.model_inputs.keys())
    assert first.token_ids == shown.token_ids[: len(first.token_ids)]
    assert len(first.model_inputs["image_grid_thw"]) == 1


def test_a_pair_with_pictures_has_them_in_both_and_spelled_placeholders_stay_text(processor, picture):
    renderer = ConversationRenderer(Renderer(processor))
    row = conversation(
        [shown_media("image", text="<|image_pad|>?"), TALK[1]], media=(picture(60, 40),), rejected=[TALK[3]]
    )
    better, worse = renderer.render(row)
    prompt = Renderer(processor).render(Example("t:1", [shown_media("image")], row.media, ""))
    assert better.token_ids.count(processor.image_token_id) == prompt.token_ids.count(processor.image_token_id)
    for name, value in prompt.model_inputs.items():
        assert torch.equal(better.model_inputs[name], value)
        assert torch.equal(worse.model_inputs[name], value)
    assert torch.equal(better.position_ids[:, : better.prompt_length], worse.position_ids[:, : worse.prompt_length])


def test_placeholders_are_never_trained_and_pictures_are_never_cut(processor, picture):
    row = conversation([TALK[0], TALK[1], shown_media("image"), TALK[3]], media=(picture(60, 40),))
    (shown,) = ConversationRenderer(Renderer(processor), train_on_prompt=True).render(row)
    untrained = {token for token, own in zip(shown.token_ids[1:], shown.loss_mask[1:], strict=True) if not own}
    assert untrained == {processor.image_token_id}
    cut = ConversationRenderer(
        Renderer(processor), max_length=shown.token_ids.index(processor.image_token_id) + 1, truncation="right"
    )
    with pytest.raises(DataError, match=r"^t:1: cut at \d+ tokens, the conversation loses a picture"):
        cut.render(row)


def test_media_that_cannot_be_used_name_the_row(tokenizer, processor):
    row = conversation([shown_media("image"), TALK[1]], media=(b"junk",))
    with pytest.raises(DataError, match=r"^t:1: the row has pictures or videos, but the model reads text only"):
        ConversationRenderer(Renderer(tokenizer)).render(row)
    (refused,) = ConversationRenderer(Renderer(processor)).measure([row])
    assert isinstance(refused, MediaError)
    assert str(refused).startswith("t:1: ")
    (refused,) = ConversationRenderer(Renderer(processor)).measure([conversation(TALK, media=(b"",))])
    assert str(refused).startswith("t:1: 0 picture placeholders in the prompt for 1 pictures")
