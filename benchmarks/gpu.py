"""What only GPUs can show: one command on a node that has some, stage after stage, each in a process of its own.

uv run python benchmarks/gpu.py [--stage NAME ...] [--out FOLDER] [--again] [--cpu]

A stage has a deadline, after which its processes are killed and the next begins. What it found lies in FOLDER/NAME.json
as soon as it ends; the same command, given again, goes on with the stages that are not done yet. A stage that needs
more devices than there are is skipped and says so. At the end all tables stand in FOLDER/gpu.md, with the conditions.

`--cpu` goes the same ways on processors, with gloo and shapes of a few thousand weights: it shows that the stages run,
and its figures mean nothing.
"""

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_stages.bench import Bench, Skipped


@dataclass(frozen=True, slots=True)
class Stage:
    """A module of `gpu_stages` with a function `measure(bench)` that returns or yields rows of one table."""

    title: str
    minutes: float  # until it is killed


STAGES = {
    "smoke": Stage("What a run computes", 10),
    "runs": Stage("The quickstart, end to end", 30),
    "machine": Stage("Devices and links", 2),
    "collectives": Stage("Collectives", 10),
    "attention": Stage("Attention over packed rows", 10),
    "learner": Stage("A training step", 90),
    "offload": Stage("Weights and optimizer kept by the processor", 20),
    "decoding": Stage("Tokens from the embedded engine", 20),
    "sleep": Stage("vLLM asleep and awake", 20),
    "sync": Stage("New weights on their way to the engines", 90),
    "checkpoint": Stage("Saving and loading", 30),
    "kill": Stage("A rank killed inside a collective", 5),
    "shapes": Stage("A 7B shape, end to end", 90),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--again", action="store_true", help="measure again what is done")
    parser.add_argument("--cpu", action="store_true", help="tiny shapes on processors")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.inside:
        return measure(options.inside, options.out, options.cpu)
    for name in options.stage:
        done = read(options.out, name)
        if done["status"] == "done" and not options.again:
            print(f"{name}: done before")
            continue
        print(f"{name}: at most {STAGES[name].minutes:g} minutes ...", flush=True)
        run(name, options.out, options.cpu)
        print(f"{name}: {read(options.out, name)['status']}", flush=True)
    report = "\n".join(table(name, read(options.out, name)) for name in STAGES)
    (options.out / "gpu.md").write_text(report)
    print(report)
    if any(read(options.out, name)["status"] == "failed" for name in options.stage):
        sys.exit(1)


def run(name: str, out: Path, cpu: bool) -> None:
    """Measure a stage in a process of its own, and kill all that it has started when its time is over."""
    command = [sys.executable, __file__, "--inside", name, "--out", str(out), *(["--cpu"] if cpu else [])]
    write(out, name, {"status": "failed", "why": "it ended without a word"})
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(STAGES[name].minutes * 60)
        except subprocess.TimeoutExpired:
            fail(out, name, f"not done within {STAGES[name].minutes:g} minutes")
        else:
            if code:
                last = (out / f"{name}.log").read_text().strip().splitlines()[-1:]
                fail(out, name, f"exit {code}: {' '.join(last)}")
        finally:
            kill(process)


def fail(out: Path, name: str, why: str) -> None:
    """Record why a stage has ended; the rows that it has measured stay."""
    write(out, name, read(out, name) | {"status": "failed", "why": why})


def kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def measure(name: str, out: Path, cpu: bool) -> None:
    bench, start = Bench.on_this_machine(cpu), time.perf_counter()
    try:
        rows: list[Any] = []
        for row in importlib.import_module(f"gpu_stages.{name}").measure(bench):
            rows.append(row)  # kept if a later one fails or the time is over
            write(out, name, {"status": "failed", "why": f"it ended after {len(rows)} rows", "rows": rows})
        found: dict[str, Any] = {"status": "done", "rows": rows}
    except Skipped as reason:
        found = {"status": "skipped", "why": str(reason)}
    write(out, name, found | {"seconds": time.perf_counter() - start, "conditions": conditions(bench)})


def conditions(bench: Bench) -> str:
    import torch

    devices = f"{bench.devices} x {bench.device_name}"
    return f"{devices}, torch {torch.__version__}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"


def read(out: Path, name: str) -> dict[str, Any]:
    path = out / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"status": "not measured"}
    return found


def write(out: Path, name: str, found: dict[str, Any]) -> None:
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


def table(name: str, found: dict[str, Any]) -> str:
    """Return a stage as Markdown; rows may differ in what they have."""
    lines = [f"## {STAGES[name].title}", ""]
    if found["status"] != "done":
        lines += [f"{found['status']}: {found.get('why', '')}".removesuffix(": "), ""]
    rows: list[dict[str, Any]] = found.get("rows", [])
    if not rows:
        return "\n".join(lines)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines += [f"{found['conditions']}; {found['seconds']:.0f} s", ""] if found["status"] == "done" else []
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(cell(row.get(column)) for column in columns)} |" for row in rows]
    return "\n".join([*lines, ""])


def cell(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
