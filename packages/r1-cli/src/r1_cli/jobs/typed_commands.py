"""Name commands of r1 as the user calls them. Loads nothing."""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def next_commands(words: Sequence[str], command: str | None = None) -> list[str]:
    """Return the lines that name commands of r1; `command` is how the user calls it, None: as this time."""
    command = typed_command(sys.argv[0], os.environ) if command is None else command
    return [f"{'      ' if number else 'next: '}{command} {one}" for number, one in enumerate(words)]


def typed_command(program: str, environment: Mapping[str, str]) -> str:
    """Return how the user calls `r1`; `program` is `sys.argv[0]`, and `uv run` sets a variable."""
    if "UV_RUN_RECURSION_DEPTH" in environment:
        return "uv run r1"
    if Path(program).name != "r1":
        return "python -m r1_cli.main"
    found = shutil.which("r1", path=environment.get("PATH"))
    return "r1" if found and Path(found).resolve() == Path(program).resolve() else shlex.quote(program)
