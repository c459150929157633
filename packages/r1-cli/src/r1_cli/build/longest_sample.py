"""The longest samples that a run's settings allow, for profiling passes."""

import io
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from PIL import Image

from r1_cli.build.canary import allowed_tokens, find_max_positions
from r1_cli.config import RunConfig
from r1_cli.models.files import ModelFiles
from r1_cli.train.groups.group import extend_positions
from r1_core.learner.batching import MicroLimit
from r1_core.types import Sample
from r1_data.pixel_ranges import picture_range
from r1_data.positions import count_tokens
from r1_data.render import Renderer
from r1_data.types import DataError, Example, Prompt
from r1_rollout.probes import spread_tokens

log = logging.getLogger("r1")

SHRINKING = 8  # attempts at a picture that fits in a prompt


@dataclass(frozen=True, slots=True)
class LongestSample:
    prompt: int
    response: int
    answers: int  # to a prompt
    axes: int  # of positions
    allowed: Sequence[int]  # tokens that stand for no media
    pictured: Prompt | None = None  # the prompt's beginning, with the largest picture

    @property
    def tokens(self) -> int:
        return self.prompt + self.response

    def samples(self, limit: MicroLimit, micro_batches: int, *, share: bool, length: int) -> list[Sample]:
        """Return samples that fill `micro_batches` micro-batches up to `limit`.

        Args:
            share: if tokens are limited, count a prompt once for all its answers in a micro-batch.
            length: tokens of each sample; only the longest have pictures.
        """
        prompt = max(1, self.prompt * length // self.tokens)
        made = list[Sample]()
        for _ in range(micro_batches):
            group, used = made[-1].group_id + 1 if made else 0, 0
            for index in count():
                first = index % self.answers == 0
                used += length if first or not share else length - prompt
                if index and (index >= limit.samples if limit.tokens is None else used > limit.tokens):
                    break
                if first:
                    shared = self._sample(group + index // self.answers, prompt, length)
                made.append(replace(shared, token_ids=shared.token_ids.clone()))  # ranks identify a sample by it
        return made

    def _sample(self, group: int, prompt: int, length: int) -> Sample:
        begun = self.pictured if length == self.tokens else None
        token_ids = [] if begun is None else begun.token_ids
        more = length - len(token_ids)
        every = torch.arange(length)
        likely = torch.full((length,), -math.log(len(self.allowed)))
        zeros = torch.zeros(length)
        return Sample(
            token_ids=torch.tensor([*token_ids, *spread_tokens(self.allowed, more, first=group * length)]),
            loss_mask=every >= prompt,
            position_ids=every.expand(self.axes, -1) if begun is None else extend_positions(begun.position_ids, more),
            group_id=group,
            reward=0.0,
            model_inputs={} if begun is None else dict(begun.model_inputs),
            prompt_length=prompt,
            rollout_logprobs=likely,
            old_logprobs=likely,
            ref_logprobs=likely,
            advantages=zeros + 1,
            values=zeros,
            returns=zeros,
        )


def find_longest(config: RunConfig, model: ModelFiles, renderer: Renderer, *, pictures: bool) -> LongestSample:
    """Return the longest sample that the length limits and the model's positions allow, if `pictures` with pictures."""
    data = config.data
    positions = find_max_positions(model) or sys.maxsize
    prompt = max(1, min(data.max_prompt_length, positions - data.max_response_length))
    return LongestSample(
        prompt=prompt,
        response=data.max_response_length,
        answers=config.worker.rollout.n,
        axes=1 if renderer.position_ids is count_tokens else 4,
        allowed=allowed_tokens(model),
        pictured=render_largest(config, model, renderer, prompt) if pictures else None,
    )


def render_largest(config: RunConfig, model: ModelFiles, renderer: Renderer, room: int) -> Prompt | None:
    """Return a prompt of at most `room` tokens with `limit_images` of the largest pictures; None if none fits."""
    pixels, asked = config.data.max_pixels, max(1, config.worker.rollout.limit_images)
    try:
        if pixels is None:
            pixels = picture_range(model.processor.image_processor, None, None)["longest_edge"]
        for _ in range(SHRINKING):
            example = render_blank_pictures(math.isqrt(pixels), asked)
            if (tokens := renderer.prompt_length(example)) <= room:
                return renderer.render(example)
            pixels = int(pixels * min(0.9, room / tokens))
    except (DataError, AttributeError, KeyError, TypeError, ValueError) as error:
        log.debug("no picture is profiled: %s", error)
    return None


def render_blank_pictures(side: int, pictures: int) -> Example:
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, format="PNG", compress_level=1)
    content = [*({"type": "image"} for _ in range(pictures)), {"type": "text", "text": "0"}]
    return Example("profiling", [{"role": "user", "content": content}], (file.getvalue(),) * pictures, "")
