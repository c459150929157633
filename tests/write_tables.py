"""Write the tables and pages that are generated from the code, in READMEs, examples and docs/.

uv run python tests/write_tables.py            # `--check` writes nothing and fails if something is out of date
"""

import runpy
import sys
from pathlib import Path

from api_pages import api_pages
from metric_tables import viewed_metrics
from reference_pages import pages

ROOT = Path(__file__).resolve().parents[1]
WRITERS = ("packages/r1-core/tests/core_table.py", "packages/r1-cli/tests/cli_options_table.py")
WRITTEN = ("packages/r1-core/README.md", "packages/r1-cli/README.md", "examples/config.yaml")


def main(words: list[str]) -> int:
    """Write; return 1 with `--check` if anything had to change."""
    before = {path: (ROOT / path).read_text(encoding="utf-8") for path in WRITTEN}
    for writer in WRITERS:
        runpy.run_path(str(ROOT / writer), run_name="__main__")
    changed = [path for path, old in before.items() if (ROOT / path).read_text(encoding="utf-8") != old]
    outdated = stale_pages()
    if "--check" not in words:
        write(outdated)
        return 0
    for path in changed:
        (ROOT / path).write_text(before[path], encoding="utf-8")
    for path in [*changed, *outdated]:
        sys.stderr.write(f"{path} is out of date: run `uv run python tests/write_tables.py`\n")
    return int(bool(changed or outdated))


def stale_pages() -> dict[str, str | None]:
    """The generated pages that are not as the code has them, with the text that they should have; None: none."""
    right: dict[str, str | None] = pages() | api_pages() | viewed_metrics()
    written = [*ROOT.glob("docs/a*/*.md"), *ROOT.glob("docs/a*/*.svg")]
    there = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in written}
    there |= {path: (ROOT / path).read_text("utf-8") for path in right if (ROOT / path).is_file()}
    return {path: right.get(path) for path in sorted({*right, *there}) if right.get(path) != there.get(path)}


def write(texts: dict[str, str | None]) -> None:
    for path, text in texts.items():
        if text is None:
            (ROOT / path).unlink()
        else:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
