"""The canary of a run: the sequences that the weight check compares, and its tolerances."""

import io
import logging
import math
import random
import sys
from collections.abc import Sequence

import torch

from r1_cli.config import RunConfig
from r1_cli.hardware import Hardware
from r1_cli.models.families import find_value
from r1_cli.models.files import ModelFiles
from r1_cli.train.groups.group import to_sample
from r1_cli.train.types import REFUSALS, Policy
from r1_data.positions import count_tokens
from r1_data.render import Renderer
from r1_data.types import DataError, Example
from r1_rollout.probes import OPENING, PROMPTS, RESPONSE, Probes, spread_tokens, text_probes
from r1_rollout.tokens import media_token_ids
from r1_rollout.weight_checks import TOLERANCE, Canary, learn_tolerance, widest_gap

log = logging.getLogger("r1")

PICTURE_SIDE = 56  # pixels, before the run's own pixel limits
TWO_PICTURES = (2, 2), (2, 3)  # of one text


def build_canary(
    config: RunConfig, hardware: Hardware, model: ModelFiles, renderer: Renderer, learner: Policy
) -> Canary:
    """Choose sequences and tolerances for the model and the run's lengths and precision.

    The first sync uses sequences up to the run's longest sample, and a tolerance from the learner's rounding noise.
    """
    actor, rollout = config.worker.actor, config.worker.rollout
    computing = hardware.computing_dtype(actor.kept_dtype, actor.fsdp.mp_param_dtype)
    precision = max(computing, hardware.engine_dtype(rollout.dtype), key=TOLERANCE.__getitem__)
    pictures = picture_probes(config, model, renderer, TWO_PICTURES, told=logging.WARNING)
    probes, fresh = (build_probes(config, model, renderer, variant=variant) for variant in (0, 1))
    first, unseen = (build_probes(config, model, renderer, variant=variant, opening=True) for variant in (0, 1))
    tolerance = learn_tolerance(_find_noise(learner, first, precision), precision)
    opening = Canary(first, unseen, tolerance, rollout.temperature)
    return Canary(probes, fresh, TOLERANCE[precision], rollout.temperature, pictures, opening)


def _find_noise(learner: Policy, probes: Probes, precision: torch.dtype) -> float:
    """Return the gap that rounding makes on all probes except the longest; NaN if the model's own attention fails."""
    shown = [
        to_sample(prompt, response)
        for prompt, response in zip(probes.prompts, probes.responses, strict=True)
        if prompt.model_inputs or len(prompt.token_ids) <= max(PROMPTS)
    ]
    try:
        return widest_gap(learner.compute_eager_logprobs(shown, precision), learner.compute_eager_logprobs(shown))
    except REFUSALS as refusal:
        log.warning("the canary uses the default tolerance, as the model's own attention fails: %s", refusal)
        return math.nan


def build_probes(
    config: RunConfig,
    model: ModelFiles,
    renderer: Renderer,
    *,
    variant: int,
    opening: bool = False,
    sampled: bool = True,
) -> Probes:
    """Return text sequences, and one with a picture if possible; `opening` ones reach the longest sample.

    Args:
        sampled: whether they must be prompts of the run, of at most `data.max_prompt_length` tokens.
    """
    data = config.data
    longest, lengths, response = data.max_prompt_length, [*PROMPTS], min(RESPONSE, data.max_response_length)
    if opening:
        response = min(OPENING, data.max_response_length)
        longest = min(longest + data.max_response_length, find_max_positions(model) or sys.maxsize) - response
        lengths += [longest] if longest > max(PROMPTS) else []
    probes = text_probes(
        allowed_tokens(model),
        axes=1 if renderer.position_ids is count_tokens else 4,
        longest_prompt=longest,
        longest_response=response,
        variant=variant,
        prompts=lengths,
        response=response,
    )
    limit = None if sampled else data.max_prompt_length + data.max_response_length - response
    pictures = picture_probes(config, model, renderer, [(variant, variant)], response, limit=limit)
    return probes + (pictures or Probes((), ()))


def find_max_positions(model: ModelFiles) -> int | None:
    found: int | None = find_value(model.config.get_text_config(), "max_position_embeddings")
    return found


def picture_probes(
    config: RunConfig,
    model: ModelFiles,
    renderer: Renderer,
    asked: Sequence[tuple[int, int]],
    response: int = RESPONSE,
    *,
    limit: int | None = None,
    told: int = logging.DEBUG,
) -> Probes | None:
    """Return a sequence per (text, picture) number; None if the model or the limits allow none.

    Args:
        limit: tokens of a prompt; None: `data.max_prompt_length`.
        told: the level of the log line that says why there is none.
    """
    if not model.vision_language:
        return None
    data = config.data
    try:
        prompts = tuple(renderer.render(draw_example(text, picture)) for text, picture in asked)
    except DataError as error:
        log.log(told, "the canary has no picture, so a stale vision tower would not be noticed: %s", error)
        return None
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if longest > (data.max_prompt_length if limit is None else limit):
        message = "the canary has no picture: it takes %d tokens, data.max_prompt_length is %d"
        log.log(told, message, longest, data.max_prompt_length)
        return None
    length = min(response, data.max_response_length)
    return Probes(prompts, tuple(spread_tokens(allowed_tokens(model), length, first=text) for text, _ in asked))


def allowed_tokens(model: ModelFiles) -> list[int]:
    media = media_token_ids(model.config, model.tokenizer)
    return [token for token in range(len(model.tokenizer)) if token not in media]


def draw_example(text: int, picture: int = 0) -> Example:
    """Return a question about a picture of noise."""
    content = [{"type": "image"}, {"type": "text", "text": str(text)}]
    return Example(f"canary:{text}:{picture}", [{"role": "user", "content": content}], draw_pictures(picture), "")


def draw_pictures(*variants: int) -> tuple[bytes, ...]:
    return tuple(map(_draw_picture, variants))


def _draw_picture(variant: int) -> bytes:
    from PIL import Image

    noise = random.Random(variant).randbytes(PICTURE_SIDE * PICTURE_SIDE * 3)
    file = io.BytesIO()
    Image.frombytes("RGB", (PICTURE_SIDE, PICTURE_SIDE), noise).save(file, format="PNG")
    return file.getvalue()
