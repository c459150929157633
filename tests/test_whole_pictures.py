"""Families whose pictures are read by the processor's own call: prompts, log-probs and samples.

The references are transformers' own: the processor on the same messages, and the model's eager forward of each row.
"""

from dataclasses import replace
from typing import Any

import families
import pytest
import torch
import transformers as hf
from family_prompts import make_learner, make_samples
from PIL import Image

from r1_core.types import Sample
from r1_data.demonstrations import ConversationRenderer
from r1_data.formats import Columns
from r1_data.messages import to_example
from r1_data.pictures import from_pil
from r1_data.positions import count_tokens, position_ids_of
from r1_data.render import Renderer
from r1_data.types import Conversation, Prompt
from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.types import SamplingParams
from r1_rollout.weights import LocalWeights

FAMILIES = ("internvl", "llava", "aya_vision")
SIZES = ([(90, 60)], [(60, 200), (120, 120)], [])  # (width, height) of each row's pictures
CLIP = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_processor(family: str) -> Any:
    tokenizer = families.make_tokenizer()
    start, end, image, video = families.MEDIA_TOKENS
    named = {"start_image": start, "end_image": end, "context_image": image, "image": image, "video": video}
    for kind, token in named.items():
        setattr(tokenizer, f"{kind}_token", token)
        setattr(tokenizer, f"{kind}_token_id", tokenizer.convert_tokens_to_ids(token))
    side = {"height": 56, "width": 56}
    template = families.CHAT_TEMPLATE
    if family == "internvl":
        tiles = hf.GotOcr2ImageProcessor(size=side, crop_to_patches=True, max_patches=4)
        videos = hf.InternVLVideoProcessor()
        return hf.InternVLProcessor(tiles, tokenizer, videos, image_seq_length=4, chat_template=template)
    if family == "llava":
        images = hf.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=side)
        how = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
        return hf.LlavaProcessor(images, tokenizer, image_token=image, chat_template=template, **how)
    # The placeholder of the chat is another token than those that the model replaces by features.
    tokens = {"start_of_img_token": start, "end_of_img_token": end, "img_patch_token": video}
    plain = {"img_line_break_token": "|", "tile_token": "tile", "tile_global_token": "whole"}
    tiles = hf.GotOcr2ImageProcessor(size=side, crop_to_patches=True, max_patches=4)
    how = {"patch_size": 14, "img_size": 56, "downsample_factor": 2, "chat_template": template}
    return hf.AyaVisionProcessor(tiles, tokenizer, image_token=image, **tokens, **plain, **how)


def make_config(family: str) -> Any:
    _, _, image, patch = families.make_tokenizer().convert_tokens_to_ids([*families.MEDIA_TOKENS])
    text = families.make_config("qwen2").to_dict()
    if family == "internvl":
        vision = {**CLIP, "image_size": [56, 56], "patch_size": [14, 14], "use_qk_norm": False}
        own = {"image_token_id": image, "image_seq_length": 4, "downsample_ratio": 0.5}
    elif family == "llava":
        vision = {**CLIP, "model_type": "clip_vision_model", "image_size": 56, "patch_size": 14}
        own = {"image_token_index": image, "vision_feature_select_strategy": "default", "vision_feature_layer": -1}
    else:
        vision = {**CLIP, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}
        own = {"image_token_index": patch, "downsample_factor": 2, "adapter_layer_norm_eps": 1e-6}
        own |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    return hf.AutoConfig.for_model(family, text_config=text, vision_config=vision, tie_word_embeddings=False, **own)


def make_renderer(family: str) -> Renderer:
    return Renderer(make_processor(family), position_ids=position_ids_of(make_config(family)) or count_tokens)


def make_pictures(sizes: list[tuple[int, int]]) -> list[Image.Image]:
    draw = torch.Generator().manual_seed(len(sizes))
    pixels = [torch.randint(0, 256, (height, width, 3), generator=draw, dtype=torch.uint8) for width, height in sizes]
    return [Image.fromarray(one.numpy()) for one in pixels]


def make_rows() -> list[dict[str, Any]]:
    return [
        {"problem": "Is <image> it?" * len(sizes) + "How many?", "answer": "4", "images": make_pictures(sizes)}
        for sizes in SIZES
    ]


