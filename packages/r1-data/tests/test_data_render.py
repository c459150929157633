"""Tests of rendering: lengths from headers, one resize, position ids, and placeholders that match features."""

from pathlib import Path

import pytest
import torch
import transformers as hf
from data_models import tiny_config
from PIL import Image
from transformers import AutoModelForImageTextToText

from r1_data.pictures import load_image
from r1_data.positions import count_tokens, position_ids_of
from r1_data.references import Video
from r1_data.render import Renderer
from r1_data.types import DataError, Example, MediaError

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


def make_example(*media, text: str = "How many?", row: str = "t:1") -> Example:
    items = [*({"type": "image"} for _ in media), {"type": "text", "text": text}]
    return Example(row, [{"role": "user", "content": items if media else text}], media, "3", {"source": "s"})


def test_text_prompt_is_the_rendered_chat(tokenizer):
    prompt = Renderer(tokenizer).render(make_example(text="Hé?"))
    assert prompt.text == "<|im_start|>user\nHé?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert prompt.engine_token_ids == prompt.token_ids
    assert prompt.position_ids.tolist() == [list(range(len(prompt.token_ids)))]
    assert (prompt.images, prompt.model_inputs, prompt.ground_truth, prompt.metadata) == ((), {}, "3", {"source": "s"})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [(), ((60, 40),), ((28, 300), (500, 33)), ((3, 3), (1000, 700), (64, 64))])
@pytest.mark.parametrize("budget", [(None, None), (784, 12_544), (40_000, 50_000)])
def test_length_from_headers_equals_rendered_length(fresh_processor, picture, family, sizes, budget):
    renderer = Renderer(fresh_processor(family), min_pixels=budget[0], max_pixels=budget[1])
    example = make_example(*(picture(*size) for size in sizes))
    prompt = renderer.render(example)
    assert renderer.prompt_length(example) == len(prompt.token_ids) == prompt.position_ids.shape[1]


def test_placeholders_stand_as_one_run_a_picture_and_once_for_the_engine(processor, picture):
    prompt = Renderer(processor).render(make_example(picture(56, 56), picture(112, 56)))
    image_token = processor.image_token_id
    assert prompt.token_ids.count(image_token) == 4 + 8
    assert prompt.engine_token_ids.count(image_token) == 2
    squeezed = [t for i, t in enumerate(prompt.token_ids) if t != image_token or prompt.token_ids[i - 1] != image_token]
    assert squeezed == prompt.engine_token_ids
    assert processor.tokenizer.decode(prompt.engine_token_ids) == prompt.text


@pytest.mark.parametrize("family", FAMILIES)
def test_model_inputs_hold_further_forward_arguments_only(fresh_processor, picture, family):
    renderer = Renderer(fresh_processor(family))
    assert set(renderer.render(make_example(picture(60, 60))).model_inputs) == {"pixel_values", "image_grid_thw"}
    assert renderer.render(make_example()).model_inputs == {}


def test_pixel_budget_is_applied_once_by_the_processors_own_resize(fresh_processor, picture):
    data, (low, high) = picture(600, 400), (28 * 28 * 4, 28 * 28 * 16)
    prompt = Renderer(fresh_processor("qwen2_5_vl"), min_pixels=low, max_pixels=high).render(make_example(data))
    configured = fresh_processor("qwen2_5_vl").image_processor
    configured.size = {"shortest_edge": low, "longest_edge": high}
    expected = configured(load_image(data), return_tensors="pt")
    grid = prompt.model_inputs["image_grid_thw"][0]
    assert prompt.images[0].size == (14 * grid[2], 14 * grid[1])  # what is kept are the pixels that the model sees
    assert torch.equal(prompt.model_inputs["pixel_values"], expected["pixel_values"])
    assert torch.equal(prompt.model_inputs["image_grid_thw"], expected["image_grid_thw"])
    assert low <= int(prompt.model_inputs["image_grid_thw"].prod()) * 14 * 14 <= high


def test_position_ids_get_the_processors_output_and_are_passed_through(processor, picture):
    seen = {}

    def position_ids(token_ids, inputs):
        seen.update(inputs, token_ids=token_ids)
        return torch.stack([torch.arange(len(token_ids)), token_ids, token_ids, token_ids]).int()

    prompt = Renderer(processor, position_ids=position_ids).render(make_example(picture(60, 60)))
    assert seen["token_ids"].tolist() == prompt.token_ids
    assert seen["token_ids"].dtype == torch.long
    assert {"mm_token_type_ids", "image_grid_thw", "pixel_values"} <= set(seen)
    assert seen["mm_token_type_ids"].shape == (1, len(prompt.token_ids))
    assert prompt.position_ids.dtype == torch.long
    assert prompt.position_ids[1].tolist() == prompt.token_ids


