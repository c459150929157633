"""Whether a run on several ranks grows: the memory of its driver, ranks, engines and renderers, step by step.

uv run python benchmarks/memory.py [--steps 200] [--ranks 2]

The quickstart, whose prompts have a picture each, with `--ranks` ranks and engines on processors under Ray, four
prompts of four answers a step and a sequence a micro-batch. Its processes are looked at from outside, five times a
second: resident memory without what they share with others, as pages of the object store are read in place by all. Of
each the median over steps 40 to 60 is compared with that over the last twenty, so that what is made in the first steps,
or stands in one step more than in another, is no growth. What the object store's own process has touched of it is shown
beside. Ctrl-C ends it earlier, with what it has seen. The last line is one JSON object.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil

ROOT = Path(__file__).parents[1]
WARM, WINDOW = 40, 20  # steps
MEGABYTE = 2**20
NAMES = ("learner-", "engine-", "media-")


def name_of(process: psutil.Process) -> str | None:
    """What a process is called here: actors by their titles, which the verb that they are at may follow."""
    words = process.cmdline()
    title = words[0].removeprefix("ray::") if words else ""
    if title.startswith(NAMES):
        return title.partition(".")[0]
    return "object store" if title.endswith("raylet") else None


def look(driver: psutil.Process) -> dict[str, float]:
    """MB of each process by name."""
    found = {"driver": own_bytes(driver)}
    for process in driver.children(recursive=True):
        try:
            name = name_of(process)
            if name is not None:
                found[name] = process.memory_info().shared if name == "object store" else own_bytes(process)
        except psutil.NoSuchProcess:  # it lived for a moment only
            continue
    return {name: size / MEGABYTE for name, size in found.items()}


def own_bytes(process: psutil.Process) -> int:
    """Resident bytes that no other process has."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def steps_of(folder: Path) -> int:
    log = folder / "experiment_log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def measure(steps: int, ranks: int) -> dict[str, dict[int, list[float]]]:
    """Let the run go; return what was seen of each process, by step."""
    seen: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        command = [
            str(Path(sys.executable).with_name("r1")), "train", str(ROOT / "examples/quickstart/config.yaml"),
            "data.val_files=null", "trainer.val_freq=-1", "trainer.save_freq=-1", "data.rollout_batch_size=4",
            "worker.actor.global_batch_size=4", "worker.rollout.n=4", "algorithm.disable_kl=false",
            "worker.actor.micro_batch_size_per_device_for_update=1",
            "worker.actor.micro_batch_size_per_device_for_experience=1",
            f"trainer.n_gpus_per_node={ranks}", f"trainer.max_steps={steps}", f"trainer.save_checkpoint_path={folder}",
            "worker.actor.optim.lr=1.0e-9", "trainer.max_idle_steps=-1",  # else it would know all after 130
        ]  # fmt: skip
        with (folder / "output.txt").open("w+") as output:
            # Ray gives way to all other processes by default, so that ranks would hardly move beside them.
            environment = {**os.environ, "RAY_worker_niceness": "0"}
            streams = {"stdout": output, "stderr": subprocess.STDOUT}
            run = psutil.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **streams)
            try:
                while run.poll() is None:
                    step = steps_of(folder)
                    with suppress(psutil.NoSuchProcess):  # it has just ended
                        for name, size in look(run.children()[0]).items() if step else ():
                            seen[name][step].append(size)
                    time.sleep(0.2)
            except KeyboardInterrupt:
                run.terminate()
                run.wait()
                return seen
            if run.returncode:
                output.seek(0)
                raise SystemExit(f"the run has failed:\n{output.read()[-3000:]}")
    return seen


def window(by_step: dict[int, list[float]], first: int) -> float:
    """The median over `WINDOW` steps from `first` on."""
    return median(size for step, sizes in by_step.items() if first <= step < first + WINDOW for size in sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()
    if asked.steps < WARM + 2 * WINDOW:
        parser.error(f"--steps must be {WARM + 2 * WINDOW} at least")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found, seen = {}, measure(asked.steps, asked.ranks)
    steps = max(seen["driver"], default=0)
    if steps < WARM + 2 * WINDOW:
        raise SystemExit(f"{steps} steps were seen, which tell nothing")
    for name, by_step in sorted(seen.items()):
        before, after = window(by_step, WARM), window(by_step, steps - WINDOW)
        found[name] = {
            "before_mb": round(before, 1),
            "after_mb": round(after, 1),
            "growth": round(after / before - 1, 4),
        }
        print(f"{name:14} {before:8.1f} MB, then {after:8.1f} MB: {after / before - 1:+.2%}")
    print(json.dumps({"benchmark": "memory", "steps": steps, "ranks": asked.ranks, **found}))


if __name__ == "__main__":
    main()
