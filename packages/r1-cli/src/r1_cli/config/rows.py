"""How many rows a run has, read once, without loading them."""

from collections.abc import Sequence
from functools import cache


def count_rows(spec: str | Sequence[str]) -> int | None:
    """Return the number of rows of `data.train_files` or `data.val_files`, None where it takes a download to know.

    Raises:
        r1_data.types.DataError: no such file, or one that cannot be read.
    """
    return _count(spec if isinstance(spec, str) else tuple(spec))


@cache
def _count(spec: str | tuple[str, ...]) -> int | None:
    from r1_data import sources

    return sources.count_rows(spec if isinstance(spec, str) else list(spec))
