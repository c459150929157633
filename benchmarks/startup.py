"""How long `r1 --help` and a dry run take, beside a bare interpreter and `import torch` on the same machine.

uv run python benchmarks/startup.py [--runs 5]
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = "examples/quickstart/config.yaml"
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import torch": [sys.executable, "-c", "import torch"],
    "r1 --help": [sys.executable, "-m", "r1_cli.main", "--help"],
    "r1 train --dry-run": [sys.executable, "-m", "r1_cli.main", "train", QUICKSTART, "--dry-run"],
}


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    for command in COMMANDS.values():
        seconds(command)  # fills the file cache
    # In turn rather than one after the other, so that a slow moment of the machine meets them all.
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(runs):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    peer = statistics.median(times["import torch"])
    print(f"{'command':22} {'median s':>9} {'min s':>7} {'max s':>7}  ratio to import torch")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:22} {median:9.3f} {min(values):7.3f} {max(values):7.3f}  {median / peer:.2f}")


if __name__ == "__main__":
    main()
