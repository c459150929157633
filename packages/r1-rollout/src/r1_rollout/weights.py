"""Hand-over of weights: named tensors are copied into a module, all of them or an error that names which."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


class WeightsError(ValueError):
    """The tensors given are not this model's; the message names the first few that differ."""


@torch.no_grad()
def load_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy `weights` into `model`, in the model's own precision and on its device.

    Names are those of the model's state dict. Of tied weights (an embedding and the output layer) either name will do.

    Raises:
        WeightsError: a name is unknown, a shape differs, or a weight of the model was not given. What came before the
            error has been copied.
    """
    own = model.state_dict(keep_vars=True)
    missing = {id(tensor) for tensor in own.values()}
    unknown = []
    for name, tensor in weights:
        target = own.get(name)
        if target is None:
            unknown.append(name)
            continue
        if target.shape != tensor.shape:
            raise WeightsError(f"{name}: got shape {list(tensor.shape)}, the engine's model has {list(target.shape)}")
        target.copy_(tensor)
        missing.discard(id(target))
    if unknown:
        raise WeightsError(f"{len(unknown)} weights are unknown to the engine's model: {_first(unknown)}")
    if missing:
        raise WeightsError(
            f"{len(missing)} weights of the engine's model were not given: "
            f"{_first([name for name, tensor in own.items() if id(tensor) in missing])}"
        )


def _first(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")


def buckets(
    weights: Iterable[tuple[str, Tensor]], max_bytes: int, dtype: torch.dtype | None = None
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield `weights` in lists of at most `max_bytes`, floats as `dtype`; one larger tensor goes alone."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        cast = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        if bucket and size + cast.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, cast))
        size += cast.nbytes
    if bucket:
        yield bucket
