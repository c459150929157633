"""What the quickstart learns on a cluster of two nodes, with its engines in each place, beside one process.

uv run python benchmarks/cluster.py [--steps 140] [--only WAY]...

Two `ray start` on this machine, on loopback, are the nodes, each with a rank. Every way runs the same configuration for
the same number of steps; the accuracy on all validation pictures before the first step and after the last is the run's
own `val/accuracy_reward`. vLLM draws other samples than the embedded engine: its numbers are another draw of the same
kind. The last line is one JSON object.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HERE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled"}
NODES = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]
APART = ["worker.rollout.engines.nnodes=2", "worker.rollout.engines.n_gpus_per_node=1"]
WAYS = {
    "one process": ["worker.rollout.name=embedded"],
    "embedded": [*NODES, "worker.rollout.name=embedded"],
    "embedded apart": [*NODES, *APART, "worker.rollout.name=embedded"],
    "vllm": [*NODES, "worker.rollout.name=vllm"],
    "vllm apart": [*NODES, *APART, "worker.rollout.name=vllm"],
}
JOINED = 120.0  # seconds for a node to say where it is


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


@contextmanager
def node(*words: str) -> Iterator[str]:
    """Start a node by `ray start`, which ends with the block; yield the address that its cluster has."""
    command = [program("ray"), "start", *words, "--block", "--num-cpus=2", "--node-ip-address=127.0.0.1"]
    command += ["--disable-usage-stats", f"--object-store-memory={100 * 2**20}"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env={**os.environ, **HERE}, stdout=log, stderr=log)
        try:
            yield joined(process, log)
        finally:
            process.terminate()
            process.wait()


def joined(process: "subprocess.Popen[bytes]", log: "Iterator[str]") -> str:
    until = time.monotonic() + JOINED
    while True:
        log.seek(0)
        said = log.read()
        if "Ray runtime started" in said:
            found = re.search(r"--address='([\d.:]+)'", said)
            return found[1] if found else ""
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"ray start failed:\n{said}")
        time.sleep(0.1)


def learn(words: list[str], steps: int, folder: Path) -> dict[str, float]:
    """Run one way; return its accuracies and how long it took."""
    numbers = [
        f"trainer.max_steps={steps}",
        f"trainer.val_freq={steps}",
        "trainer.save_freq=-1",
        "trainer.logger=[file]",
    ]
    command = [program("r1"), "train", "examples/quickstart/config.yaml", *numbers, *words]
    start = time.perf_counter()
    with ExitStack() as stack:
        environment = dict(os.environ)
        if NODES[0] in words:
            address = stack.enter_context(node("--head", "--port=0", "--include-dashboard=false"))
            stack.enter_context(node(f"--address={address}"))
            environment |= {**HERE, "RAY_ADDRESS": address}
        with open(folder / "output", "w") as output:
            run = [*command, f"trainer.save_checkpoint_path={folder / 'run'}"]
            subprocess.run(run, cwd=ROOT, env=environment, stdout=output, stderr=output, check=True)
    records = [json.loads(line) for line in (folder / "run/experiment_log.jsonl").read_text().splitlines()]
    steps_taken = [record["timing_s/step"] for record in records if "timing_s/step" in record]
    return {
        "before": records[0]["val/accuracy_reward"],
        "after": records[-1]["val/accuracy_reward"],
        "widest gap": max(record.get("rollout/logprob_gap_max", 0.0) for record in records),
        "seconds a step": sorted(steps_taken)[len(steps_taken) // 2],
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--only", choices=WAYS, action="append")
    asked = parser.parse_args()
    found = {}
    for way in asked.only or WAYS:
        if way.startswith("vllm") and not find_spec("vllm"):
            print(f"{way}: skipped, vLLM is not installed", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="r1-") as folder:
            try:
                found[way] = learn(WAYS[way], asked.steps, Path(folder))
            except subprocess.CalledProcessError:
                sys.exit(f"{way} failed:\n{(Path(folder) / 'output').read_text()[-4000:]}")
        print(f"{way}: " + ", ".join(f"{name} {value:.3g}" for name, value in found[way].items()), flush=True)
    print(json.dumps({"steps": asked.steps, "ways": found}))


if __name__ == "__main__":
    main()