def test_forward_of_a_prompt_equals_the_forward_of_the_processors_output(processor, picture):
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(tiny_config("qwen2_5_vl", processor)).eval()
    prompt = Renderer(processor).render(make_example(picture(112, 56), picture(56, 56)))
    start = prompt.token_ids.index(processor.image_token_id)
    assert prompt.position_ids[2:, start : start + 8].sub(start).tolist() == [[0] * 4 + [1] * 4, [0, 1, 2, 3] * 2]
    inputs = processor(text=[prompt.text], images=list(prompt.images), return_tensors="pt")
    token_ids = torch.tensor([prompt.token_ids])
    with torch.no_grad():
        expected = model(**inputs).logits
        found = model(token_ids, position_ids=prompt.position_ids[:, None], **prompt.model_inputs).logits
    assert torch.allclose(found, expected, atol=1e-6)


def test_where_pictures_stand_is_never_guessed(fresh_processor, picture):
    processor = fresh_processor("qwen2_5_vl")
    (Path(processor.tokenizer.name_or_path) / "config.json").unlink()
    renderer = Renderer(processor)
    assert renderer.prompt_length(make_example(picture(60, 60))) > 4
    with pytest.raises(DataError, match=r"has no config.json; give Renderer\(position_ids="):
        renderer.render(make_example(picture(60, 60)))
    assert (
        Renderer(processor, position_ids=count_tokens).render(make_example(picture(60, 60))).position_ids.shape[0] == 1
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [(), ((60, 40),), ((300, 28), (33, 500), (300, 28)), ((1000, 700), (3, 3))])
def test_a_prompt_is_what_the_processor_makes_of_its_text_and_pictures(fresh_processor, picture, family, sizes):
    processor, given = fresh_processor(family), {}
    example = make_example(*(picture(*size) for size in sizes), text="Wie viele, ≤ 3?")

    def position_ids(token_ids, inputs):
        given.update(inputs)
        return torch.arange(len(token_ids))[None]

    prompt = Renderer(processor, position_ids=position_ids).render(example)
    images = [load_image(reference) for reference in example.media]
    expected = processor(text=[prompt.text], images=images or None, return_tensors="pt")
    assert prompt.token_ids == expected["input_ids"][0].tolist()
    assert torch.equal(given["mm_token_type_ids"], expected["mm_token_type_ids"])
    for name in prompt.model_inputs.keys() | ({"pixel_values", "image_grid_thw"} if images else set()):
        assert prompt.model_inputs[name].dtype == expected[name].dtype
        assert torch.equal(prompt.model_inputs[name], expected[name])  # to the bit


def test_a_family_that_writes_more_than_placeholders_for_a_picture_is_read_by_its_own_call(fresh_processor, picture):
    processor = fresh_processor("qwen2_5_vl")
    own = type(processor).replace_image_token
    processor.replace_image_token = lambda inputs, image_idx, **_: f"<{own(processor, inputs, image_idx)}>"
    renderer, example = Renderer(processor), make_example(picture(56, 56), picture(120, 56))
    prompt = renderer.render(example)
    images = [load_image(reference) for reference in example.media]
    assert prompt.token_ids == processor(text=[prompt.text], images=images)["input_ids"][0]
    assert "<<|image_pad|>" in processor.tokenizer.decode(prompt.token_ids)
    assert renderer.measure([example]) == [len(prompt.token_ids)]


def test_position_ids_of_the_wrong_length_are_refused(tokenizer):
    renderer = Renderer(tokenizer, position_ids=lambda token_ids, _: torch.zeros(1, len(token_ids) + 1))
    with pytest.raises(DataError, match=r"t:1: .* position ids"):
        renderer.render(make_example())


def test_chat_template_and_its_arguments_can_be_replaced(tokenizer):
    thinking = Renderer(tokenizer, chat_template_kwargs={"thinking": True}).render(make_example())
    assert thinking.text.endswith("<|im_start|>assistant\n<think>")
    bare = Renderer(tokenizer, chat_template="{{ messages[0].content }}").render(make_example(text="Hi"))
    assert bare.text == "Hi"


