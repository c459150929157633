"""The table of faults in `docs/faults.md`: each row is a fault that a test makes, with the outcome that it sees."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs/faults.md"
RESTARTED = "restarted"


def read_rows() -> dict[str, list[str]]:
    """Return the cells of each row by its fault."""
    lines = [line.strip() for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def note_fault(fault: str, restart: Mapping[str, Any], began: float, outcome: str = RESTARTED) -> None:
    """Require that the table has this outcome, and append what was measured to the file that R1_FAULTS names.

    Args:
        restart: the manifest's entry.
        began: when the fault was made, by `time.time`.
    """
    rows = read_rows()
    assert fault in rows, f"docs/faults.md has no row {fault!r}"
    assert rows[fault][-1].startswith(outcome), f"{fault}: {rows[fault][-1]!r} in docs/faults.md, found {outcome!r}"
    if path := os.environ.get("R1_FAULTS"):
        with Path(path).open("a") as file:
            file.write(json.dumps({"fault": fault, **restart}) + "\n")
