"""Prompts with media as vLLM's inputs.

Of families with M-RoPE, vLLM gets the very tensors that the learner's model will see, so nothing is resized, normalised
or counted twice. Of other families, vLLM's processor reads the pictures again, as its servers do, and must find the
prompt's tokens.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.inputs import EngineInput, mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

from r1_rollout.errors import PromptError
from r1_rollout.tokens import setting
from r1_rollout.types import PromptLike
from r1_rollout.vllm.compat import BROUGHT

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from vllm.renderers import BaseRenderer

# The forward arguments of the Qwen-VL families, which vLLM's models of them read by the same names.
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
SECONDS = "second_per_grid_ts"  # of videos
IGNORED = {"mm_token_type_ids", "attention_mask", "input_ids"}  # vLLM works these out itself


@dataclass(frozen=True, slots=True)
class MediaReader:
    placeholders: Mapping[str, int]  # kind of media to its token
    merge: int  # patches along each side of what becomes one token

    @classmethod
    def of(cls, config: "PreTrainedConfig") -> "MediaReader | None":
        """Return a reader for models with M-RoPE; None for others."""
        vision = setting(config, "vision_config")
        merge = setting(vision, "spatial_merge_size")
        if merge is None:
            return None
        return cls({kind: setting(config, f"{kind}_token_id") for kind in GRIDS}, merge)

    def read(self, prompt: PromptLike) -> EngineInput:
        """Return the engine's input. Raises PromptError if placeholders, positions or inputs do not fit."""
        inputs = {name: value for name, value in prompt.model_inputs.items() if name not in IGNORED}
        if unknown := sorted(inputs.keys() - {*PIXELS.values(), *GRIDS.values(), SECONDS}):
            raise PromptError(f"prompt {prompt.id}: vLLM cannot take the inputs {', '.join(unknown)}")
        if not inputs:
            return tokens_input(list(prompt.token_ids))
        kinds = [kind for kind, name in GRIDS.items() if name in inputs]
        places = {kind: self._places(prompt, kind, inputs[GRIDS[kind]]) for kind in kinds}
        rotary = _rotary(prompt)
        brought = {BROUGHT.format(kind=kind): rotary.expand(len(places[kind]), -1, -1) for kind in kinds}
        items = MultiModalKwargsItems.from_hf_inputs({**inputs, **brought}, _fields(inputs))
        hashes = {kind: [_digest(item, inputs) for item in items[kind]] for kind in kinds}
        return mm_input(list(prompt.token_ids), items, hashes, places)

    def _places(self, prompt: PromptLike, kind: str, grids: Tensor) -> list[PlaceholderRange]:
        counts = (grids.prod(-1) // self.merge**2).tolist()
        token = self.placeholders[kind]
        places = [index for index, candidate in enumerate(prompt.token_ids) if candidate == token]
        if len(places) != sum(counts):
            raise PromptError(f"prompt {prompt.id}: {len(places)} {kind} placeholders, but {sum(counts)} features")
        return list(_ranges(places, counts))


def process_pictures(renderer: "BaseRenderer[Any]", prompt: PromptLike) -> EngineInput:
    """Let vLLM's own processor read a prompt's pictures.

    Raises PromptError: vLLM cannot read them, or reads other tokens than the prompt's.
    """
    media = sorted(prompt.model_inputs.keys() - IGNORED)
    if not media:
        return tokens_input(list(prompt.token_ids))
    images: list[Any] = [*getattr(prompt, "images", ())]
    if not images or getattr(prompt, "videos", None):
        raise PromptError(
            f"prompt {prompt.id} has {', '.join(media)}, but vLLM takes only pictures of this model's family: use the "
            "embedded engine, or leave the row out"
        )
    tokens: Any = {"prompt_token_ids": list(prompt.engine_token_ids), "multi_modal_data": {"image": images}}  # type: ignore[attr-defined]
    try:
        inputs = renderer.process_for_engine(tokens, time.time())
    except Exception as error:  # whatever the processor of a family raises
        raise PromptError(f"prompt {prompt.id}: vLLM cannot read its pictures: {error}") from error
    found = list(inputs["prompt_token_ids"])
    if found != list(prompt.token_ids):
        raise PromptError(
            f"prompt {prompt.id}: vLLM's processor makes {len(found)} tokens of it, not these {len(prompt.token_ids)}: "
            "use the embedded engine for this model's pictures"
        )
    return inputs


def _rotary(prompt: PromptLike) -> Tensor:
    shape, expected = tuple(prompt.position_ids.shape), (4, len(prompt.token_ids))
    if shape != expected:
        raise PromptError(
            f"prompt {prompt.id} has media, but position_ids of shape {list(shape)}, expected {list(expected)}: the "
            "token count and the model's three rotary axes"
        )
    return prompt.position_ids[1:]


def _ranges(places: Sequence[int], counts: Sequence[int]) -> Iterator[PlaceholderRange]:
    start = 0
    for count in counts:
        own = places[start : start + count]
        first, length = own[0], own[-1] - own[0] + 1
        mask = None
        if length != count:
            mask = torch.zeros(length, dtype=torch.bool)
            mask[torch.tensor(own) - first] = True
        yield PlaceholderRange(first, length, mask)
        start += count


def _fields(inputs: Mapping[str, Tensor]) -> dict[str, MultiModalFieldConfig]:
    fields = {}
    for kind, grid in GRIDS.items():
        if grid in inputs:
            fields[PIXELS[kind]] = MultiModalFieldConfig.flat_from_sizes(kind, inputs[grid].prod(-1))
            fields[grid] = MultiModalFieldConfig.batched(kind, keep_on_cpu=True)
            fields[BROUGHT.format(kind=kind)] = MultiModalFieldConfig.batched(kind, keep_on_cpu=True)
    if SECONDS in inputs:
        fields[SECONDS] = MultiModalFieldConfig.batched("video", keep_on_cpu=True)
    return fields


def _digest(item: Mapping[str, Any], names: Collection[str]) -> str:
    digest = blake2b(digest_size=16)
    for name in sorted(item.keys() & names):
        value = torch.as_tensor(item[name].data).contiguous()
        digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        digest.update(value.view(torch.uint8).numpy().data if value.ndim else value.numpy().tobytes())
    return digest.hexdigest()
