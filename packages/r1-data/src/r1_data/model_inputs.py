"""Model inputs of prompts: references that load where they are first read, and padding to a batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar, overload

from r1_data.types import DataError, Prompt

if TYPE_CHECKING:
    from torch import Tensor

Item = TypeVar("Item")


class LazyInputs(Mapping[str, "Tensor"]):
    """Named tensors, loaded when one is first read.

    A pickle holds no tensor, so that pictures need not pass through the driver. Two are equal if their `digest` is.

    Example: `LazyInputs(("pixel_values", "image_grid_thw"), digest, partial(fetch_inputs, address))`
    """

    def __init__(self, names: tuple[str, ...], digest: bytes, load: "Callable[[], Mapping[str, Tensor]]") -> None:
        """`load` returns exactly the `names`, and must pickle if this does."""
        self.names, self.digest, self._load = names, digest, load
        self._tensors: Mapping[str, Tensor] | None = None

    def __getitem__(self, name: str) -> "Tensor":
        """Raises DataError if other names are loaded, and whatever `load` raises."""
        if name not in self.names:
            raise KeyError(name)
        if self._tensors is None:
            tensors = self._load()
            if tensors.keys() != {*self.names}:
                raise DataError(f"model inputs {sorted(tensors)} were loaded in the place of {sorted(self.names)}")
            self._tensors = tensors
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LazyInputs):
            return NotImplemented
        return (self.names, self.digest) == (other.names, other.digest)

    def __hash__(self) -> int:
        return hash((self.names, self.digest))

    def __reduce__(self) -> "tuple[type[LazyInputs], tuple[object, ...]]":
        return LazyInputs, (self.names, self.digest, self._load)

    def __repr__(self) -> str:
        return f"LazyInputs({', '.join(self.names)}; {'not ' if self._tensors is None else ''}loaded)"


class LazyMedia(Sequence[Item]):
    """Pictures or videos of a prompt, loaded when one is first read."""

    def __init__(self, count: int, load: Callable[[], Sequence[Item]]) -> None:
        self._count, self._load = count, load
        self._loaded: tuple[Item, ...] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        """Raises DataError if another number is loaded, and whatever `load` raises."""
        if self._loaded is None:
            loaded = tuple(self._load())
            if len(loaded) != self._count:
                raise DataError(f"{len(loaded)} pictures or videos were loaded in the place of {self._count}")
            self._loaded = loaded
        return self._loaded[index]

    def __repr__(self) -> str:
        return f"LazyMedia({self._count}; {'not ' if self._loaded is None else ''}loaded)"


def collate(prompts: Sequence[Prompt], pad_token_id: int) -> "dict[str, Tensor]":
    """Pad prompts on the left to one length and concatenate their media, for a model's `forward` or `generate`.

    Returns:
        `input_ids` and `attention_mask`, int64 [B, L]; `position_ids`, int64 [B, L] for text models and [axes, B, L]
        for M-RoPE; and the prompts' other model inputs (`pixel_values`, `image_grid_thw`, …).

    Raises:
        ValueError: no prompts.
    """
    import torch

    if not prompts:
        raise ValueError("a batch needs at least one prompt")
    length = max(len(prompt.token_ids) for prompt in prompts)

    def padded(rows: "Tensor", value: int) -> "Tensor":
        return torch.nn.functional.pad(rows, (length - rows.shape[-1], 0), value=value)

    token_ids = [torch.tensor(prompt.token_ids) for prompt in prompts]
    positions = torch.stack([padded(prompt.position_ids, 0) for prompt in prompts], dim=1)
    names = dict.fromkeys(name for prompt in prompts for name in prompt.model_inputs)
    return {
        "input_ids": torch.stack([padded(ids, pad_token_id) for ids in token_ids]),
        "attention_mask": torch.stack([padded(torch.ones_like(ids), 0) for ids in token_ids]),
        "position_ids": positions[0] if len(positions) == 1 else positions,
        **{name: join([p.model_inputs[name] for p in prompts if name in p.model_inputs]) for name in names},
    }


def join(tensors: "Sequence[Tensor]", axis: int = 0) -> "Tensor":
    """Concatenate along an axis; where others differ, they are filled with zeros at their end, as processors do.

    Raises ValueError if the tensors have different numbers of axes.
    """
    whole = tensors[0].new_zeros(joined_shape([tensor.shape for tensor in tensors], axis))
    ends = accumulate(tensor.shape[axis] for tensor in tensors)
    for tensor, end in zip(tensors, ends, strict=True):
        part = [slice(size) for size in tensor.shape]
        part[axis] = slice(end - tensor.shape[axis], end)
        whole[tuple(part)] = tensor
    return whole


def joined_shape(shapes: Sequence[Sequence[int]], axis: int) -> list[int]:
    """Return the shape of tensors joined by `join`. Raises ValueError: different numbers of axes."""
    whole = [max(sizes) for sizes in zip(*shapes, strict=True)]
    whole[axis] = sum(shape[axis] for shape in shapes)
    return whole
