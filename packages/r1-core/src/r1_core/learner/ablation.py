"""A model without some of its weights, for a while: what a search for the part at fault asks a learner for."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from r1_core.learner.checkpoint import named_state
from r1_core.learner.parallel import like, whole


@torch.no_grad()
def zero_weights(model: nn.Module, rows: Mapping[str, Sequence[int] | None]) -> dict[str, Tensor]:
    """Set rows of the model's tensors to zero; return copies of these tensors, which `restore_weights` puts back.

    Sharded tensors are gathered, so all ranks must call it.

    Args:
        rows: by state-dict name, which rows; None for the whole tensor.

    Raises:
        KeyError: the model has no tensor of that name; nothing is changed then.
    """
    own = dict(named_state(model))
    kept = {name: own[name].detach().clone() for name in rows}
    for name, which in rows.items():
        full = whole(own[name]).clone()
        full[slice(None) if which is None else torch.as_tensor(which, dtype=torch.int64)] = 0
        own[name].copy_(like(full, own[name]))
    return kept


@torch.no_grad()
def restore_weights(model: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Give the model's tensors, to the bit, the values that `zero_weights` kept."""
    own = dict(named_state(model))
    for name, tensor in kept.items():
        own[name].copy_(tensor)
