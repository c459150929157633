"""Ask of every vision-language architecture what r1 can do with its pictures, from tiny random weights.

A processor is built from its classes, without a published folder. The references are transformers' own: the processor
on the same messages, and the model's eager forward of what that returns.

uv run python tests/picture_families.py [NAME …]     # prints a line each; --write (of all) writes picture_families.json
"""

import copy
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import architectures
import families
import tiny_models
import torch
import transformers as hf
from architectures import first_line, measure_gap
from PIL import Image
from torch import Tensor
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES
from transformers.video_utils import VideoMetadata

from r1_cli.build.packing import find_mixing
from r1_cli.build.refusals import MIXES
from r1_cli.models.load import configure_modules, without_dropout
from r1_cli.train.groups.group import extend_positions
from r1_core.learner import Learner
from r1_core.learner.logprobs import count_features
from r1_core.types import Sample
from r1_data.pictures import from_pil
from r1_data.positions import count_tokens, position_ids_of
from r1_data.render import Renderer
from r1_data.types import DataError, Example, Prompt, Video
from r1_data.vision import Vision
from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.probes import Probes, spread_tokens
from r1_rollout.token_kinds import find_kinds, media_kinds, prepare_media
from r1_rollout.types import SamplingParams

RECORD = Path(__file__).with_name("picture_families.json")
START, END, IMAGE, VIDEO = families.MEDIA_TOKENS
HALF = 0.25  # nats that a token's log-prob may be off in bfloat16
SIZES = ([(60, 200), (120, 120)], [(90, 60)], [])  # (width, height) of each row's pictures


@dataclass(frozen=True, slots=True)
class Family:
    """What a family's processor and configuration need beside the names that transformers registers."""

    processor: str = ""  # classes, where transformers registers none or another
    image_class: str = ""
    video_class: str = ""
    special: tuple[str, ...] = ()  # tokens that the processor knows by their text
    tokens: dict[str, str] = field(default_factory=dict)  # name -> token, of attributes of the tokenizer
    placeholder: str = IMAGE  # of a picture, in a chat
    patch: str = ""  # which the model replaces by features; "": the placeholder
    image: dict[str, Any] = field(default_factory=dict)  # settings of the image processor
    own: dict[str, Any] = field(default_factory=dict)  # of the processor
    config: dict[str, Any] = field(default_factory=dict)  # changes of the tiny configuration
    vision: dict[str, Any] = field(default_factory=dict)  # and of its vision tower
    text: dict[str, Any] = field(default_factory=dict)  # and of its text model
    audio_class: str = ""


SIDE = {"height": 56, "width": 56}
AREA = {"shortest_edge": 28 * 28, "longest_edge": 128 * 128}
TOWER = {"image_size": 56, "patch_size": 14}
SQUARES = {"image_size": [56, 56], "patch_size": [14, 14]}
TILES = {"size": SIDE, "crop_to_patches": True, "max_patches": 4}
CROP = {"size": {"shortest_edge": 56}, "crop_size": SIDE}
PINPOINTS = {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]}
CLIP = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
GLM = ("<|begin_of_video|>", "<|end_of_video|>")
PIXTRAL = {
    "patch_size": 14, "spatial_merge_size": 2, "image_token": IMAGE, "image_break_token": START, "image_end_token": END,
}  # fmt: skip
AYA = {
    "image_token": IMAGE, "start_of_img_token": START, "end_of_img_token": END, "img_patch_token": VIDEO,
    "img_line_break_token": "|", "tile_token": "tile", "tile_global_token": "whole", "patch_size": 14, "img_size": 56,
    "downsample_factor": 2,
}  # fmt: skip
COMPASS = ("<|IMAGE_PAD|>", "<|VIDEO_PAD|>", "<|VISION_START|>", "<|VISION_END|>")
MINIMAX = ("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>[")
GLIMMER = ("<|video|>", "<|vid_frame_separator|>", "<|vid_start|>", "<|vid_end|>")
STEP = ("<im_patch>", "<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>")
LLAMA4 = ("<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>")
IDEFICS = ("<image>", "<fake_token_around_image>", "<global-img>")

