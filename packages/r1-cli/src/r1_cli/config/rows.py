"""How many rows each source of a run has, read once, without loading them."""

from collections.abc import Sequence
from functools import cache

from r1_cli.config.sources import Source


def count_rows(sources: Sequence[Source]) -> list[int] | None:
    """Return the number of rows of each source, None where it takes a download to know.

    Raises:
        r1_data.types.DataError: no such file, or one that cannot be read.
    """
    counts = [_count(source.files) for source in sources]
    return None if None in counts else [count for count in counts if count is not None]


@cache
def _count(files: tuple[str, ...]) -> int | None:
    from r1_data import sources

    return sources.count_rows(list(files))
