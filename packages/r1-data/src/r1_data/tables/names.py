"""What the name of a source tells: what to call it in reports, and how many answers a prompt is validated with."""

import re
from pathlib import Path

from r1_data.tables.files import KINDS
from r1_data.tables.slices import split_slice

_ANSWERS = re.compile(r"Avg@?(\d+)")  # RLPR names its files AIME2024_Avg16.parquet


def name_source(spec: str) -> str:
    """Return a short name for a source.

    Example: `AIME_Avg16` for `data/AIME_Avg16.parquet`, `gsm8k` for `openai/gsm8k:main@train[:9]`, `a` for `json@./a`.
    """
    path = _without_split(spec)
    return path.stem if path.suffix.lower() in KINDS else path.name or spec


def answers_per_prompt(spec: str) -> int | None:
    """Return k where a file or folder says `Avg<k>` in its name, as those of RLPR (arXiv 2506.18254) do; else None."""
    found = _ANSWERS.search(_without_split(spec).name)
    return int(found[1]) if found and int(found[1]) > 0 else None


def _without_split(spec: str) -> Path:
    if _exists(Path(spec)):
        return Path(spec)
    source, _ = split_slice(spec)
    head, at, tail = source.rpartition("@")
    if at:
        source = tail if f".{head}" in KINDS else head
    path = Path(source)
    return path if _exists(path) else Path(re.split("[:#]", source, maxsplit=1)[0])


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long
        return False
