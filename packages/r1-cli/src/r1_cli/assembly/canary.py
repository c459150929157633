"""The canary of a run: which sequences it compares, and how near engine and learner must be."""

import io
import logging
import random

from r1_cli.config import RunConfig
from r1_cli.hardware import Hardware
from r1_cli.models.files import ModelFiles
from r1_data.positions import position_ids_of
from r1_data.render import Renderer
from r1_data.types import DataError, Example
from r1_rollout.canary import TOLERANCE, Canary
from r1_rollout.probes import RESPONSE, Probes, spread_tokens, text_probes
from r1_rollout.tokens import media_token_ids

log = logging.getLogger("r1")

PICTURE_SIDE = 56  # pixels, before the run's own pixel limits


def build_canary(config: RunConfig, hardware: Hardware, model: ModelFiles, renderer: Renderer) -> Canary:
    """Choose the sequences and the tolerance that suit the model and the run's lengths and precision."""
    actor, rollout = config.worker.actor, config.worker.rollout
    computing = hardware.computing_dtype(actor.kept_dtype, actor.fsdp.mp_param_dtype)
    precisions = {computing, hardware.engine_dtype(rollout.dtype)}
    return Canary(
        build_probes(config, model, renderer, variant=0),
        build_probes(config, model, renderer, variant=1),
        max(TOLERANCE[precision] for precision in precisions),
        rollout.temperature,
    )


def build_probes(config: RunConfig, model: ModelFiles, renderer: Renderer, *, variant: int) -> Probes:
    """Return sequences of text, and one with a picture if the model reads pictures and the prompt limit has room."""
    media = media_token_ids(model.config, model.tokenizer)
    allowed = [token for token in range(len(model.tokenizer)) if token not in media]
    data = config.data
    axes = 1 if position_ids_of(model.config) is None else 4
    limits = {"longest_prompt": data.max_prompt_length, "longest_response": data.max_response_length}
    probes = text_probes(allowed, axes=axes, **limits, variant=variant)
    if not model.vision_language:
        return probes
    try:
        prompt = renderer.render(draw_example(variant))
    except DataError as error:
        log.warning("the weights' canary goes without a picture, a stale vision tower would not be seen: %s", error)
        return probes
    if len(prompt.token_ids) > data.max_prompt_length:
        message = "the weights' canary goes without a picture: it takes %d tokens, data.max_prompt_length is %d"
        log.warning(message, len(prompt.token_ids), data.max_prompt_length)
        return probes
    response = spread_tokens(allowed, min(RESPONSE, data.max_response_length), first=variant)
    return probes + Probes((prompt,), (response,))


def draw_example(variant: int) -> Example:
    """Return a question about a picture of noise, the same on every machine."""
    content = [{"type": "image"}, {"type": "text", "text": str(variant)}]
    return Example(f"canary:picture:{variant}", [{"role": "user", "content": content}], draw_pictures(variant), "")


def draw_pictures(*variants: int) -> tuple[bytes, ...]:
    """Return encoded pictures of noise, each the same for its number."""
    return tuple(map(_draw_picture, variants))


def _draw_picture(variant: int) -> bytes:
    from PIL import Image

    noise = random.Random(variant).randbytes(PICTURE_SIDE * PICTURE_SIDE * 3)
    file = io.BytesIO()
    Image.frombytes("RGB", (PICTURE_SIDE, PICTURE_SIDE), noise).save(file, format="PNG")
    return file.getvalue()
