"""Names and shapes of an engine's weights, which may not change after its first sync: vLLM would not recover."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from r1_rollout.errors import WeightsError
from r1_rollout.weight_source import Shapes


def known(weights: Iterable[tuple[str, Tensor]], came: Shapes, first: Shapes) -> Iterator[tuple[str, Tensor]]:
    """Pass `weights` on, and note in `came` what they are.

    vLLM must not see a tensor of another shape: it keeps it, and loads it again in every later sync.

    Args:
        first: what came in the first sync; empty before it.

    Raises:
        WeightsError: a name or shape was not in the first sync.
    """
    for name, tensor in weights:
        note(name, tuple(tensor.shape), came, first)
        yield name, tensor


def note(name: str, shape: tuple[int, ...], came: Shapes, first: Shapes) -> None:
    """Note one in `came`. Raises WeightsError if it was not so in the first sync."""
    came[name] = shape
    if first and first.get(name) != shape:
        raise WeightsError(f"{name} {_differs(name, first, came)}")


def require_same(first: Shapes, came: Shapes) -> None:
    """Raise WeightsError if a name or shape is not that of the first sync, or a name of it did not come."""
    differing = [name for name in sorted(first.keys() | came.keys()) if first and first.get(name) != came.get(name)]
    if differing:
        shown = "; ".join(f"{name} {_differs(name, first, came)}" for name in differing[:5])
        raise WeightsError(f"{len(differing)} weights are not those of the first sync: {shown}")


def _differs(name: str, first: Shapes, came: Shapes) -> str:
    now, before = (list(shapes[name]) if name in shapes else None for shapes in (came, first))
    return f"is {'missing' if now is None else now}, was {'unknown' if before is None else before}"
