"""What an environment adds to an episode: tokens, positions and pictures behind a sampled turn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from r1_data.types import Message

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Continuation:
    """What stands between a sampled turn and the policy's next one. None of it is trained.

    `token_ids` has every picture expanded to its placeholders; `engine_token_ids` has one placeholder a picture.
    """

    token_ids: list[int]
    engine_token_ids: list[int]
    position_ids: "Tensor"  # int64 [axes, L], counted from 0; see `r1_data.positions.append_positions`
    model_inputs: "Mapping[str, Tensor]" = field(default_factory=dict)  # of its pictures, e.g. pixel_values
    images: "Sequence[Image]" = ()  # decoded and resized
    text: str = ""  # as the template wrote it, without an end token that was sampled
    messages: Sequence[Message] = ()  # what the environment answered, pictures as parts without content
