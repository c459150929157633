"""Vision-language families train with pictures as the page of models says; the others are refused in a sentence.

The references are transformers' own: the processor on the same messages, and the model's eager forward of each row.
"""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import architectures
import picture_families
import pytest
import tiny_models
import torch
from family_prompts import make_learner
from picture_families import FAMILIES, RECORD, UNTRIED, Answer

from r1_cli.build.packing import choose_layout
from r1_cli.build.rendering import build_renderer
from r1_cli.config import RunConfig
from r1_cli.hardware import Hardware
from r1_cli.models.files import open_model
from r1_cli.models.load import ModelError, configure_modules
from r1_cli.plan.check.model import examine_layouts
from r1_core.learner import Learner
from r1_data.demonstrations import ConversationRenderer
from r1_data.pictures import from_pil
from r1_data.positions import count_tokens, position_ids_of
from r1_data.render import Renderer
from r1_data.types import Conversation, DataError, MediaError, Prompt
from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.token_kinds import find_kinds, media_kinds
from r1_rollout.types import SamplingParams

KNOWN: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
# One of each kind: tiles along the first axis, sizes that are filled up, a row's pictures along the second axis, and
# pictures that attend in both directions.
KINDS = ("internvl", "mistral3", "idefics3", "gemma3")


def make_renderer(family: str) -> Renderer:
    rule = position_ids_of(picture_families.make_config(family)) or count_tokens
    return Renderer(picture_families.make_processor(family), position_ids=rule)


def make_prompts(family: str) -> list[Prompt]:
    renderer = make_renderer(family)
    return [renderer.render(picture_families.make_example(sizes)) for sizes in picture_families.SIZES]


def ask_again(names: list[str]) -> dict[str, tuple[Answer, Answer]]:
    with architectures.quiet():
        found = {name: picture_families.ask(name) for name in names}
    return {name: (one, Answer(**KNOWN[name])) for name, one in found.items() if one != Answer(**KNOWN[name])}


def test_a_family_that_an_upgrade_brings_is_named() -> None:
    assert sorted({*FAMILIES, *UNTRIED} ^ tiny_models.VISION) == [], "add it to picture_families, or say why not"
    assert sorted({*FAMILIES} ^ {*KNOWN}) == [], "run tests/picture_families.py --write, and read what it says"


def test_at_least_thirty_families_train_with_pictures() -> None:
    assert sum(bool(one["layout"]) for one in KNOWN.values()) >= 30
    assert not any(one["wrong"] for one in KNOWN.values())


def test_a_family_of_tiles_does_what_the_page_says() -> None:
    assert ask_again([KINDS[0]]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*FAMILIES} - {KINDS[0], "llava_onevision"}))
def test_every_other_family_does_what_the_page_says(family: str) -> None:
    assert ask_again([family]) == {}


@pytest.mark.parametrize("family", KINDS)
def test_pictures_behind_a_turn_are_what_the_processor_makes_of_the_whole_chat(family: str) -> None:
    renderer = make_renderer(family)
    for sizes in picture_families.SIZES[:2]:
        example = picture_families.make_example(sizes)
        prompt = renderer.render(example)
        own = picture_families.call_processor(picture_families.make_processor(family), prompt, example)
        pictures = [from_pil(one) for one in example.media]
        found = renderer.require_vision().process_pictures(list(prompt.engine_token_ids), pictures)
        assert found is not None
        assert {*own} - {*found} == {"attention_mask"}
        assert all(torch.equal(value, own[name]) for name, value in found.items() if name in own)


@pytest.mark.parametrize("family", KINDS)
def test_a_picture_changes_its_own_row_and_no_other(family: str) -> None:
    samples = picture_families.make_samples(make_prompts(family))[::2]
    model = picture_families.make_model(family)
    configure_modules(model, torch.float32, torch.device("cpu"))
    learner = make_learner(model, rows=len(samples))
    before = learner.add_logprobs(samples, ["old_logprobs"])
    changed = {**samples[1].model_inputs, "pixel_values": -3 * samples[1].model_inputs["pixel_values"]}
    after = learner.add_logprobs([samples[0], replace(samples[1], model_inputs=changed), samples[2]], ["old_logprobs"])
    gaps = [float((a.old_logprobs - b.old_logprobs).abs().max()) for a, b in zip(before, after, strict=True)]
    assert gaps[1] > 1e-3
    assert max(gaps[0], gaps[2]) < 1e-5