def make_prompts(family: str) -> list[Prompt]:
    """One a row; their lengths and sizes are also counted from headers."""
    renderer = make_renderer(family)
    examples = [
        to_example(f"row {i}", row, Columns("problem", "answer", "images")) for i, row in enumerate(make_rows())
    ]
    prompts = [renderer.render(example) for example in examples]
    assert renderer.measure(examples) == [len(prompt.token_ids) for prompt in prompts]
    values = [sum(value.numel() for value in prompt.model_inputs.values()) for prompt in prompts]
    assert [renderer.count_values(example) for example in examples] == values
    return prompts


def eager_model(family: str) -> Any:
    config = make_config(family)
    config._attn_implementation = "eager"
    return families.make_model(family, config=config)


def logprobs_alone(model: Any, sample: Sample) -> torch.Tensor:
    logits = model(sample.token_ids[None], **sample.model_inputs).logits[0, :-1]
    every = logits.log_softmax(-1).gather(1, sample.token_ids[1:, None])[:, 0]
    return every[sample.loss_mask[1:]]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_what_the_processor_makes_of_the_same_messages(family: str) -> None:
    processor, vision = make_processor(family), make_renderer(family).require_vision()
    for prompt, row in zip(make_prompts(family), make_rows(), strict=True):
        text = processor.apply_chat_template(list(prompt.messages), add_generation_prompt=True, tokenize=False)
        pictures = {"images": row["images"]} if row["images"] else {}
        own = processor(text=[text], return_tensors="pt", **pictures)
        assert prompt.text == text
        assert prompt.token_ids == own["input_ids"][0].tolist()
        assert torch.equal(prompt.position_ids, torch.arange(len(prompt.token_ids))[None])
        assert {*prompt.model_inputs} == {*own} - {"input_ids", "attention_mask"}
        assert all(torch.equal(value, own[name]) for name, value in prompt.model_inputs.items())
        # As behind a turn, where the tokens before the pictures are given.
        expanded = vision.process_pictures(list(prompt.engine_token_ids), [from_pil(one) for one in row["images"]])
        assert expanded is not None
        assert all(torch.equal(value, own[name]) for name, value in expanded.items())
        assert expanded.keys() == {*prompt.model_inputs, "input_ids"}


@pytest.mark.parametrize("padding_free", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_pictures_learn_as_each_does_alone(family: str, padding_free: bool) -> None:
    samples = [replace(sample, advantages=sample.loss_mask.float()) for sample in make_samples(make_prompts(family))]
    plain, model = eager_model(family), families.make_model(family, config=make_config(family))
    learner = make_learner(model, rows=len(samples), padding_free=padding_free)
    annotated = learner.add_logprobs(samples, ["old_logprobs"])
    for sample, one in zip(samples, annotated, strict=True):
        with torch.no_grad():
            expected = logprobs_alone(plain, sample)
        torch.testing.assert_close(one.old_logprobs[sample.loss_mask], expected, rtol=0, atol=1e-5)
    changed = {name: -3 * value for name, value in samples[0].model_inputs.items()}
    after = learner.add_logprobs([replace(samples[0], model_inputs=changed), *samples[1:]], ["old_logprobs"])
    gaps = [float((a.old_logprobs - b.old_logprobs).abs().max()) for a, b in zip(annotated, after, strict=True)]
    assert gaps[0] > 1e-3
    assert max(gaps[1:]) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_embedded_engine_samples_with_the_models_own_log_probs(family: str) -> None:
    prompts, model = make_prompts(family), families.make_model(family, config=make_config(family))
    engine = EmbeddedEngine(families.make_model(family, config=make_config(family)), end_token_ids=[])
    plain = eager_model(family)
    with engine.active(LocalWeights(model.state_dict().items(), 0)):
        groups = [group for _, group in sorted(engine.generate(prompts, SamplingParams(n=2, max_tokens=6)))]
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            token_ids = torch.tensor([*prompt.token_ids, *completion.token_ids])
            mask = torch.arange(len(token_ids)) >= len(prompt.token_ids)
            row = Sample(token_ids, mask, torch.arange(len(token_ids))[None], 0, 0.0, model_inputs=prompt.model_inputs)
            with torch.no_grad():
                expected = logprobs_alone(plain, row)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_to_learn_from_has_the_processors_tokens(family: str) -> None:
    renderer, pictures = make_renderer(family), tuple(make_pictures(SIZES[1]))
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Three."}]
    (shown,) = ConversationRenderer(renderer).render(Conversation("row", messages, pictures))
    text = renderer.write_chat(messages, generation_prompt=False)
    own = make_processor(family)(text=[text], images=list(pictures), return_tensors="pt")
    assert shown.token_ids == own["input_ids"][0].tolist()
    assert torch.equal(shown.model_inputs["pixel_values"], own["pixel_values"])
