"""The weights of a sync: their sources, buckets of them, and loading them into a model completely or with an error."""

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from r1_rollout.errors import WeightsError
from r1_rollout.lora import Adapter, AdapterSlot, SideSlot
from r1_rollout.names import FUSED, Directory, Place, adapter_part

Weights: TypeAlias = Iterable[tuple[str, Tensor]] | Adapter


def dtype_named(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class Cut:
    """Assigns tensors to buckets of at most `max_bytes`, by sizes alone, so all processes cut alike."""

    def __init__(self, max_bytes: int) -> None:
        if max_bytes <= 0:
            raise ValueError(f"max_bytes must be positive, got {max_bytes}")
        self._max_bytes, self._size = max_bytes, 0
        self._number = -1

    def place(self, num_bytes: int) -> int:
        if self._number < 0 or self._size + num_bytes > self._max_bytes:
            self._number, self._size = self._number + 1, 0
        self._size += num_bytes
        return self._number


def buckets(
    weights: Iterable[tuple[str, Tensor]], max_bytes: int, dtype: torch.dtype | None = None
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors in lists of at most `max_bytes`; a larger tensor goes alone.

    Floating-point tensors are cast to `dtype`, as from float32 masters to bfloat16. A list is emptied when the next is
    requested, so one bucket is in memory at a time if `weights` makes its tensors one by one.
    """
    cut, number = Cut(max_bytes), 0
    bucket: list[tuple[str, Tensor]] = []
    for name, tensor in weights:
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if (place := cut.place(tensor.numel() * kind.itemsize)) > number:
            yield bucket
            bucket.clear()
            bucket, number = [], place
        bucket.append((name, tensor.detach().to(kind)))
        del tensor  # or it would outlive its bucket
    if bucket:
        yield bucket
        bucket.clear()


class WeightStore:
    def __init__(self, model: nn.Module, *, read_only: bool = False) -> None:
        """If the model's weights are `read_only`, only adapters can be loaded, beside them."""
        self.version: int | None = None  # None before the first load, and after one that failed
        self._latest = -1  # the last version that was loaded whole
        self._model = model
        self._adapter: AdapterSlot | SideSlot = SideSlot(model) if read_only else AdapterSlot(model)

    def load(self, weights: Weights, version: int) -> None:
        """Load all weights, or an adapter for the base weights that are there.

        Raises:
            WeightsError: `version` is older than the present one, the weights are not this model's, or they are read
                only.
        """
        self.require_newer(version)
        if self.version is not None:
            self._latest = self.version
        self.version = None
        try:
            if isinstance(weights, Adapter):
                self._adapter.load(replace(weights, weights=named_tensors(weights.weights)))
            elif self._adapter.factors or isinstance(self._adapter, SideSlot):
                self._adapter.forget()
        except ValueError as error:
            raise WeightsError(f"weights of version {version}: {error}") from error
        if not isinstance(weights, Adapter):
            load_weights(self._model, weights)
        self.version = version

    def tensors(self) -> dict[str, Tensor]:
        return {**self._model.state_dict(), **self._adapter.factors}

    def require_newer(self, version: int) -> None:
        require_newer(version, self._latest if self.version is None else self.version)


def require_newer(version: int, latest: int) -> None:
    if version < latest:
        raise WeightsError(
            f"weights of version {version} are older than version {latest}, which the engine has had: versions only "
            "increase; make a new engine to go back"
        )


@torch.no_grad()
def load_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy `weights` into `model`, in the model's own precision and on its device.

    Names are those of the model's state dict, or of wrappers, other layouts and split projections (see `names`). Of
    tied weights either name will do.

    Raises:
        WeightsError: a name is unknown, a shape or kind of number differs, or a weight is missing. Tensors before the
            error have been copied.
    """
    own = model.state_dict(keep_vars=True)
    directory = Directory(own)
    missing = {*map(id, own.values())}
    unknown = []
    parts: dict[int, tuple[Place, dict[str, int]]] = {}  # of fused tensors: rows of each part that came
    for name, tensor in named_tensors(weights):
        place = directory.find(name, tensor.shape[0] if tensor.ndim else 1)
        if place is None:
            unknown.append(name)
            continue
        _copy(name, tensor, place)
        missing.discard(id(place.target))
        if place.part:
            parts.setdefault(id(place.target), (place, {}))[1][place.part] = tensor.shape[0]
    if unknown:
        hint = "; LoRA factors are handed over as an Adapter" if any(map(adapter_part, unknown)) else ""
        raise WeightsError(f"{len(unknown)} weights are unknown to the engine's model: {_first(unknown)}{hint}")
    absent = [name for name, tensor in own.items() if id(tensor) in missing]
    absent += [part for place, rows in parts.values() for part in _absent_parts(place, rows)]
    if absent:
        raise WeightsError(f"{len(absent)} weights of the engine's model were not given: {_first(absent)}")


def named_tensors(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a mapping or pairs. Raises WeightsError on anything else, or tensors without values."""
    if isinstance(weights, str | nn.Module) or not isinstance(weights, Iterable):
        raise WeightsError(
            f"weights must be (name, tensor) pairs, got a {type(weights).__name__}: give model.state_dict().items()"
        )
    for pair in weights.items() if isinstance(weights, Mapping) else weights:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            raise WeightsError(f"weights must be (name, tensor) pairs, got {reprlib.repr(pair)}")
        name, tensor = pair
        if hasattr(tensor, "full_tensor"):
            raise WeightsError(f"{name} is sharded (a DTensor): hand over tensor.full_tensor(), on all ranks at once")
        if tensor.is_meta:
            raise WeightsError(f"{name} is on the meta device and has no values: load the trainer's weights first")
        yield name, tensor


def _copy(name: str, tensor: Tensor, place: Place) -> None:
    view = place.rows(tensor.shape[0] if tensor.ndim else 1) if place.first_row >= 0 else None
    if view is None or view.shape != tensor.shape:
        part = f" for {place.name}, of which this is the part {place.part}" if place.part else ""
        raise WeightsError(
            f"{name}: got shape {list(tensor.shape)}, the engine's model has {list(place.target.shape)}{part}"
        )
    if tensor.is_floating_point() != view.is_floating_point() or tensor.is_complex():
        raise WeightsError(f"{name}: got {tensor.dtype}, the engine's model has {view.dtype}: hand it over unquantised")
    view.copy_(tensor)


def _absent_parts(place: Place, rows: dict[str, int]) -> list[str]:
    expected = next(parts for parts in FUSED.values() if place.part in parts)
    absent = [f"{place.name} ({part})" for part in expected if part not in rows]
    if not absent and sum(rows.values()) != place.target.shape[0]:
        raise WeightsError(f"{place.name} has {place.target.shape[0]} rows, but its parts came with {rows}")
    return absent


def _first(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")


Result = TypeVar("Result")
Shapes: TypeAlias = dict[str, tuple[int, ...]]  # of all weights of one sync, by name


class BucketWriter(Protocol):
    """Writes buckets of weights in the process that has them; it pickles."""

    def reaches(self) -> bool: ...

    def __call__(self, number: int, bucket: list[tuple[str, Tensor]]) -> None: ...


class WeightSource(Protocol):
    """The weights of one version: in this process, or on the ranks of a learner."""

    @property
    def version(self) -> int: ...

    def names(self) -> Weights:
        """Return what `tensors` would, for its names and shapes only: values may be missing."""

    def tensors(self) -> Weights:
        """Yield them in this process one by one, named as in the checkpoint; or return an adapter."""

    def run_with_weights(self, task: Callable[[Weights], Result]) -> Result:
        """Run `task` on them in the process that has them; the task and its result pickle."""

    def spread(self, write: BucketWriter, max_bytes: int, dtype: torch.dtype | None) -> Shapes:
        """Write full weights from the processes that have them, each bucket by one; return their shapes by name.

        Args:
            write: called with `buckets(weights, max_bytes, dtype)` and their numbers, as whole tensors, in any order.
            dtype: what floating-point tensors are cast to; None: they stay as they are.
        """


@dataclass(frozen=True, slots=True)
class LocalWeights:
    """A `WeightSource` in this process.

    Example: `LocalWeights(model.state_dict().items(), version=1)`.
    """

    weights: Weights | Callable[[], Weights]  # or what makes a pass over them, for sources that are read more than once
    version: int
    taken: Callable[[], object] | None = None  # called when an engine has read all of `tensors`

    def names(self) -> Weights:
        weights = self.weights() if callable(self.weights) else self.weights
        return cast(Weights, weights.items()) if isinstance(weights, Mapping) else weights

    def tensors(self) -> Weights:
        weights = self.names()
        if self.taken is None:
            return weights
        if isinstance(weights, Adapter):
            return replace(weights, weights=_followed(weights.weights, self.taken))
        return _followed(weights, self.taken)

    def run_with_weights(self, task: Callable[[Weights], Result]) -> Result:
        return task(self.names())

    def spread(self, write: BucketWriter, max_bytes: int, dtype: torch.dtype | None) -> Shapes:
        weights, shapes = self.names(), Shapes()
        if isinstance(weights, Adapter):
            raise WeightsError("an adapter is not cut into buckets: hand it over")
        for number, bucket in enumerate(buckets(named_tensors(weights), max_bytes, dtype)):
            write(number, bucket)
            shapes |= {name: tuple(tensor.shape) for name, tensor in bucket}
        return shapes


@dataclass(frozen=True, slots=True)
class TransferCall:
    """A call of vLLM's weight transfer for an engine to make.

    Example: `TransferCall("update_weights", {"update_info": {"names": ["lm_head.weight"], …}})`.
    """

    verb: str
    request: Mapping[str, Any] = field(default_factory=dict)  # empty where the call takes none


@dataclass(frozen=True, slots=True)
class DirectWeights:
    """A `WeightSource` whose tensors bypass this process: the engine makes its sender's calls."""

    calls: Callable[[], Iterator[TransferCall]]
    version: int

    def names(self) -> Weights:
        raise WeightsError("these weights come by vLLM's own transfer, which this engine does not take part in")

    def tensors(self) -> Weights:
        return self.names()

    def run_with_weights(self, task: Callable[[Weights], Result]) -> Result:
        return task(self.names())

    def spread(self, write: BucketWriter, max_bytes: int, dtype: torch.dtype | None) -> Shapes:
        return LocalWeights(self.names(), self.version).spread(write, max_bytes, dtype)


def _followed(weights: Iterable[tuple[str, Tensor]], taken: Callable[[], object]) -> Iterator[tuple[str, Tensor]]:
    yield from weights
    taken()


def known(weights: Iterable[tuple[str, Tensor]], came: Shapes, first: Shapes) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights`, and add their shapes to `came`. Raises WeightsError if one was not in the first sync.

    vLLM would keep such a tensor and load it again in every later sync.

    Args:
        first: shapes of the first sync; empty before it.
    """
    for name, tensor in weights:
        note(name, tuple(tensor.shape), came, first)
        yield name, tensor


def note(name: str, shape: tuple[int, ...], came: Shapes, first: Shapes) -> None:
    came[name] = shape
    if first and first.get(name) != shape:
        raise WeightsError(f"{name} {_differs(name, first, came)}")


def require_same(first: Shapes, came: Shapes) -> None:
    differing = [name for name in sorted(first.keys() | came.keys()) if first and first.get(name) != came.get(name)]
    if differing:
        shown = "; ".join(f"{name} {_differs(name, first, came)}" for name in differing[:5])
        raise WeightsError(f"{len(differing)} weights are not those of the first sync: {shown}")


def _differs(name: str, first: Shapes, came: Shapes) -> str:
    now, before = (list(shapes[name]) if name in shapes else None for shapes in (came, first))
    return f"is {'missing' if now is None else now}, was {'unknown' if before is None else before}"