SLICES = {"slice_start": START, "slice_end": END, "image_id_start": START, "image_id_end": END}
OVIS = ("<image>", "<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")

FAMILIES: dict[str, Family] = {
    "aya_vision": Family(image=TILES, own=AYA, patch=VIDEO, vision=TOWER, config={"downsample_factor": 2}),
    "cohere_compass": Family(
        special=COMPASS, placeholder=COMPASS[0], image={"size": AREA, "patch_size": 16},
        tokens=dict(zip(("image", "video", "vision_start", "vision_end"), COMPASS, strict=True)),
    ),
    "qianfan_ocr": Family(
        special=("<image>",), placeholder="<image>", patch=IMAGE, image=TILES, own={"image_seq_length": 4},
        vision=SQUARES,
    ),
    "minimax_m3_vl": Family(
        special=MINIMAX, placeholder=MINIMAX[0], image={"size": AREA},
        config={"merged_hidden_size": 256, "projector_hidden_size": 64},
    ),
    "janus": Family(image={"size": SIDE}, own={"num_image_tokens": 16}, vision={**TOWER, "projection_dim": 64}),
    "muse_glimmer": Family(
        special=(*LLAMA4, *GLIMMER), placeholder="<|patch|>", image={"size": AREA},
        config={"out_hidden_size": 256, "projector_hidden_size": 64},
    ),
    "kimi_k25": Family(config={"projection_hidden_size": 64}),
    "step3p7": Family(special=STEP, placeholder=STEP[0], image={"size": SIDE, "patch_size": 56}),
    "cohere2_vision": Family(image={**TILES, "patch_size": 2}, vision=TOWER),
    "cosmos3_edge": Family(image={"size": AREA}),
    "got_ocr2": Family(special=("<img>", "</img>", "<imgpad>"), placeholder="<imgpad>"),
    "gemma4": Family(
        image={"max_soft_tokens": 70}, text={"use_bidirectional_attention": "vision"},
        audio_class="Gemma4AudioFeatureExtractor", tokens={"boa": START, "eoa": END, "audio": VIDEO},
    ),
    "minicpmv4_6": Family(tokens=SLICES),
    "minicpmv4_7": Family(tokens=SLICES),
    "smolvlm": Family(
        special=IDEFICS, tokens=dict(zip(("image", "fake_image", "global_image"), IDEFICS, strict=True)),
        placeholder="<image>", own={"image_seq_len": 4}, vision=TOWER, config={"scale_factor": 2},
        image={"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
    ),
    "video_llama_3": Family(image={"size": AREA, "patch_size": 16}),
    "glmga": Family("Glm46VProcessor", special=GLM, video_class="Glm46VVideoProcessor", image={"size": AREA}),
    "phi4_multimodal": Family(
        special=("<|audio|>",), tokens={"audio": "<|audio|>"}, image={"dynamic_hd": 2},
        vision={"feature_layer": -1}, audio_class="Phi4MultimodalFeatureExtractor",
    ),
    "paligemma": Family(image={"size": SIDE, "image_seq_length": 16}, vision=TOWER),
    "cosmos3_omni": Family("Qwen3VLProcessor", image={"size": AREA, "patch_size": 16}),
    "deepseek_vl": Family(image={"size": SIDE}, own={"num_image_tokens": 16}, vision=TOWER),
    "ernie4_5_vl_moe": Family(image={"size": AREA}),
    "exaone4_5": Family(image={"size": AREA, "patch_size": 14}),
    "gemma3": Family(
        placeholder=START, patch=IMAGE, image={"size": SIDE}, own={"image_seq_length": 4}, vision=TOWER,
        config={"mm_tokens_per_image": 4},
    ),
    "glm4v": Family(special=GLM, image={"size": AREA}),
    "glm46v": Family(special=GLM, image={"size": AREA}),
    "glm4v_moe": Family("", "Glm4vImageProcessor", "Glm4vVideoProcessor", GLM, image={"size": AREA}),
    "glm5_next": Family(special=GLM, image={"size": AREA}),
    "glm_ocr": Family("Glm46VProcessor", "Glm46VImageProcessor", "Glm46VVideoProcessor", GLM, image={"size": AREA}),
    "hyperclovax_vision_v2": Family(image={"size": AREA, "patch_size": 14}),
    "idefics2": Family(tokens={"image_boundary": START}),
    "idefics3": Family(
        special=IDEFICS, placeholder="<image>", own={"image_seq_len": 4}, vision=TOWER, config={"scale_factor": 2},
        image={"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
    ),
    "internvl": Family(image=TILES, own={"image_seq_length": 4}, vision=SQUARES, config={"image_seq_length": 4}),
    "lfm2_vl": Family(),
    "lighton_ocr": Family(
        image={"size": {"longest_edge": 112}, "patch_size": 14}, own={"patch_size": 14, "spatial_merge_size": 2},
        vision={"image_size": 112, "patch_size": 14}, config={"spatial_merge_size": 2},
    ),
    "llama4": Family(
        special=LLAMA4, placeholder="<|image|>", patch="<|patch|>", image={"size": SIDE, "max_patches": 4},
        own={"patch_size": 14, "pixel_shuffle_ratio": 0.5}, vision={**TOWER, "intermediate_size": 256},
    ),
    "llava": Family("", "CLIPImageProcessor", image=CROP, own=CLIP, vision=TOWER, config={"vision_feature_layer": -1}),
    "llava_next": Family(image={**CROP, **PINPOINTS}, own=CLIP, vision=TOWER, config=PINPOINTS),
    "llava_next_video": Family(image={**CROP, **PINPOINTS}, own=CLIP, vision=TOWER, config=PINPOINTS),
    "llava_onevision": Family(
        image={"size": SIDE, **PINPOINTS}, own={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        vision=TOWER, config=PINPOINTS,
    ),
    "mistral3": Family(
        image={"size": {"longest_edge": 112}, "patch_size": 14}, own=PIXTRAL,
        vision={"image_size": 112, "patch_size": 14}, config={"spatial_merge_size": 2},
    ),
    "mllama": Family(
        special=("<|image|>", "<|python_tag|>"), placeholder="<|image|>", tokens={"bos": "<|im_start|>"},
    ),
    "ovis2": Family(
        special=OVIS, placeholder="<image>", patch="<IMG_ATOM>", image=TILES, own={"image_seq_length": 16},
        vision=TOWER,
    ),
    "paddleocr_vl": Family(image={"size": AREA}),
    "qwen2_5_vl": Family(image={"size": AREA, "patch_size": 14}),
    "qwen2_vl": Family(image={"size": AREA, "patch_size": 14}),
    "qwen3_5": Family(image={"size": AREA, "patch_size": 16}),
    "qwen3_5_moe": Family(image={"size": AREA, "patch_size": 16}),
    "qwen3_vl": Family(image={"size": AREA, "patch_size": 16}),
    "qwen3_vl_moe": Family(image_class="Qwen2VLImageProcessor", image={"size": AREA, "patch_size": 16}),
    "qwen4_exp": Family(image={"size": AREA, "patch_size": 16}),
    "video_llava": Family(
        image=CROP, own={"patch_size": 14, "image_token": IMAGE, "video_token": VIDEO}, vision=TOWER,
    ),
    "vipllava": Family(image=CROP, own=CLIP, vision=TOWER, config={"vision_feature_layers": [-1, -2]}),
}  # fmt: skip


# No tiny processor or model with a vision tower was found for these.
UNTRIED = (
    "aria", "blip", "blip-2", "chameleon", "deepseek_ocr2", "deepseek_vl_hybrid",
    "diffusion_gemma", "emu3", "evolla", "fast_vlm", "florence2", "fuyu", "gemma3n", "gemma4_unified", "git",
    "granite4_vision", "hunyuan_vl", "idefics", "inkling_mm_model", "instructblip", "instructblipvideo",
    "kosmos-2", "kosmos-2.5", "mistral4", "nemotron_h_omni",
    "perception_lm", "pi0", "pix2struct", "pp_chart2table", "pp_formulanet", "qwen2_5_omni_thinker",
    "qwen3_omni_moe_thinker", "shieldgemma2", "t5gemma2", "udop", "vision-encoder-decoder",
)  # fmt: skip


# --- a tiny processor, configuration and model ------------------------------------------------------------------------


def make_tokenizer(family: Family) -> Any:
    tokenizer = families.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*families.MEDIA_TOKENS, *family.special]})
    starts = dict.fromkeys(("boi", "image_start", "start_image", "video_start", "image_break"), START)
    ends = dict.fromkeys(("eoi", "image_end", "end_image", "video_end"), END)
    named = {"image": IMAGE, "context_image": IMAGE, "video": VIDEO, "img_line_break": "|", **starts, **ends}
    named["end_of_utterance"] = families.END
    # So that they are saved with it.
    tokenizer._set_model_specific_special_tokens(
        {f"{kind}_token": one for kind, one in (named | family.tokens).items()}
    )
    return tokenizer


