"""A table of named implementations."""

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """A table from name to entry; `kind` names its entries in error messages."""

    def __init__(self, kind: str, entries: Mapping[str, T]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds an entry. Raises ValueError if the name is taken."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is already registered; choose another name")
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> T:
        """Return the entry called `name`. Raises ValueError with the known names if there is none."""
        if name not in self._entries:
            near = get_close_matches(name, self._entries, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no {self.kind} is called {name!r} (there are: {', '.join(self._entries)}){hint}")
        return self._entries[name]
