"""Make the pictures of the README and the home page from real runs.

    uv run python docs/pictures.py terminal            # trains the quickstart, for minutes, and shows what it printed
    uv run python docs/pictures.py terminal -- --dry-run   # the same with words behind the command
    uv run python docs/pictures.py viewer RUN [RUN …]  # what `r1 view` shows of runs, with Chromium

The terminal's picture is docs/terminal.svg: the first and the last lines of the output, as they were printed.
"""

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "uv run r1 train examples/quickstart/config.yaml"
RUN = ROOT / "checkpoints/pictures/terminal"
WIDTH, HEAD, TAIL = 108, 16, 14  # columns; lines of the output's beginning and end
SIZE = {"width": 1280, "height": 800}


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


def viewer(runs: list[str], target: Path) -> None:
    """Write a small PNG of the charts of `r1 view`."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "r1_cli.main", "view", *runs, "--port", str(10_000 + os.getpid() % 50_000)]
    chromium = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as tools:
        assert server.stdout is not None
        try:
            browser = tools.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport=SIZE)
            page.goto(server.stdout.readline().strip(), wait_until="load")
            page.set_default_timeout(300_000)
            page.get_by_text("Charts", exact=True).first.click()
            page.locator("figure path.curve").first.wait_for()
            page.wait_for_timeout(2_000)  # the other charts
            shot = Image.open(io.BytesIO(page.screenshot()))
            browser.close()
        finally:
            server.terminate()
    shot.convert("RGB").quantize(128).save(target, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["terminal", "viewer"])
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="of the terminal: behind the command; of the viewer: runs"
    )
    chosen = parser.parse_args()
    if chosen.what == "viewer":
        viewer(chosen.words, ROOT / "docs/view-curves.png")
    else:
        (ROOT / "docs/terminal.svg").write_text(terminal(train(*chosen.words), *chosen.words), encoding="utf-8")


if __name__ == "__main__":
    main()
