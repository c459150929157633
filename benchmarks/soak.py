"""Kill and stop processes of a run at random; compare every step's numbers with those of a calm run.

    uv run --all-packages python benchmarks/soak.py --faults 100 --every 20

The quickstart on two ranks and two engines. A fault is SIGKILL or SIGSTOP of a rank, an engine, the driver, a renderer
of media or a reward process. The run must go on by itself and leave no process behind. It is ended by SIGTERM.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
RUN = [
    "train", "examples/quickstart/config.yaml", "trainer.n_gpus_per_node=2", "data.filter_overlong_prompts_workers=2",
    "data.train_files=examples/quickstart/train.parquet[:256]", "data.val_files=null", "trainer.val_freq=-1",
    "data.rollout_batch_size=4", "worker.actor.global_batch_size=2", "worker.rollout.n=4", "trainer.logger=[file]",
    "worker.actor.micro_batch_size_per_device_for_update=32", "trainer.save_freq=5", "trainer.max_restarts=1000",
    "trainer.restart_window=1", "trainer.max_idle_steps=-1",  # no restart waits; soon all answers are right
    "worker.actor.micro_batch_size_per_device_for_experience=64", "worker.actor.optim.lr_scheduler_type=constant",
]  # fmt: skip
ENDING_SECONDS = 10.0  # for what the run has started, after its own end
TARGETS = {
    "rank": r"ray::learner-", "engine": r"ray::engine-", "media": r"ray::media-", "reward": r"r1_rewards|r1-reward",
    "driver": r"bin/r1 train ",
}  # fmt: skip
CLOCKED = ("timing_", "perf/", "gen/busy", "gen/prefilled")  # by a clock, memory, or the number of engines
# An engine's log-probs differ in their last digits with the answers that it decodes together.
ROUNDED = ("rollout/kl", "rollout/logprob_gap", "rollout/chi2", "rollout/effective_sample_size", "rollout/ppl")


def start(folder: Path, steps: int, *words: str) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).with_name("r1")), *RUN, f"trainer.max_steps={steps}", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder.parent / f"{folder.name}.txt").open("wb") as output:
        command.append(f"trainer.save_checkpoint_path={folder}")
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)


def read_steps(folder: Path) -> dict[int, dict[str, float]]:
    log = folder / "experiment_log.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    assert len({row["step"] for row in rows}) == len(rows), "a step was logged twice"
    return {row["step"]: {k: v for k, v in row.items() if not k.startswith(CLOCKED)} for row in rows}


def without_rounded(step: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in step.items() if not key.startswith(ROUNDED)}


def restarts_of(folder: Path) -> list[float]:
    """Return the seconds of each restart."""
    starts = json.loads((folder / "manifest.json").read_text())["starts"]
    return [one["restart"]["seconds_to_restart"] for one in starts if "restart" in one]


def processes_of(process: subprocess.Popen[bytes]) -> list[tuple[str, psutil.Process]]:
    """Return the target and the process of all that may be hit."""
    found = []
    for one in psutil.Process(process.pid).children(recursive=True):
        try:
            words = " ".join(one.cmdline())
        except psutil.Error:
            continue
        found += [(name, one) for name, pattern in TARGETS.items() if re.search(pattern, words)]
    return found


def hit(process: subprocess.Popen[bytes], random_: random.Random) -> str | None:
    """Kill or stop one process; return the fault's name, None if there was no process of the chosen kind."""
    target, found = random_.choice([*TARGETS]), processes_of(process)
    chosen = [one for name, one in found if name == target]
    if not chosen:
        return None
    number = random_.choice([signal.SIGKILL, signal.SIGSTOP])
    try:
        os.kill(random_.choice(chosen).pid, number)
    except ProcessLookupError:
        return None
    return f"{number.name} {target}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=8, help="0: compare two calm runs")
    parser.add_argument("--every", type=float, default=20.0, help="seconds")
    parser.add_argument("--steps", type=int, default=0, help="0: as many as the faults leave time for")
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    folder, random_ = Path(tempfile.mkdtemp(prefix="r1-soak-")), random.Random(wanted.seed)
    hurt, calm, faults = folder / "hurt", folder / "calm", Counter[str]()
    steps, began = wanted.steps or 10**6, time.monotonic()
    process = start(hurt, steps)
    while not read_steps(hurt) and process.poll() is None:
        time.sleep(0.5)
    started = processes_of(process)
    while faults.total() < wanted.faults and process.poll() is None:
        time.sleep(wanted.every)
        if (fault := hit(process, random_)) is not None:
            faults[fault] += 1
            print(f"{time.monotonic() - began:6.0f} s, step {max(read_steps(hurt))}: {fault}", flush=True)
        started += processes_of(process)
    reached = max(read_steps(hurt))
    while process.poll() is None and max(read_steps(hurt)) < min(reached + 5, steps):
        time.sleep(1)
    if not wanted.steps and process.poll() is None:
        process.terminate()
    code = process.wait()
    own = {one for _, one in started}
    left = psutil.wait_procs(own, timeout=ENDING_SECONDS)[1]
    taken = read_steps(hurt)
    start(calm, max(taken)).wait()
    quiet = read_steps(calm)
    differing = [step for step in taken if without_rounded(taken[step]) != without_rounded(quiet.get(step, {}))]
    gaps = [abs(v - quiet[step].get(k, v)) for step in taken.keys() & quiet for k, v in taken[step].items()
            if k.startswith(ROUNDED)]  # fmt: skip
    print(f"{faults.total()} faults ({dict(faults)}) in {time.monotonic() - began:.0f} s; exit code {code}")
    print(f"{len(taken)} steps, {len(differing)} with other numbers: {differing[:10]}; {len(left)} processes left")
    print(f"seconds of {len(seconds := restarts_of(hurt))} restarts: {seconds}; load {os.getloadavg()[0]:.1f}")
    print(f"rounded numbers: {sum(map(bool, gaps))} of {len(gaps)} differ, by at most {max(gaps, default=0.0):.2g}")
    print(f"the runs are in {folder}")
    return int(bool(differing or left) or code not in (0, 143))


if __name__ == "__main__":
    sys.exit(main())
