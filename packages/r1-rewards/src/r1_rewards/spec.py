"""Which verifier a configuration names: a built-in one, or a function in a user's file."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

BUILTINS = ("gsm8k", "math", "r1v")  # each a module of this package with a function `score`


class RewardSpecError(ValueError):
    """A reward that cannot be used as configured; the message says what was found and what to write instead."""


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """A built-in verifier (`path` is None, `function` its name) or a function of a user's file."""

    function: str
    path: Path | None = None  # absolute


def parse_spec(text: str) -> RewardSpec:
    """Read "math" or "path/file.py:function", without running anything.

    Raises RewardSpecError for an unknown name (with the nearest one) and for a missing file (with its neighbours).
    """
    if text in BUILTINS:
        return RewardSpec(text)
    path_text, colon, function = text.rpartition(":")
    if not colon and not text.endswith(".py"):
        raise RewardSpecError(
            f"reward {text!r} is neither a built-in verifier nor file.py:function" + describe(text, BUILTINS)
        )
    if not colon or not function.isidentifier():
        raise RewardSpecError(
            f"reward {text!r}: name the function after a colon, as in {path_text or text}:compute_score"
        )
    path = Path(path_text).expanduser()
    if not path.is_file():
        neighbours = sorted(entry.name for entry in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise RewardSpecError(f"reward {text!r}: there is no file {path_text}" + describe(path.name, neighbours))
    return RewardSpec(function, path.resolve())


def describe(wanted: str, names: Iterable[str]) -> str:
    """Return the end of an error message: the name nearest to `wanted`, and all that exist."""
    names = sorted(names)
    nearest = difflib.get_close_matches(wanted, names, n=1)
    suggestion = f"; did you mean {nearest[0]!r}?" if nearest else ""
    listing = f" (there are: {', '.join(names)})" if names else " (there are none)"
    return suggestion + listing
