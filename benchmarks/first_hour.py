"""Run what a stranger does: from a clone to a trained model of their own that answers in the terminal.

    python benchmarks/first_hour.py                                # as docs/first-run.md says it; minutes on two cores
    python benchmarks/first_hour.py --words trainer.max_steps=2    # shorter runs
    UV_NO_SYNC=1 UV_PROJECT_ENVIRONMENT=.venv python benchmarks/first_hour.py   # in an environment that is there

The commands are those of the last block of docs/first-run.md, each in a shell. Between `r1 init` and `r1 check` the
stranger writes rows and a reward. Prints the seconds and the processor seconds of each command.
"""

import argparse
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = "docs/first-run.md"
MOST = 12  # commands
REWARD = '''
def compute_score(reward_inputs):
    """Pay for the right number, and for short answers."""
    right = [one["response"].endswith("{" + one["ground_truth"] + "}") for one in reward_inputs]
    short = [1 / (1 + len(one["response"])) for one in reward_inputs]
    return [{"overall": 0.5 * a + 0.5 * b, "accuracy": float(a)} for a, b in zip(right, short, strict=True)]
'''
ROWS = [("How many shapes?", "1", 1), ("How many squares?", "1", 2), ("How many circles?", "0", 3), ("Count.", "1", 1)]


def read_commands() -> list[str]:
    """Return the commands of the page's last block, without comments."""
    block = re.findall(r"^```sh\n(.*?)^```", (ROOT / PAGE).read_text(), re.DOTALL | re.MULTILINE)[-1]
    return [line.partition("  #")[0].strip() for line in block.splitlines() if line.strip()]


def walk(folder: Path, words: Sequence[str]) -> list[tuple[str, float, float]]:
    """Run the commands in `folder`; return each with its seconds and processor seconds. Raises if one fails.

    Args:
        words: added to each `r1 train`.
    """
    place, done = folder, list[tuple[str, float, float]]()
    for command in read_commands():
        began, used = time.monotonic(), _processor_seconds()
        if command.startswith("git clone"):
            _run(f"git clone -q {shlex.quote(str(ROOT))} r1", place)
        elif command.startswith("cd "):
            place /= command.removeprefix("cd ")
        elif command == "pip install uv":
            assert shutil.which("uv"), "uv is not installed"
        elif "r1 view" in command:
            _view(command, place)
        elif "r1 chat" in command:
            answer = _run(command, place, stdin="How many shapes?\n")
            print(f"  the model answers: {answer.strip()!r}", flush=True)
        else:
            _run(f"{command} {shlex.join(words)}" if "r1 train" in command else command, place)
        done.append((command, time.monotonic() - began, _processor_seconds() - used))
        print(f"{done[-1][1]:8.1f} s {done[-1][2]:8.1f} s of processors   {command}", flush=True)
        if "r1 init" in command:
            write_own(place / "my-task")
    return done


def write_own(task: Path) -> None:
    """Write the stranger's rows and reward."""
    rows = [
        {"question": f"<image>{question}", "answer": answer, "images": [f"pictures/{number}.png"]}
        for question, answer, number in ROWS
    ]
    (task / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (task / "reward.py").write_text(REWARD)


def _run(command: str, folder: Path, stdin: str = "") -> str:
    found = subprocess.run(command, shell=True, cwd=folder, input=stdin, capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(f"{command} failed with {found.returncode}:\n{found.stdout}\n{found.stderr}")
    return found.stdout


def _view(command: str, folder: Path) -> None:
    """Start the viewer, read its first page, and press Ctrl-C."""
    command = f"{command} --port {10_000 + os.getpid() % 50_000}"
    with subprocess.Popen(
        shlex.split(command), cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        try:
            with urllib.request.urlopen(address) as page:
                assert page.status == 200, address
        finally:
            os.killpg(server.pid, signal.SIGINT)


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--words", nargs="*", default=[], help="settings that are added to each r1 train")
    chosen = options.parse_args()
    if (environment := os.environ.get("UV_PROJECT_ENVIRONMENT")) is not None:
        os.environ["UV_PROJECT_ENVIRONMENT"] = str(Path(environment).absolute())
    with tempfile.TemporaryDirectory() as folder:
        done = walk(Path(folder), chosen.words)
    print(f"{len(done)} commands, {sum(one[1] for one in done):.0f} s, {sum(one[2] for one in done):.0f} processor s")
    sys.exit(len(done) > MOST)


if __name__ == "__main__":
    main()