@pytest.mark.parametrize("family", [*KINDS, "llava_onevision"])
def test_a_conversation_to_learn_from_has_the_processors_tokens(family: str) -> None:
    renderer, pictures = make_renderer(family), tuple(picture_families.make_pictures(picture_families.SIZES[0]))
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Three."}]
    (shown,) = ConversationRenderer(renderer).render(Conversation("row", messages, pictures))
    text = renderer.write_chat(messages, generation_prompt=False)
    own = picture_families.make_processor(family)(text=[text], images=[list(pictures)], return_tensors="pt")
    assert shown.token_ids == own["input_ids"][0].tolist()
    assert torch.equal(shown.model_inputs["pixel_values"], own["pixel_values"])


def test_pictures_that_attend_in_both_directions_are_tried() -> None:
    """What `ask` compares with depends on the kinds of tokens, so r1 hands them on."""
    processor, model = (make("gemma3") for make in (picture_families.make_processor, picture_families.make_model))
    example, (prompt,) = picture_families.make_example([(90, 60)]), make_prompts("gemma3")[1:2]
    own, token_ids = picture_families.call_processor(processor, prompt, example), torch.tensor(prompt.token_ids)
    assert torch.equal(own["token_type_ids"][0], find_kinds(token_ids, media_kinds(model.config)))
    with torch.no_grad():
        told = picture_families.forward_alone(model, own, token_ids)
        plain = picture_families.forward_alone(model, {**own, "token_type_ids": 0 * own["token_type_ids"]}, token_ids)
    assert float((told - plain).abs().max()) > 1e-3


def save(family: str, folder: Path, **settings: int) -> str:
    processor = picture_families.make_processor(family)
    for name, value in settings.items():
        setattr(processor, name, value)
    picture_families.make_model(family).save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def test_the_check_of_a_model_says_how_its_pictures_are_read(tmp_path: Path) -> None:
    answers = dict(examine_layouts(save("llava", tmp_path)))
    assert answers["shared prompts"] == "right"
    assert answers["pictures"] == "read by the processor's own call; videos are refused"


def test_a_vision_tower_that_mixes_the_pictures_of_rows_is_refused_at_the_start(tmp_path: Path) -> None:
    path = save("minimax_m3_vl", tmp_path)
    with pytest.raises(ModelError) as refused:
        dict(examine_layouts(path))
    reason = "pictures of minimax_m3_vl cannot be used: its vision tower mixes the pictures of a batch's rows; train on"
    assert str(refused.value).startswith(f"{path}: {reason}")


def test_a_model_without_its_processor_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = save("llava", tmp_path)
    for name in ("processor_config.json", "preprocessor_config.json"):
        (tmp_path / name).unlink(missing_ok=True)
    with pytest.raises(ModelError) as refused:
        dict(examine_layouts(path))
    start, end = f"worker.actor.model.model_path={path}: its processor cannot be read (", "model into the folder"
    assert str(refused.value).startswith(start)
    assert str(refused.value).endswith(end)
    assert "\n" not in str(refused.value)


def test_rows_of_text_are_trained_where_pictures_are_wrong(tmp_path: Path) -> None:
    path = save("llava", tmp_path, num_additional_image_tokens=2)
    config = RunConfig.model_validate({"worker": {"actor": {"model": {"model_path": path}}}})
    model = open_model(config)
    weights = picture_families.make_model("llava")
    configure_modules(weights, torch.float32, torch.device("cpu"))
    learner = Learner(weights, torch.optim.SGD(weights.parameters(), lr=0.0), lambda step: 1.0)
    how = (config, Hardware("cpu"), model, build_renderer(config, model), learner)
    choose_layout(*how, pictures=False)
    with pytest.raises(ModelError, match="writes 17 placeholders"):
        choose_layout(*how)


def test_placeholders_that_are_not_as_many_as_features_are_refused_at_the_start(tmp_path: Path) -> None:
    path = save("llava", tmp_path, num_additional_image_tokens=2)  # the tower has one token that is no patch
    with pytest.raises(ModelError) as refused:
        dict(examine_layouts(path))
    assert str(refused.value) == (
        f"{path}: pictures of llava cannot be used: for one picture its processor writes 17 placeholders and its "
        "vision tower computes 16 features; take the processor and the config.json that were published with the weights"
    )


