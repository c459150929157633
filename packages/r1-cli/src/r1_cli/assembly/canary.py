"""The canary of a run: which sequences it compares, and how near engine and learner must be."""

import io
import logging
import random
from collections.abc import Sequence

from r1_cli.config import RunConfig
from r1_cli.hardware import Hardware
from r1_cli.models.files import ModelFiles
from r1_data.positions import count_tokens
from r1_data.render import Renderer
from r1_data.types import DataError, Example
from r1_rollout.canary import TOLERANCE, Canary
from r1_rollout.probes import RESPONSE, Probes, spread_tokens, text_probes
from r1_rollout.tokens import media_token_ids

log = logging.getLogger("r1")

PICTURE_SIDE = 56  # pixels, before the run's own pixel limits
TWO_PICTURES = (2, 2), (2, 3)  # of one text


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
        picture_probes(config, model, renderer, TWO_PICTURES),
    )


def build_probes(config: RunConfig, model: ModelFiles, renderer: Renderer, *, variant: int) -> Probes:
    """Return sequences of text, and one with a picture if the model reads pictures and the prompt limit has room."""
    data = config.data
    axes = 1 if renderer.position_ids is count_tokens else 4
    limits = {"longest_prompt": data.max_prompt_length, "longest_response": data.max_response_length}
    probes = text_probes(allowed_tokens(model), axes=axes, **limits, variant=variant)
    return probes + (picture_probes(config, model, renderer, [(variant, variant)]) or Probes((), ()))


def picture_probes(
    config: RunConfig, model: ModelFiles, renderer: Renderer, asked: Sequence[tuple[int, int]]
) -> Probes | None:
    """Return a sequence for each (text, picture), which are numbers; None if the model or the limits allow none."""
    if not model.vision_language:
        return None
    data = config.data
    try:
        prompts = tuple(renderer.render(draw_example(text, picture)) for text, picture in asked)
    except DataError as error:
        log.warning("the weights' canary goes without a picture, a stale vision tower would not be seen: %s", error)
        return None
    if (longest := max(len(prompt.token_ids) for prompt in prompts)) > data.max_prompt_length:
        message = "the weights' canary goes without a picture: it takes %d tokens, data.max_prompt_length is %d"
        log.warning(message, longest, data.max_prompt_length)
        return None
    length = min(RESPONSE, data.max_response_length)
    return Probes(prompts, tuple(spread_tokens(allowed_tokens(model), length, first=text) for text, _ in asked))


def allowed_tokens(model: ModelFiles) -> list[int]:
    """Return those that stand for no media."""
    media = media_token_ids(model.config, model.tokenizer)
    return [token for token in range(len(model.tokenizer)) if token not in media]


def draw_example(text: int, picture: int = 0) -> Example:
    """Return a question about a picture of noise, the same on every machine."""
    content = [{"type": "image"}, {"type": "text", "text": str(text)}]
    return Example(f"canary:{text}:{picture}", [{"role": "user", "content": content}], draw_pictures(picture), "")


def draw_pictures(*variants: int) -> tuple[bytes, ...]:
    """Return encoded pictures of noise, each the same for its number."""
    return tuple(map(_draw_picture, variants))


def _draw_picture(variant: int) -> bytes:
    from PIL import Image

    noise = random.Random(variant).randbytes(PICTURE_SIDE * PICTURE_SIDE * 3)
    file = io.BytesIO()
    Image.frombytes("RGB", (PICTURE_SIDE, PICTURE_SIDE), noise).save(file, format="PNG")
    return file.getvalue()
