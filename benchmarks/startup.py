"""How long `r1 --help`, a dry run, and the way to the quickstart's first step take, beside `import torch`.

uv run python benchmarks/startup.py [--runs 5]
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
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


def seconds_to_first_step() -> tuple[float, float]:
    """Return the wall seconds from the command to the beginning of the quickstart's first step, and processor seconds.

    The processor seconds are of all processes, the step itself included. Lengths of rows are not known beforehand.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        settings = ["trainer.max_steps=1", "trainer.val_freq=-1", "trainer.val_before_train=false"]
        settings += [
            "trainer.save_freq=-1",
            f"trainer.save_checkpoint_path={folder}/run",
            f"data.cache_dir={folder}/cache",
        ]
        start = time.perf_counter()
        command = [sys.executable, "-m", "r1_cli.main", "train", QUICKSTART, *settings]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = next(line for line in process.stdout if line.startswith("step 1/1 "))
            elapsed = time.perf_counter() - start
            process.stdout.read()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return elapsed - float(line.split("seconds ")[1]), used


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
    first, processor = zip(*[seconds_to_first_step() for _ in range(runs)], strict=True)
    median = statistics.median(first)
    print(f"{'first step begins':22} {median:9.3f} {min(first):7.3f} {max(first):7.3f}  {median / peer:.2f}")
    print(f"{'  processor seconds':22} {statistics.median(processor):9.3f} {min(processor):7.3f} {max(processor):7.3f}")


if __name__ == "__main__":
    main()
