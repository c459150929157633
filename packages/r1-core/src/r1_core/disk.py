"""Write files and flush them to disk, without torch."""

import os
from pathlib import Path


def force_to_disk(path: Path) -> None:
    """Flush a file or a folder's entries to disk, on the machine that wrote them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    force_to_disk(path)
