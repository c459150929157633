"""Sequences that several ranks share: who they are, and how they exchange heads for tokens.

Ulysses (arXiv 2309.14509): of a row of T tokens each of n ranks has T / n neighbours, which is all that embeddings,
norms, matrix products and the head ever look at. Attention alone looks further. For it each rank gives the others its
tokens of their heads, attends with all tokens of h / n heads, and gives back what it found.
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import _functional_collectives as collectives


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Ranks that share every row; this one has part `rank` of `size`."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a tensor that all have, whose length along `dim` is a multiple of `size`."""
        return tensor.chunk(self.size, dim)[self.rank]

    def gather_tokens(self, own: Tensor) -> Tensor:
        """From own tokens of all heads [1, h, T / n, d] to all tokens of own heads [1, h / n, T, d].

        As many key heads have to be there as ranks at least: `repeat_heads` does so.
        """
        _, heads, tokens, size = own.shape
        came = self._exchange(own[0]).view(self.size, heads // self.size, tokens, size)
        return came.transpose(0, 1).reshape(1, heads // self.size, self.size * tokens, size)

    def gather_heads(self, own: Tensor) -> Tensor:
        """From all tokens of own heads [1, T, h / n, d] to own tokens of all heads [1, T / n, h, d]."""
        _, tokens, heads, size = own.shape
        came = self._exchange(own[0]).view(self.size, tokens // self.size, heads, size)
        return came.transpose(0, 1).reshape(1, tokens // self.size, self.size * heads, size)

    def repeat_heads(self, key: Tensor) -> Tensor:
        """Return key heads [1, k, T / n, d] repeated until there is one for each rank, if there are fewer."""
        return key.repeat_interleave(self.size // key.shape[1], dim=1) if key.shape[1] < self.size else key

    def _exchange(self, rows: Tensor) -> Tensor:
        """Send the i-th of n equal parts of the rows to rank i; return what came, in the order of ranks."""
        return collectives.wait_tensor(
            collectives.all_to_all_single_autograd(rows.contiguous(), None, None, group=self.group)
        )


@dataclass(frozen=True, slots=True)
class Share:
    """Which of a row's `total` trained tokens are predicted in this rank's part of it.

    They need not be neighbours: the end of a shared prompt predicts the first token of all its answers.
    """

    sequence: SequenceGroup
    own: Tensor  # int64 [T'], rising
    total: int

    def spread(self, own: Tensor) -> Tensor:
        """Lay values of the own tokens [T', k] out among those of all [total, k], which are 0."""
        return own.new_zeros(self.total, own.shape[-1]).index_copy(0, self.own, own)

    def gather(self, own: Tensor) -> Tensor:
        """Return the values [total, k] of all ranks, from this one's [T', k].

        All go on to compute the same of them, so the gradient of the own ones is just what comes back for them.
        """
        found: Tensor = _Sum.apply(self.spread(own), self.sequence.group)
        return found


class _Sum(Function):
    """The sum over ranks that all compute the same of it, each of whom answers for what it has added."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


# What a decoder takes of a whole row, and along which dimension tokens lie there.
TOKENS = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1}


def cut_shared_rows(model: Any) -> None:
    """Let the decoder of a Hugging Face model compute this rank's part only of rows that are shared.

    Such a row comes with a `Pack` that says with whom (`pack.sequence`); its attention has to exchange tokens for
    heads then. Every other row goes through as it is. A vision tower, which comes before the decoder, sees all pictures
    on all ranks.
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
    visual = own.get("visual_pos_masks")  # Qwen3-VL adds features of pictures in later layers, too
    if visual is not None:
        own["visual_pos_masks"] = sequence.part(visual, 1)
        counts = [int(part.sum()) for part in visual.chunk(sequence.size, 1)]
        features = own.get("deepstack_visual_embeds") or ()
        own["deepstack_visual_embeds"] = [layer.split(counts)[sequence.rank] for layer in features]
    return args, own
