"""Writes what follows from the registry of estimators and losses into the README's table and the example file.

python packages/r1-cli/tests/cli_options_table.py
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from r1_cli.config.options import ESTIMATOR_OPTIONS, LOSS_OPTIONS, Option

README = Path(__file__).parents[1] / "README.md"
EXAMPLE = Path(__file__).parents[3] / "examples" / "config.yaml"
BEGIN, END = "<!-- options: begin (written by tests/write_tables.py) -->", "<!-- options: end -->"
BLOCKS = {
    "estimators": (ESTIMATOR_OPTIONS, "  ", "null: the estimator's own"),
    "losses": (LOSS_OPTIONS, "    ", "null: the loss's own"),
}


def text(value: Any) -> str:
    """A value as YAML and the README have it."""
    return value if isinstance(value, str) else json.dumps(value) if value != float("inf") else "none"


def owners(option: Option) -> list[str]:
    """Who has the option, with the defaults where each has its own."""
    if not option.shared:
        return [f"`{name}`" for name in option.owners]
    return [f"`{name}` {text(setting.default)}" for name, setting in option.owners.items()]


def table() -> Iterator[str]:
    yield "| key | default | who has it |\n|---|---|---|"
    for option in (*ESTIMATOR_OPTIONS, *LOSS_OPTIONS):
        default = "its owner's" if option.shared else text(option.default)
        yield f"| `{option.key}` | {default} | {', '.join(owners(option))} |"


def lines(options: tuple[Option, ...], indent: str, shared: str) -> Iterator[str]:
    """The keys as the example file lists them."""
    for option in options:
        who = shared if option.shared else f"{', '.join(option.owners)} only"
        yield f"{indent + option.leaf + ': ' + text(option.default):<36}  # " + "; ".join(
            filter(None, [who, option.help])
        )


def rewrite(readme: str) -> str:
    """Return the README with its table as the code now has it. Raises ValueError if a marker is missing."""
    return between(readme, BEGIN, END, "\n" + "\n".join(table()) + "\n")


def rewrite_example(example: str) -> str:
    """Return the example file with the keys of estimators and losses as the code now has them."""
    for name, (options, indent, shared) in BLOCKS.items():
        begin, end = (f"{indent}# {name}: {word}" for word in ("begin (written by tests/write_tables.py)", "end"))
        example = between(example, begin, end, "\n".join(lines(options, indent, shared)))
    return example


def between(whole: str, begin: str, end: str, part: str) -> str:
    """Return the text with another part between the markers. Raises ValueError if one is missing."""
    before, first, rest = whole.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise ValueError(f"the markers {begin!r} and {end!r} are missing")
    return f"{before}{begin}\n{part}\n{end}{after}"


def wrong_rows(readme: str) -> list[str]:
    """Rows of the README's table that say what the code does not; one of a new file may still be missing."""
    right = {key: (default, set(names)) for key, default, names in map(_cells, rewrite(readme).splitlines()) if key}
    rows = [(line, *_cells(line)) for line in readme.partition(BEGIN)[2].partition(END)[0].splitlines()]
    return [
        line
        for line, key, default, names in rows
        if key and not (key in right and default == right[key][0] and set(names) <= right[key][1])
    ]


def _cells(line: str) -> tuple[str, str, list[str]]:
    cells = re.fullmatch(r"\| `([\w.]+)` \| (.*) \| (.*) \|", line)
    return (cells[1], cells[2], cells[3].split(", ")) if cells else ("", "", [])


def wrong_lines(example: str) -> list[str]:
    """Lines of the example file's blocks that are not as the code has them; one of a new file may still be missing."""
    right = rewrite_example(example).splitlines()
    return [line for line in example.splitlines() if line not in right]


if __name__ == "__main__":
    README.write_text(rewrite(README.read_text(encoding="utf-8")), encoding="utf-8")
    EXAMPLE.write_text(rewrite_example(EXAMPLE.read_text(encoding="utf-8")), encoding="utf-8")
