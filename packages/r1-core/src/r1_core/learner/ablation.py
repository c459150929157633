"""A model without some of its weights, for a while: what a search for the part at fault asks a learner for."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from r1_core.learner.checkpoint import named_state
from r1_core.learner.parallel import like, whole


@contextmanager
def zeroed(model: nn.Module, rows: Mapping[str, Sequence[int] | None]) -> Iterator[None]:
    """Set rows of the model's tensors to zero inside the block; after it they are, to the bit, what they were.

    Keeps a copy of these tensors. Sharded ones are gathered, so all ranks must enter.

    Args:
        rows: by state-dict name, which rows; None for the whole tensor.

    Raises:
        KeyError: the model has no tensor of that name.
    """
    own = dict(named_state(model))
    kept = {name: own[name].detach().clone() for name in rows}
    try:
        with torch.no_grad():
            for name, which in rows.items():
                full = whole(own[name]).clone()
                full[slice(None) if which is None else torch.as_tensor(which, dtype=torch.int64)] = 0
                own[name].copy_(like(full, own[name]))
        yield
    finally:
        with torch.no_grad():
            for name, tensor in kept.items():
                own[name].copy_(tensor)
