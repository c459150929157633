"""Make the pictures of the README and the home page from real runs.

    uv run python docs/pictures.py terminal            # trains the quickstart, for minutes, and shows what it printed
    uv run python docs/pictures.py terminal -- --dry-run   # the same with words behind the command
    uv run python docs/pictures.py viewer RUN [RUN …]  # charts and samples in `r1 view`, with Chromium

The terminal's picture is docs/terminal.svg: the first and the last lines of the output, as they were printed.
"""

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "uv run r1 train examples/quickstart/config.yaml"
RUN = ROOT / "checkpoints/pictures/terminal"
WIDTH, HEAD, TAIL = 108, 16, 14  # columns; lines of the output's beginning and end
TEST = "packages/r1-cli/tests/test_cli_browser.py"
PICTURES = {"view-charts.png": "view-curves.png", "view-samples.png": "view-samples.png"}


def train(*settings: str) -> str:
    """Train the quickstart from its start; return what it printed."""
    shutil.rmtree(RUN, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "r1_cli.main",
        *COMMAND.split()[3:],
        f"trainer.save_checkpoint_path={RUN}",
        *settings,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"COLUMNS": str(WIDTH)}, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def terminal(printed: str, *words: str) -> str:
    """Return an SVG of the command and the first and the last lines that it printed, which loads nothing."""
    printed = printed.replace(f"{RUN}", "checkpoints/quickstart/shapes").replace(f"{ROOT}/", "")
    lines = [line.rstrip() for line in printed.splitlines()]
    lines = [line for line in lines if line]
    if len(lines) > HEAD + TAIL:
        lines = [*lines[:HEAD], "   …", *lines[-TAIL:]]
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(f"[bold green]$[/] [bold]{' '.join([COMMAND, *words])}[/]", highlight=False)
    for line in lines:
        console.print(line, markup=False, highlight=True, soft_wrap=False, overflow="ellipsis", no_wrap=True)
    picture = console.export_svg(title="r1", unique_id="terminal")
    picture = re.sub(r"@font-face \{.*?\}\n", "", picture, flags=re.DOTALL)  # fonts of a network
    return "\n".join(line.rstrip() for line in picture.splitlines()) + "\n"


def viewer(runs: list[str]) -> None:
    """Take the pictures of `r1 view` that its browser test looks at, of these runs."""
    with tempfile.TemporaryDirectory() as folder:
        places = {"R1_VIEW_PICTURES": folder, "R1_VIEW_RUNS": ",".join(str(Path(run).resolve()) for run in runs)}
        asked = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "slow", TEST, "-k", "views_are_whole"]
        subprocess.run(asked, cwd=ROOT, env=os.environ | places, check=True)
        for shot, name in PICTURES.items():
            shutil.copyfile(Path(folder, shot), ROOT / "docs" / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["terminal", "viewer"])
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="of the terminal: behind the command; of the viewer: runs"
    )
    chosen = parser.parse_args()
    if chosen.what == "viewer":
        viewer(chosen.words)
    else:
        (ROOT / "docs/terminal.svg").write_text(terminal(train(*chosen.words), *chosen.words), encoding="utf-8")


if __name__ == "__main__":
    main()
