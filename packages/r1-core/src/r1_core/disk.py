"""Files that are on their disk, and not only on their way there, when a call returns; without torch."""

import os
from pathlib import Path


def force_to_disk(path: Path) -> None:
    """Wait until a file or a folder's list is on its disk. Whoever wrote it must: no other machine can for this one."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a file and force it to disk."""
    path.write_text(text, encoding="utf-8")
    force_to_disk(path)
