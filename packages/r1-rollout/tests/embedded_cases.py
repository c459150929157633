"""Prompts for the tiny models, engines on them, and plain forwards to compare with."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.types import Completion, SamplingParams
from r1_rollout.weights import LocalWeights

END = 7
MEDIA = IMAGE, VIDEO, VISION_START, VISION_END = 60, 61, 62, 63  # as in conftest.py


@dataclass(frozen=True)
class HandPrompt:
    id: str
    token_ids: list[int]
    position_ids: Tensor
    model_inputs: Mapping[str, Tensor] = field(default_factory=dict)


def text_prompt(id: str, length: int, seed: int = 0) -> HandPrompt:
    """A prompt of random tokens."""
    tokens = torch.randint(0, 50, (length,), generator=torch.Generator().manual_seed(seed + length))
    return HandPrompt(id, tokens.tolist(), torch.arange(length)[None])


def picture_prompt(model: Any, id: str, length: int, grids: list[tuple[int, int, int]]) -> HandPrompt:
    """A prompt with one random picture per grid (frames, height, width in patches) in front of random text."""
    generator = torch.Generator().manual_seed(length)
    token_ids: list[int] = torch.randint(0, 50, (3,), generator=generator).tolist()
    for t, h, w in grids:
        token_ids += [VISION_START, *[IMAGE] * (t * h * w // 4), VISION_END]
    token_ids += torch.randint(0, 50, (length,), generator=generator).tolist()
    ids = torch.tensor(token_ids)[None]
    media = {}
    if grids:
        patches = sum(t * h * w for t, h, w in grids)
        media = {
            "pixel_values": torch.randn(patches, 3 * 2 * 14 * 14, generator=generator),
            "image_grid_thw": torch.tensor(grids),
        }
    rotary, _ = model.model.get_rope_index(
        ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=media.get("image_grid_thw")
    )
    return HandPrompt(id, token_ids, torch.cat([torch.arange(len(token_ids))[None], rotary[:, 0]]), media)


@torch.no_grad()
def forward_logits(model: Any, prompt: HandPrompt, token_ids: list[int]) -> Tensor:
    """Logits [answer length, vocabulary] by one plain forward of the model over prompt and answer, uncached.

    Rotary positions of a picture prompt are worked out by the model itself, from the whole sequence.
    """
    ids = torch.tensor([prompt.token_ids + token_ids])
    kinds = {"mm_token_type_ids": (ids == IMAGE).int()} if prompt.model_inputs else {}
    logits = model(input_ids=ids, use_cache=False, **prompt.model_inputs, **kinds).logits[0]
    return logits[len(prompt.token_ids) - 1 : -1]


def copy_of(model: Any) -> Any:
    return type(model)(copy.deepcopy(model.config))


def engine_for(model: Any, **options: Any) -> EmbeddedEngine:
    """An engine on its own module; the weights arrive by `active`."""
    return EmbeddedEngine(copy_of(model), **{"end_token_ids": {END}, "banned_token_ids": MEDIA, **options})


def sample(model: Any, prompts: list[Any], params: SamplingParams, **options: Any) -> list[list[Completion]]:
    engine = engine_for(model, **options)
    with engine.active(LocalWeights(model.state_dict().items(), version=3)):
        groups = dict(engine.generate(prompts, params))
    return [groups[index] for index in range(len(prompts))]


def mixed_prompts(model: Any) -> list[HandPrompt]:
    """Text model or not: prompts of different lengths, with none, one or two pictures."""
    if not hasattr(model.model, "get_rope_index"):
        return [text_prompt(f"p{length}", length) for length in (9, 1, 17, 4, 12)]
    grids = [[(1, 8, 8)], [], [(1, 4, 6), (1, 6, 4)], [(1, 4, 4)], []]
    return [picture_prompt(model, f"p{i}", 4 + 3 * i, g) for i, g in enumerate(grids)]


def assert_exact(model: Any, prompts: list[HandPrompt], groups: list[list[Completion]], temperature: float) -> None:
    """Compare reported log-probs with plain forwards of each sequence alone."""
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            expected = plain_logprobs(model, prompt, completion.token_ids.tolist(), temperature)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=2e-6, rtol=2e-6)


def plain_logprobs(model: Any, prompt: HandPrompt, token_ids: list[int], temperature: float) -> Tensor:
    """Log-probs [answer length] by one plain forward of the sequence alone."""
    logits = forward_logits(model, prompt, token_ids) / (temperature or 1.0)
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]