def _first(names: Any) -> str:
    return names.get("torchvision") or next(iter(names.values())) if isinstance(names, dict) else names


def make_processor(name: str) -> Any:
    family = FAMILIES[name]
    kind = getattr(hf, family.processor or PROCESSOR_MAPPING_NAMES[name])
    around = f"{START}{IMAGE}{END}"
    template = families.CHAT_TEMPLATE.replace(around, around if family.placeholder == IMAGE else family.placeholder)
    template = template.replace(VIDEO, family.tokens.get("video", VIDEO))
    images = getattr(hf, family.image_class or _first(IMAGE_PROCESSOR_MAPPING_NAMES[name]))(**family.image)
    parts = {"image_processor": images, "tokenizer": make_tokenizer(family), "chat_template": template}
    if "video_processor" in inspect.signature(kind.__init__).parameters:
        parts["video_processor"] = getattr(hf, family.video_class or _first(VIDEO_PROCESSOR_MAPPING_NAMES[name]))()
    if family.audio_class:
        own = "audio_processor" in inspect.signature(kind.__init__).parameters
        parts["audio_processor" if own else "feature_extractor"] = getattr(hf, family.audio_class)()
    with unchecked_package(kind):
        return kind(**parts, **family.own)


@contextmanager
def unchecked_package(kind: Any) -> Iterator[None]:
    """Do without num2words, which SmolVLM's processor asks for and uses for videos only."""
    module = sys.modules[kind.__module__]
    with patch.object(module, "num2words", str) if hasattr(module, "num2words") else nullcontext():
        yield


