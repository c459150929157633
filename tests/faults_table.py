"""The table of faults in `docs/faults.md`: each row is a fault that a test makes, with the outcome that it sees."""

import ast
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/faults.md"
RESTARTED = "restarted"
MEASURED = " ({seconds_to_restart:.0f} s to restart, {steps_again} steps taken again)"
TESTED: list[str] = []  # what the test that runs now has made, a line of the table each; `conftest.py` prints them


def read_rows() -> dict[str, list[str]]:
    """Return the cells of each row by its fault: how it is noticed, the lost work, the outcome."""
    rows, inside = {}, False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        inside = line.startswith("|") and (inside or cells[0] == "fault")
        if inside and cells[0] != "fault" and not cells[0].startswith("---"):
            assert cells[0] not in rows, f"docs/faults.md has two rows {cells[0]!r}"
            rows[cells[0]] = cells[1:]
    return rows


def note_fault(
    fault: str, restart: Mapping[str, Any] | None = None, began: float = 0.0, outcome: str = RESTARTED
) -> None:
    """Require that the table has this outcome, and note what was made for the end of the test run.

    Args:
        restart: the manifest's entry, also appended to the file that R1_FAULTS names.
        began: when the fault was made, by `time.time`.
        outcome: how the row's outcome begins.
    """
    rows = read_rows()
    assert fault in rows, f"docs/faults.md has no row {fault!r}"
    assert rows[fault][-1].startswith(outcome), f"{fault}: {rows[fault][-1]!r} in docs/faults.md, found {outcome!r}"
    TESTED.append(" | ".join([fault, *rows[fault]]) + (MEASURED.format(**restart) if restart else ""))
    if path := os.environ.get("R1_FAULTS"):
        with Path(path).open("a") as file:
            file.write(json.dumps({"fault": fault, **(restart or {})}) + "\n")


def noted_in_tests() -> dict[str, set[str]]:
    """Return the faults that calls of `note_fault` in the tests can name, with the outcomes that they require.

    Of a fault that is no literal, every text in the test that calls counts, and no outcome is known.
    """
    found: dict[str, set[str]] = {}
    for path in [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("packages/*/tests/test_*.py")]:
        source = path.read_text(encoding="utf-8")
        tests = ast.parse(source).body if "note_fault(" in source else []
        for test in (one for one in tests if isinstance(one, ast.FunctionDef)):
            for call in _calls(test):
                literal = isinstance(call.args[0], ast.Constant)
                given = [*call.args[3:4], *(one.value for one in call.keywords if one.arg == "outcome")]
                outcomes = [text for one in given for text in _texts(one)] or [RESTARTED]
                for fault in _texts(call.args[0] if literal else test):
                    found.setdefault(fault, set()).update(outcomes if literal else ())
    return found


def _calls(test: ast.FunctionDef) -> Iterator[ast.Call]:
    for node in ast.walk(test):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "note_fault":
            yield node


def _texts(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value
