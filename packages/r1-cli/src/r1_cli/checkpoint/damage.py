"""Find damage of a checkpoint's files: missing or truncated ones, and bytes that differ from those written."""

import json
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

STATE_FILE = "trainer.json"
TENSORS = ".safetensors"
CHECKSUMS = "crc32"  # where `r1_core` writes the checksums of a file's tensors, in its header
WHOLE = "whole"  # in the trainer's state, if this is a part of a checkpoint: the files of all parts
THREADS = 8


def checksum_of(state: Mapping[str, Any]) -> int:
    """Return the CRC-32 of a trainer's state, without the checksum that it has itself."""
    rest = {name: value for name, value in state.items() if name != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def checksums_of_texts(folder: Path) -> dict[str, int]:
    """Return the CRC-32 of each file that holds no tensors, by its path in a checkpoint."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != TENSORS)
    own = [path for path in files if path != folder / STATE_FILE]
    return {path.relative_to(folder).as_posix(): zlib.crc32(path.read_bytes()) for path in own}


def find_damage(checkpoint: Path, *, contents: bool = False) -> str | None:
    """Return which file of a checkpoint is damaged or missing, and how this was found; None if all are complete.

    Reads JSON files and the headers of safetensors files. A part such as `actor` can be checked alone, but only the
    checkpoint lists the files it must have.

    Args:
        contents: whether to read all files and compare the checksums that were written with them. Files of older
            versions have none.
    """
    try:
        damage = _find_missing(checkpoint) or _find_truncated(checkpoint)
        return damage if damage is not None or not contents else _find_changed(checkpoint)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        return f"it cannot be read: {type(error).__name__}: {error}"


def _find_missing(checkpoint: Path) -> str | None:
    state, part = checkpoint / STATE_FILE, False
    for path in sorted(checkpoint.rglob("*.json"), key=lambda path: (path != state, path)):
        try:
            content, named = json.loads(path.read_text(encoding="utf-8")), []
            if path == state:
                named, part = content.get("files", []), WHOLE in content
            elif path.name.endswith(".index.json") and not part:  # that of a part names files that other nodes have
                named = content["weight_map"].values()
            missing = [name for name in sorted(set(named)) if not os.path.isfile(path.parent / name)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{path.relative_to(checkpoint)} is cut off or no JSON of its kind ({error})"
        if missing:
            return f"{path.parent.relative_to(checkpoint) / missing[0]} is missing"
    return None


def _find_truncated(checkpoint: Path) -> str | None:
    for path in sorted(checkpoint.rglob(f"*{TENSORS}")):
        if (told := find_cut(path)) is not None:
            return f"{path.relative_to(checkpoint)}: {told}"
    return None


def find_cut(path: Path) -> str | None:
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > size - 8:
            return "its header is cut off"
        try:
            tensors = json.loads(stream.read(length))
            end = max(
                (entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"), default=0
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return "its header cannot be read"
    return None if size == 8 + length + end else f"it has {size:,} bytes, its header says {8 + length + end:,}"


def _find_changed(checkpoint: Path) -> str | None:
    path = checkpoint / STATE_FILE
    state = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "checksum" in state and state["checksum"] != checksum_of(state):
        return f"{STATE_FILE} has another checksum than when it was written"
    for name, expected in state.get("checksums", {}).items():
        if zlib.crc32((checkpoint / name).read_bytes()) != expected:
            return f"{name} has another checksum than when it was written"
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
        files = sorted(checkpoint.rglob(f"*{TENSORS}"))
        for path, told in zip(files, threads.map(_find_changed_tensor, files), strict=True):
            if told is not None:
                return f"{path.relative_to(checkpoint)}: {told}"
    return None


def _find_changed_tensor(path: Path) -> str | None:
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        begin = 8 + int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8:begin])
        written = json.loads(header.pop("__metadata__", {}).get(CHECKSUMS, "null"))
        if written is None:
            return None
        with memoryview(whole) as content:
            for name, own in _parts(header, content, begin):
                with own:
                    if written.get(name) != zlib.crc32(own):
                        return f"tensor {name!r} has another checksum than when it was written"
    return None if written.keys() == header.keys() else "its header names other tensors than when it was written"


def _parts(header: Mapping[str, Any], content: memoryview, begin: int) -> Iterator[tuple[str, memoryview]]:
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        yield name, content[begin + first : begin + last]