def test_tokens_a_tokenizer_adds_by_itself_are_not_added(tokenizer):
    class Adding(type(tokenizer)):
        def __call__(self, text, add_special_tokens=True, **kwargs):
            output = super().__call__(text, add_special_tokens=add_special_tokens, **kwargs)
            return {"input_ids": [self.eos_token_id] * add_special_tokens + output["input_ids"]}

    adding = Adding(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    adding.chat_template = "{{ messages[0].content }}"
    assert Renderer(adding).render(make_example(text="Hi")).token_ids == tokenizer("Hi")["input_ids"]


def test_picture_for_a_text_model_is_refused(tokenizer, picture):
    for use in (Renderer(tokenizer).render, Renderer(tokenizer).prompt_length):
        with pytest.raises(DataError, match="t:1: the row has pictures or videos, but the model reads text only"):
            use(make_example(picture(9, 9)))


@pytest.mark.parametrize("use", ["render", "prompt_length"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("see <|image_pad|>", "2 picture placeholders in the prompt for 1 pictures"),
        ("see <|video_pad|>", "1 video placeholders in the prompt for 0 videos"),
    ],
)
def test_media_tokens_written_out_in_the_text_are_refused(processor, picture, use, text, message):
    with pytest.raises(DataError) as caught:
        getattr(Renderer(processor), use)(make_example(picture(60, 60), text=text))
    assert str(caught.value).startswith("t:1: ")
    assert message in str(caught.value)


def test_template_that_drops_pictures_is_refused(processor, picture):
    renderer = Renderer(processor, chat_template="{{ messages[0].role }}")
    with pytest.raises(DataError, match="t:1: 0 picture placeholders in the prompt for 1 pictures"):
        renderer.prompt_length(make_example(picture(60, 60)))


def test_placeholders_that_do_not_match_the_features_are_refused(fresh_processor, picture):
    processor = fresh_processor("qwen2_5_vl")
    processor.replace_image_token = lambda inputs, image_idx, **_: processor.image_token * 3
    with pytest.raises(DataError, match="t:1: 3 picture placeholders but 4 picture features"):
        Renderer(processor).render(make_example(picture(56, 56)))


@pytest.mark.parametrize("use", ["render", "prompt_length"])
@pytest.mark.parametrize(
    ("data", "message"), [(b"junk", "cannot be read"), (Image.new("RGB", (900, 3)), "aspect ratio")]
)
def test_pictures_that_cannot_be_used_name_the_row(processor, use, data, message):
    with pytest.raises(DataError, match=f"^t:1: .*{message}"):
        getattr(Renderer(processor), use)(make_example(data))


def test_a_picture_too_wide_for_the_processor_is_named(processor, tmp_path):
    Image.new("RGB", (900, 3)).save(tmp_path / "wide.png")
    example = make_example(tmp_path / "wide.png")
    for use in (Renderer(processor).prompt_length, Renderer(processor).load):
        with pytest.raises(MediaError, match=r"^t:1: picture .*wide\.png: absolute aspect ratio"):
            use(example)


def test_template_that_refuses_messages_names_the_row(tokenizer):
    renderer = Renderer(tokenizer, chat_template="{{ raise_exception('no system role') }}")
    with pytest.raises(DataError, match=r"t:1: .*no system role"):
        renderer.render(make_example())


def test_empty_prompt_is_refused(tokenizer):
    with pytest.raises(DataError, match="t:1: the prompt is empty"):
        Renderer(tokenizer, chat_template="{{ '' }}").prompt_length(make_example())


@pytest.mark.parametrize("budget", [(0, 100), (200, 100), (10**9, None)])
def test_pixel_range_upside_down_is_refused(processor, budget):
    with pytest.raises(DataError, match="min_pixels must be above 0 and at most max_pixels"):
        Renderer(processor, min_pixels=budget[0], max_pixels=budget[1])


def test_model_without_chat_template_is_refused(fresh_processor):
    tokenizer = fresh_processor("qwen2_vl").tokenizer
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        Renderer(tokenizer)


def test_pictures_of_an_unknown_family_are_refused_and_its_texts_are_rendered(tokenizer, picture):
    class Other:
        image_processor = object()
        model_input_names = tokenizer.model_input_names
        chat_template = None

    other = Other()
    other.tokenizer = tokenizer
    renderer = Renderer(other, position_ids=count_tokens)
    with pytest.raises(DataError, match=r"t:1: pictures of Other cannot be used: it has no image_token .*; train on"):
        renderer.render(make_example(picture(60, 40)))
    assert renderer.render(make_example()).token_ids == Renderer(tokenizer).render(make_example()).token_ids


def test_a_family_with_videos_of_another_kind_reads_pictures_and_refuses_its_videos(fresh_processor, picture):
    processor = fresh_processor("qwen2_vl")
    processor.video_processor = hf.Glm4vVideoProcessor()
    renderer = Renderer(processor, position_ids=count_tokens)
    assert len(renderer.render(make_example(picture(60, 40))).images) == 1
    with pytest.raises(DataError, match="videos of Qwen2VLProcessor cannot be used, only its pictures"):
        renderer.load(make_example(Video((picture(60, 40),))))


def test_positions_of_a_family_without_a_rule_of_its_own_count_tokens():
    vision = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vision_output_dim": 8}
    text = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    assert position_ids_of(hf.Llama4Config(vision_config=vision, text_config={**text, "num_local_experts": 1})) is None


def test_an_argument_that_the_chat_template_never_reads_is_refused(tokenizer):
    Renderer(tokenizer, chat_template_kwargs={"thinking": True})
    with pytest.raises(DataError, match=r"the chat template has no argument 'thinkin'; it reads .*thinking"):
        Renderer(tokenizer, chat_template_kwargs={"thinkin": True})
