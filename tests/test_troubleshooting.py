"""Each message of docs/troubleshooting.md is in the code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from endtoend import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text().split("## By message")[1]
MESSAGES = re.findall(r"^\| `(.+?)` \|", PAGE, re.MULTILINE)


@cache
def texts() -> str:
    """Every text of the packages' sources, with an ellipsis for what is put in."""
    return "\n".join(text for path in sorted(ROOT.glob("packages/*/src/**/*.py")) for text in texts_of(path))


def texts_of(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            found.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_there_are_messages() -> None:
    assert len(MESSAGES) >= 15


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_one_of_the_code(message: str) -> None:
    pattern = ".*".join(re.escape(piece.strip()) for piece in message.split("…"))
    assert re.search(pattern, texts()), "the code says it in other words now"
