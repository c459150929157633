"""What a case of odd input is: what is written, and what should become of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOUND = {"problem": "What is 1 + 1?", "answer": "2"}


@dataclass(frozen=True)
class Read:
    """The row is read rightly: these of its facts hold, and nothing is found wrong with it."""

    text: str | None = None  # is in the rendered prompt
    truth: str | None = None
    pictures: int | None = None
    videos: int | None = None
    corner: tuple[int, int, int] | None = None  # about the colour of the first picture's corner
    shape: str | None = None  # "tall" or "wide": the first picture or video
    metadata: Mapping[str, Any] | None = None
    rows: int = 3  # that the source then has


@dataclass(frozen=True)
class Named:
    """The row is named by file and number, in a check and by a data set, and left out; the others are read."""

    pattern: str
    number: int = 2
    rows: int = 3
    taken: bool = False  # a run uses the row all the same, and says so


@dataclass(frozen=True)
class Refused:
    """The source cannot be used; the message names the file."""

    pattern: str


@dataclass(frozen=True)
class Case:
    """What is written, and what should become of it."""

    make: Callable[[Path], Any]  # gives rows in memory, or the path to read
    expect: Read | Named | Refused


def whole(data: bytes, name: str = "train.jsonl") -> Callable[[Path], str]:
    """A file of these bytes."""

    def make(folder: Path) -> str:
        (folder / name).write_bytes(data)
        return str(folder / name)

    return make


def row(**cells: Any) -> Callable[[Path], list[tuple[str, dict[str, Any]]]]:
    """A row in memory, between two sound ones."""
    made = {"problem": "?", "answer": "1", **cells}
    made = {name: cell for name, cell in made.items() if cell is not MISSING}
    return lambda folder: [("t:1", dict(SOUND)), ("t:2", made), ("t:3", dict(SOUND))]


MISSING = object()


def shown(*pictures: Any, problem: str = "<image>?") -> Callable[[Path], Any]:
    return row(problem=problem, images=list(pictures))


def filmed(*videos: Any, problem: str = "<video>?") -> Callable[[Path], Any]:
    return row(problem=problem, videos=list(videos))


def beside(files: Mapping[str, bytes], cell: Any, column: str = "images") -> Callable[[Path], Any]:
    """A row whose picture is a file beside it; `{}` in the cell is the folder."""

    def make(folder: Path) -> Any:
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        there = cell.replace("{}", str(folder)) if isinstance(cell, str) else cell
        marker = "<image>" if column == "images" else "<video>"
        return row(problem=f"{marker}?", **{column: [there]})(folder)

    return make


def said(content: Any, role: Any = "user", **more: Any) -> Callable[[Path], Any]:
    return row(problem=[{"role": role, "content": content}], **more)
