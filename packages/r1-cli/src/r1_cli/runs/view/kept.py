"""What `r1 view` has read of a large record, kept in the user's cache folder for its next start."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from r1_cli.runs.reader import Phase

if TYPE_CHECKING:
    import pyarrow as pa

Identity = tuple[int, int]  # of a file: its inode and the time of its last change in nanoseconds
Tables = Mapping[int, "tuple[Identity, pa.Table | None]"]  # by step; None: unreadable

FEW = 20  # files that are read again sooner than they are worth a file of their own
FORMAT = b"1"


def kept_tables(run: Path, phase: Phase) -> Tables:
    """Return the tables that were kept for a run; {} if there are none, or if they are damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(_path(run, phase)) as file:
            metadata = file.schema_arrow.metadata or {}
            if metadata.get(b"format") != FORMAT:
                return {}
            parts = json.loads(metadata[b"parts"])
            table = file.read().replace_schema_metadata(None)
        found: dict[int, tuple[Identity, pa.Table | None]] = {}
        begin = 0
        for step, inode, changed, rows in parts:
            found[int(step)] = ((int(inode), int(changed)), table.slice(begin, rows))
            begin += rows
        return found
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return {}


def keep_tables(run: Path, phase: Phase, tables: Tables, *, new: int) -> None:
    """Keep tables if enough of them are new. Without a cache folder that can be written, nothing is kept."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    readable = [(step, *identity, table) for step, (identity, table) in tables.items() if table is not None]
    if new < FEW:
        return
    parts = [(step, inode, changed, len(table)) for step, inode, changed, table in readable]
    metadata = {b"format": FORMAT, b"parts": json.dumps(parts).encode()}
    with suppress(OSError, pa.ArrowException):
        path = _path(run, phase)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        whole = pa.concat_tables([table for *_, table in readable])
        pq.write_table(whole.unify_dictionaries().replace_schema_metadata(metadata), draft, compression="zstd")
        os.replace(draft, path)


def _path(run: Path, phase: Phase) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(str(run.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return cache / "r1" / "view" / f"{name}-{phase}.parquet"
