"""The tables of metrics in docs/: what each name means, for tests and for `r1 view`."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, TUNING = "docs/metrics.md", "docs/fine-tuning.md"
TUNING_SECTION = "Numbers"  # of the page on fine-tuning
VIEWED = "packages/r1-cli/src/r1_cli/runs/view/metrics.json"
WILD = re.compile(r"\b[A-Z]{1,}\b|(?<=@)K|PART|NAME")  # stands for any text of a name


@dataclass(frozen=True)
class MetricRow:
    section: str
    names: list[str]  # {a,b} written out, words in capitals stand for any
    text: str
    watch: bool


def metric_rows(page: str = PAGE) -> Iterator[MetricRow]:
    """Yield the rows of a page's tables whose first cell holds names."""
    section = ""
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            names = [name for cell in re.findall(r"`([^`]+)`", cells[0]) for name in _written_out(cell)]
            yield MetricRow(section, names, cells[1], cells[2:] != [] and cells[2] != "")


def _written_out(name: str) -> list[str]:
    return ["".join(choice) for choice in product(*(part.split(",") for part in re.split(r"[{}]", name)))]


def pattern(name: str) -> str:
    """Return the regular expression of a name in a table."""
    return WILD.sub(r"[^ ]+", re.escape(name))


def viewed_metrics() -> dict[str, str]:
    """Return the text of the file from which `r1 view` explains metrics, by its path.

    Patterns of whole names, those with the most literal letters first: `reward/failures` before `reward/PART`.
    """
    rows = [*metric_rows(), *(row for row in metric_rows(TUNING) if row.section == TUNING_SECTION)]
    named = [(name, row, 100 * place + at) for place, row in enumerate(rows) for at, name in enumerate(row.names)]
    found = [
        {
            "section": "Fine-tuning" if row.section == TUNING_SECTION else row.section,
            "place": place,
            "pattern": f"^{pattern(name)}$",
            "text": _plain(row.text),
            "watch": name == row.names[0] and (row.watch or row.section == TUNING_SECTION),
        }
        for name, row, place in sorted(named, key=lambda one: -_literal(one[0]))
    ]
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in found)
    return {VIEWED: f"[\n{lines}\n]\n"}


def _literal(name: str) -> float:
    return len(WILD.sub("", name)) if WILD.search(name) else float("inf")


def _plain(text: str) -> str:
    """Return a cell's text without Markdown, beginning with a capital letter."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "")
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
