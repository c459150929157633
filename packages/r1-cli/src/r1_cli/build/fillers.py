"""Tiny samples of each kind of media, for ranks that have none of it while others do."""

import logging

import torch

from r1_cli.build.canary import draw_example, draw_pictures
from r1_cli.build.rendering import build_renderer
from r1_cli.config import RunConfig
from r1_cli.models.files import ModelFiles
from r1_core.types import Sample
from r1_data.references import Video
from r1_data.types import DataError, Example

log = logging.getLogger("r1")


def build_fillers(config: RunConfig, model: ModelFiles) -> list[Sample]:
    """Return a tiny picture and a tiny video of two frames, each with a word of text, if the model reads them."""
    if not model.vision_language:
        return []
    renderer = build_renderer(config, model, own_sizes=True)
    content = [{"type": "video"}, {"type": "text", "text": "0"}]
    video = Example("filler:video", [{"role": "user", "content": content}], (Video(draw_pictures(0, 1)),), "")
    found = []
    for example in (draw_example(0), video):
        try:
            prompt = renderer.render(example)
        except DataError as error:
            log.debug("no tiny sample of %s: %s", example.id, error)
            continue
        nothing = torch.zeros(len(prompt.token_ids), dtype=torch.bool)
        token_ids = torch.as_tensor(prompt.token_ids)
        found.append(Sample(token_ids, nothing, prompt.position_ids, 0, 0.0, prompt.model_inputs))
    return found
