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
    position_ids: "Tensor"  # int64 [axes, L], counted from 0; see `append_positions`
    model_inputs: "Mapping[str, Tensor]" = field(default_factory=dict)  # of its pictures, e.g. pixel_values
    images: "Sequence[Image]" = ()  # decoded and resized
    text: str = ""  # as the template wrote it, without an end token that was sampled
    messages: Sequence[Message] = ()  # what the environment answered, pictures as parts without content


def append_positions(position_ids: "Tensor", piece: "Tensor") -> "Tensor":
    """Lay a piece's positions, counted from 0, behind those of all tokens before it.

    The first axis counts tokens. The rotary axes of M-RoPE (arXiv 2409.12191) go on behind the largest position of any
    of them, as the model's own rule does over the whole sequence.

    Args:
        position_ids: int64 [axes, P].
        piece: int64 [axes, L].

    Returns:
        int64 [axes, P + L].
    """
    import torch

    if not position_ids.shape[1]:
        return piece
    moved = piece + (position_ids[:1].max() + 1)
    if len(position_ids) > 1:
        moved = torch.cat([moved[:1], piece[1:] + (position_ids[1:].max() + 1)])
    return torch.cat([position_ids, moved], dim=1)