def make_config(name: str) -> Any:
    family, config = FAMILIES[name], without_dropout(tiny_models.make_config(name))
    known = make_tokenizer(family).convert_tokens_to_ids
    own, video = known(family.patch or family.placeholder), known(family.tokens.get("video", VIDEO))
    ids = {"image_token_id": own, "image_token_index": own, "video_token_id": video, "video_token_index": video}
    ids |= {"vision_start_token_id": known(START), "image_start_token_id": known(START)}
    ids |= {"vision_end_token_id": known(END), "image_end_token_id": known(END)}
    for key, token in ids.items():
        for part in (config, config.get_text_config(), config.vision_config):
            if hasattr(part, key):
                setattr(part, key, token)
    for key, value in family.config.items():
        setattr(config, key, value)
    for key, value in family.vision.items():
        setattr(config.vision_config, key, value)
    for key, value in family.text.items():
        setattr(config.get_text_config(), key, value)
    return config


def make_model(name: str) -> Any:
    model, draw = tiny_models.make_model(name, make_config(name)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and not parameter.any():  # as some projections begin
                parameter.normal_(0.0, 0.2, generator=draw)
    return model


# --- rows, and the references -----------------------------------------------------------------------------------------


def make_pictures(sizes: list[tuple[int, int]], variant: int = 0) -> list[Image.Image]:
    draw = torch.Generator().manual_seed(10 * variant + len(sizes))
    pixels = [torch.randint(0, 256, (height, width, 3), generator=draw, dtype=torch.uint8) for width, height in sizes]
    return [Image.fromarray(one.numpy()) for one in pixels]


def make_example(sizes: list[tuple[int, int]], variant: int = 0, frames: int = 0) -> Example:
    """A question about pictures, and a video if it has frames."""
    parts: list[dict[str, str]] = [{"type": "text", "text": "How many?"}]
    media: tuple[Any, ...] = tuple(make_pictures(sizes, variant))
    if frames:
        parts.insert(0, {"type": "video"})
        media = (*media, Video(tuple(make_pictures([(64, 48)] * frames, variant + 1)), fps=2.0))
    for _ in sizes:
        parts[:0] = [{"type": "image"}, {"type": "text", "text": "and"}]
    return Example("row", [{"role": "user", "content": parts}], media, "4")


def call_processor(processor: Any, prompt: Prompt, example: Example, needed: Iterable[str] = ()) -> dict[str, Tensor]:
    images = [one for one in example.media if not isinstance(one, Video)]
    videos = [one for one in example.media if isinstance(one, Video)]
    pictures: dict[str, Any] = {"images": [images]} if images else {}
    if videos:
        frames = [torch.stack([from_pil(frame) for frame in one.source]) for one in videos]
        shown = [
            VideoMetadata(len(one), fps=2.0, height=48, width=64, frames_indices=[*range(len(one))]) for one in frames
        ]
        pictures |= {"videos": frames, "videos_kwargs": {"do_sample_frames": False, "video_metadata": shown}}
    how = {"text_kwargs": {"return_mm_token_type_ids": True}} if "mm_token_type_ids" in needed else {}
    output = processor(text=[prompt.text], return_tensors="pt", **how, **pictures)
    return {key: value.float() if value.is_floating_point() else value for key, value in output.items()}


def make_samples(prompts: list[Prompt]) -> list[Sample]:
    """Two answers to each prompt, of different lengths."""
    draw, found = torch.Generator().manual_seed(1), []
    for group, prompt in enumerate(prompts):
        for own in (6, 11 - group):
            ids = torch.cat([torch.tensor(prompt.token_ids), torch.randint(0, 250, (own,), generator=draw)])
            found.append(
                Sample(
                    ids, torch.arange(len(ids)) >= len(prompt.token_ids), extend_positions(prompt.position_ids, own),
                    group_id=group, reward=0.0, prompt_length=len(prompt.token_ids), model_inputs=prompt.model_inputs,
                    old_logprobs=torch.zeros(len(ids)), advantages=torch.ones(len(ids)),
                )
            )  # fmt: skip
    return found


def forward_alone(model: Any, own: dict[str, Tensor], token_ids: Tensor) -> Tensor:
    """Logits [L, V] of a row that begins with what the processor returned; the model finds positions by itself."""
    length, added = own["input_ids"].shape[1], {}
    for key, value in own.items():
        if value.shape == own["input_ids"].shape:
            filler = 1 if key == "attention_mask" else 0
            added[key] = torch.cat([value, value.new_full((1, len(token_ids) - length), filler)], 1)
    added["input_ids"] = token_ids[None]
    inner = getattr(model, "model", model)
    if hasattr(inner, "rope_deltas"):
        inner.rope_deltas = None
    logits: Tensor = model(**{**own, **added}, use_cache=False).logits[0].float()
    return logits


def taken(logits: Tensor, token_ids: Tensor, prompt: int) -> Tensor:
    return logits[:-1].log_softmax(-1).gather(1, token_ids[1:, None])[prompt - 1 :, 0]


# --- the questions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """What r1 does with a family's pictures. All was compared with transformers' own processor and eager forward."""

    layout: str = ""  # as in `architectures.Answer`; "" if pictures cannot be trained
    engine: bool = False
    videos: bool = False  # whether the same holds of a row with a picture and a video
    why: str = ""
    wrong: str = ""  # what differs without a word; never in the record


def ask(name: str) -> Answer:
    try:
        processor, model = make_processor(name), make_model(name)
    except Exception as error:
        return Answer(why=f"not tried: {first_line(error)}")
    plain, told, kinds = copy.deepcopy(model), copy.deepcopy(model), media_kinds(model.config)
    prepare_media(told)
    plain.set_attn_implementation("eager")
    renderer = Renderer(processor, position_ids=position_ids_of(model.config) or count_tokens)
    examples, vision = [make_example(sizes) for sizes in SIZES], renderer.vision
    videos = vision is not None and vision.reads_videos
    if videos:
        examples.append(make_example([(60, 90)], frames=4))
    try:
        prompts = [renderer.render(example) for example in examples]
    except DataError as error:
        return Answer(why=str(error).removeprefix("row: "))
    needed = inspect.signature(plain.forward).parameters
    own = [call_processor(processor, *pair, needed) for pair in zip(prompts, examples, strict=True)]
    if wrong := compare_prompts(renderer, examples, prompts, own):
        return Answer(wrong=wrong)

    def alone(model: Any, sample: Sample) -> Tensor:
        logits = forward_alone(model, own[sample.group_id], sample.token_ids)
        return taken(logits, sample.token_ids, sample.prompt_length)

    pixels = {key: -3 * value if "pixel_values" in key else value for key, value in own[0].items()}
    token_ids = own[0]["input_ids"][0]
    try:
        with torch.no_grad():
            shown, changed = (forward_alone(plain, one, token_ids) for one in (own[0], pixels))
        if not float((shown - changed).abs().max()) > 1e-3:
            return Answer(wrong="a picture changes nothing")
    except Exception as error:
        return Answer(why=first_line(error))
    probes = [
        Probes((renderer.render(make_example([(56, 56)], variant)),), (spread_tokens(range(250), 6, variant),))
        for variant in (1, 2)
    ]
    samples = make_samples(prompts)
    features, placeholders = count_features(told, samples[0]), find_kinds(samples[0].token_ids, kinds) == 1
    if features not in (None, int(placeholders.sum())):
        return Answer(wrong=f"{int(placeholders.sum())} placeholders, {features} features")
    learned = architectures.ask_learner(model, plain, samples, alone, probes)
    if find_mixing(Learner(model, torch.optim.SGD(model.parameters(), lr=0.0), lambda step: 1.0), *samples[::2][:2]):
        return Answer(why=MIXES.format(name=name))
    engine = ask_engine(plain, prompts, alone) if learned.layout else ""
    wrong = learned.wrong or ("" if engine in ("", "right") else engine)
    if learned.layout and not wrong:
        wrong = ask_half(plain, prompts, samples, alone, learned, engine=engine == "right")
    return Answer(
        learned.layout,
        engine == "right",
        videos and bool(learned.layout),
        architectures.without_figures(learned.why),
        wrong,
    )


def compare_prompts(
    renderer: Renderer, examples: list[Example], prompts: list[Prompt], own: list[dict[str, Tensor]]
) -> str:
    for example, prompt, expected in zip(examples, prompts, own, strict=True):
        if prompt.token_ids != expected["input_ids"][0].tolist():
            return "the tokens are not the processor's"
        if renderer.prompt_length(example) != len(prompt.token_ids):
            return "the length counted from sizes is not the number of tokens"
        known = {*expected} - {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
        if {*prompt.model_inputs} != known:
            return f"the inputs are {sorted(prompt.model_inputs)}, the processor's {sorted(known)}"
        if bad := [key for key in known if not torch.equal(prompt.model_inputs[key], expected[key])]:
            return f"{', '.join(bad)} are not the processor's"
        every = not isinstance(renderer.vision, Vision)  # which counts pixels only
        counted = [value.numel() for key, value in prompt.model_inputs.items() if every or "pixel_values" in key]
        if renderer.count_values(example) != sum(counted):
            return "the number of values counted from sizes is not that of the inputs"
    return ""


def ask_engine(plain: Any, prompts: list[Prompt], alone: Callable[[Any, Sample], Tensor], exact: Any = None) -> str:
    """Return "right", "" if the engine refuses the model, or what is wrong. `exact`: `plain` in float32."""
    banned = [*range(250, 258), *range(259, plain.config.get_text_config().vocab_size)]
    try:
        engine = EmbeddedEngine(copy.deepcopy(plain), end_token_ids=[258], banned_token_ids=banned, version=0)
    except ValueError:
        return ""
    with engine.active():
        groups = [group for _, group in sorted(engine.generate(prompts, SamplingParams(n=2, max_tokens=6, seed=1)))]
    worst = 0.0
    for number, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
        for one in group:
            ids = torch.tensor([*prompt.token_ids, *one.token_ids])
            row = Sample(ids, ids >= 0, ids[None], number, 0.0, prompt_length=len(prompt.token_ids))
            with torch.no_grad():
                worst = max(worst, measure_gap(torch.as_tensor(one.logprobs), alone(exact or plain, row)))
    allowed = architectures.TOLERANCE if exact is None else HALF
    return "right" if worst <= allowed else f"the embedded engine is off by {worst:.2g}"


def ask_half(
    plain: Any,
    prompts: list[Prompt],
    samples: list[Sample],
    alone: Callable[[Any, Sample], Tensor],
    learned: architectures.Answer,
    *,
    engine: bool,
) -> str:
    """Return what fails in bfloat16, or is further from float32 than the model's own forward in bfloat16."""
    half = copy.deepcopy(plain).to(torch.bfloat16)
    prepare_media(half)
    model = copy.deepcopy(half)
    try:
        configure_modules(model, torch.bfloat16, torch.device("cpu"))
        learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.0), lambda step: 1.0)
        learner.batching = replace(learner.batching, padding_free=True, share_prompts=True)
        if learned.layout != "shared":
            learner.set_layout(learned.layout, own_attention=learned.attention == "own")
        found = [one.old_logprobs[one.loss_mask] for one in learner.add_logprobs(samples, ["old_logprobs"])]
        learner.forward_backward(samples, architectures.SumOfLogprobs())
        if engine and (wrong := ask_engine(half, prompts, alone, plain)) != "right":
            return f"bfloat16: {wrong}"
    except Exception as error:
        return f"bfloat16: {first_line(error)}"
    with torch.no_grad():
        expected, own = (torch.cat([alone(one, sample) for sample in samples]) for one in (plain, half))
    off, allowed = float((torch.cat(found) - expected).abs().mean()), 2 * float((own - expected).abs().mean()) + 0.01
    return "" if off <= allowed else f"bfloat16: log-probs are off by {off:.2g}, {allowed:.2g} allowed"


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    found = {}
    with architectures.quiet():
        for name in [word for word in words if word != "--write"] or sorted(FAMILIES):
            start = time.process_time()
            found[name] = ask(name)
            print(f"{name} {time.process_time() - start:.1f} s {asdict(found[name])}", flush=True)
    if "--write" in words:
        lines = [f"  {json.dumps(name)}: {json.dumps(asdict(answer))}" for name, answer in found.items()]
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
