"""Writes the table of settings that only some estimators or losses have into the README, from `config/options.py`.

python packages/r1-cli/tests/cli_options_table.py
"""

from collections.abc import Iterator
from pathlib import Path

from r1_cli.config import RunConfig, lookup
from r1_cli.config.options import ESTIMATOR_OPTIONS, LOSS_OPTIONS

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- options: begin (written by tests/cli_options_table.py) -->", "<!-- options: end -->"


def table() -> Iterator[str]:
    yield "| key | default | who has it |\n|---|---|---|"
    for option in (*ESTIMATOR_OPTIONS, *LOSS_OPTIONS):
        default = lookup(RunConfig(), option.key)
        shown = "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
        if option.setting.startswith("clip_"):
            shown = f"{shown} for `default`"
        yield f"| `{option.key}` | {shown} | {', '.join(f'`{owner}`' for owner in option.owners)} |"


def rewrite(readme: str) -> str:
    """Return the README with its table as the code now has it. Raises ValueError if a marker is missing."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md lacks the markers {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n" + "\n".join(table()) + f"\n\n{END}{after}"


if __name__ == "__main__":
    README.write_text(rewrite(README.read_text(encoding="utf-8")), encoding="utf-8")