@pytest.mark.parametrize(("family", "reason"), [
    ("idefics2", "what it makes of a picture depends on the rest of the row (attention_mask, input_ids)"),
    ("ernie4_5_vl_moe", "its model needs moe_mm_token_type_ids of every token, which r1 does not hand on to it"),
    ("got_ocr2", "its own call does not read pictures of several shapes (Nested images are only supported with "
     "`multi_page` set to `True`.)"),
    ("paligemma", "what it makes of a row depends on the others of the batch (labels)"),
])  # fmt: skip
def test_a_family_that_cannot_work_is_refused_in_a_sentence(family: str, reason: str) -> None:
    renderer = make_renderer(family)
    with pytest.raises(DataError) as refused:
        renderer.render(picture_families.make_example([(90, 60)]))
    name = type(picture_families.make_processor(family)).__name__
    instead = "train on rows without pictures, or a model of docs/models.md whose pictures are read"
    assert str(refused.value) == f"row: pictures of {name} cannot be used: {reason}; {instead}"
    assert renderer.render(picture_families.make_example([])).token_ids


def test_a_processor_whose_batch_of_rows_is_not_its_rows_joined_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = picture_families.make_processor("mistral3")
    own = type(processor).__call__

    def call(self: Any, images: Any = None, text: Any = None, **kwargs: Any) -> Any:
        output = own(self, images=images, text=text, **kwargs)
        if len(text) > 1:
            output["pixel_values"] = output["pixel_values"].flip(0)
        return output

    monkeypatch.setattr(type(processor), "__call__", call)
    renderer = Renderer(processor, position_ids=count_tokens)
    with pytest.raises(DataError, match=r"of a row depends on the others of the batch \(pixel_values\); train on"):
        renderer.require_vision()


def test_rows_whose_pictures_depend_on_one_another_are_measured_whole() -> None:
    assert ask_again(["llava_onevision"]) == {}
    vision = make_renderer("llava_onevision").require_vision()
    (picture,) = picture_families.make_pictures([(90, 60)])
    refusal = "pictures of LlavaOnevisionProcessor cannot be added in later turns: the tokens of a picture depend on "
    with pytest.raises(MediaError, match=f"^{refusal}"):
        vision.process_pictures([vision.tokens["picture"][1]], [from_pil(picture)])


def test_videos_that_need_more_than_their_number_of_frames_are_refused() -> None:
    renderer = make_renderer("video_llama_3")
    assert renderer.describe_media().endswith("videos are refused")
    refusal = "videos of VideoLlama3Processor cannot be used, only its pictures"
    with pytest.raises(MediaError, match=f"^row: {refusal}$"):
        renderer.prompt_length(picture_families.make_example([], frames=4))
    with pytest.raises(MediaError, match=f"^row: {refusal}$"):
        renderer.render(picture_families.make_example([], frames=4))


def test_a_later_turn_with_a_picture_is_sampled_as_the_model_alone_would() -> None:
    """Behind kept keys and values the model's own mask is not known, so the turns before are computed again."""
    plain, (prompt,) = picture_families.make_model("gemma3"), make_prompts("gemma3")[1:2]
    plain.set_attn_implementation("eager")
    engine = EmbeddedEngine(copy.deepcopy(plain), end_token_ids=[], banned_token_ids=range(250, 272), version=0)
    session = engine.open_session(SamplingParams(max_tokens=4, seed=1))
    session.submit("first", prompt, max_tokens=4)
    ((_, (first,)),) = session.poll()
    vision = make_renderer("gemma3").require_vision()
    (picture,) = map(from_pil, picture_families.make_pictures([(60, 60)], 3))
    piece = vision.process_pictures([7, vision.tokens["picture"][1], 8], [picture])
    assert piece is not None
    token_ids = torch.tensor([*prompt.token_ids, *first.token_ids, *piece["input_ids"][0].tolist()])
    pixels = torch.cat([prompt.model_inputs["pixel_values"], piece["pixel_values"]])
    later = replace(
        prompt, token_ids=token_ids.tolist(), position_ids=torch.arange(len(token_ids))[None],
        model_inputs={"pixel_values": pixels},
    )  # fmt: skip
    session.submit("later", later, max_tokens=4)
    ((_, (found,)),) = session.poll()
    whole = torch.tensor([*later.token_ids, *found.token_ids])
    own = {"input_ids": whole[None], "token_type_ids": find_kinds(whole, media_kinds(plain.config))[None]}
    with torch.no_grad():
        logits = picture_families.forward_alone(plain, {**own, "pixel_values": pixels}, whole)
    expected = picture_families.taken(logits, whole, len(token_ids))
    torch.testing.assert_close(torch.tensor(found.logprobs), expected, rtol=0, atol=1e-5)
