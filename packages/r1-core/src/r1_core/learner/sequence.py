"""Ulysses sequence parallelism (arXiv 2309.14509): each of n ranks holds T / n neighbouring tokens of a row.

For attention, the ranks exchange tokens for heads: each attends over all tokens with h / n heads.
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import _functional_collectives as collectives


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The ranks that share every row; this rank has part `rank` of `size`."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part along `dim`, whose length is a multiple of `size`."""
        return tensor.chunk(self.size, dim)[self.rank]

    def gather_tokens(self, own: Tensor) -> Tensor:
        """Exchange own tokens of all heads [1, h, T / n, d] for all tokens of own heads [1, h / n, T, d].

        Needs at least as many heads as ranks; see `repeat_heads`.
        """
        _, heads, tokens, size = own.shape
        received = self._exchange(own[0]).view(self.size, heads // self.size, tokens, size)
        return received.transpose(0, 1).reshape(1, heads // self.size, self.size * tokens, size)

    def gather_heads(self, own: Tensor) -> Tensor:
        """Exchange all tokens of own heads [1, T, h / n, d] for own tokens of all heads [1, T / n, h, d]."""
        _, tokens, heads, size = own.shape
        received = self._exchange(own[0]).view(self.size, tokens // self.size, heads, size)
        return received.transpose(0, 1).reshape(1, tokens // self.size, self.size * heads, size)

    def repeat_heads(self, key: Tensor) -> Tensor:
        """Repeat key heads [1, k, T / n, d] until there is one per rank."""
        return key.repeat_interleave(self.size // key.shape[1], dim=1) if key.shape[1] < self.size else key

    def _exchange(self, rows: Tensor) -> Tensor:
        return collectives.wait_tensor(
            collectives.all_to_all_single_autograd(rows.contiguous(), None, None, group=self.group)
        )


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """Which of a row's `total` trained tokens are predicted by this rank.

    They need not be neighbours: the last token of a shared prompt predicts the first token of all its answers.
    """

    sequence: SequenceGroup
    own: Tensor  # int64 [T'], ascending
    total: int

    def spread(self, own: Tensor) -> Tensor:
        """Scatter values of own tokens [T', k] into zeros [total, k]."""
        return own.new_zeros(self.total, own.shape[-1]).index_copy(0, self.own, own)

    def gather(self, own: Tensor) -> Tensor:
        """Return the values [total, k] of all ranks, given this rank's [T', k]."""
        found: Tensor = _Sum.apply(self.spread(own), self.sequence.group)
        return found


class _Sum(Function):
    """All-reduce whose backward returns the gradient unchanged, because every rank computes the same loss."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


# Arguments of a decoder, and their dimension of tokens.
TOKENS = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1}


def cut_shared_rows(model: Any) -> None:
    """Make a Hugging Face model's decoder compute only this rank's part of rows whose `Pack` has a `sequence`.

    The vision tower, which runs before the decoder, sees all pictures on all ranks.
    """
    model.get_decoder().register_forward_pre_hook(_cut, with_kwargs=True)


def _cut(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any] | None:
    pack = kwargs.get("pack")
    if pack is None or pack.sequence is None:
        return None
    sequence, own = pack.sequence, dict(kwargs)
    for name, dim in TOKENS.items():
        if own.get(name) is not None:
            own[name] = sequence.part(own[name], dim).contiguous()
    visual = own.get("visual_pos_masks")  # Qwen3-VL also adds picture features in later layers
    if visual is not None:
        own["visual_pos_masks"] = sequence.part(visual, 1)
        counts = [int(part.sum()) for part in visual.chunk(sequence.size, 1)]
        features = own.get("deepstack_visual_embeds") or ()
        own["deepstack_visual_embeds"] = [layer.split(counts)[sequence.rank] for layer in features]
    return args, own
