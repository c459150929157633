"""Writes every table that follows from the code: estimators, losses and their settings in READMEs and examples.

uv run python tests/write_tables.py            # `--check` writes nothing and fails if something is out of date
"""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WRITERS = ("packages/r1-core/tests/core_table.py", "packages/r1-cli/tests/cli_options_table.py")
WRITTEN = ("packages/r1-core/README.md", "packages/r1-cli/README.md", "examples/config.yaml")


def main(words: list[str]) -> int:
    """Write; return 1 with `--check` if anything had to change."""
    before = {path: (ROOT / path).read_text(encoding="utf-8") for path in WRITTEN}
    for writer in WRITERS:
        runpy.run_path(str(ROOT / writer), run_name="__main__")
    changed = [path for path, old in before.items() if (ROOT / path).read_text(encoding="utf-8") != old]
    if "--check" not in words:
        return 0
    for path in changed:
        (ROOT / path).write_text(before[path], encoding="utf-8")
        sys.stderr.write(f"{path} is out of date: run `uv run python tests/write_tables.py`\n")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
