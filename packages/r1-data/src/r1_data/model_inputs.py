"""What a model's forward takes beside tokens, as a reference: tensors that are loaded where they are first read."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from r1_data.types import DataError

if TYPE_CHECKING:
    from torch import Tensor


class LazyInputs(Mapping[str, "Tensor"]):
    """Named tensors that `load` brings when one is first read. Names are known without loading.

    A pickle of it holds no tensor, so that a prompt's pictures need not pass the process that hands prompts out. Two
    are equal if they stand for the same content by `digest`, whether either has been loaded or not.

    Example: `LazyInputs(("pixel_values", "image_grid_thw"), digest, partial(fetch_inputs, address))`
    """

    def __init__(self, names: tuple[str, ...], digest: bytes, load: "Callable[[], Mapping[str, Tensor]]") -> None:
        """`digest` is of the content; `load` gives exactly the `names`, and pickles if this shall."""
        self.names, self.digest, self._load = names, digest, load
        self._tensors: Mapping[str, Tensor] | None = None

    def __getitem__(self, name: str) -> "Tensor":
        """Raises DataError if what was loaded has other names, and what `load` raises."""
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
