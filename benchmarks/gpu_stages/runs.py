"""The quickstart by the command that users type, on one device and on all: accuracy and seconds."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gpu_stages.bench import Bench, Row

QUICKSTART = "examples/quickstart/config.yaml"


def measure(bench: Bench) -> Iterator[Row]:
    yield from (_run(bench, devices) for devices in bench.worlds(1, 2, 4, 8))


def _run(bench: Bench, devices: int) -> Row:
    settings = [f"trainer.n_gpus_per_node={devices}", *(["trainer.max_steps=2"] if bench.tiny else [])]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        subprocess.run(
            [
                sys.executable,
                "-m",
                "r1_cli.main",
                "train",
                QUICKSTART,
                f"trainer.save_checkpoint_path={folder}",
                *settings,
            ],
            check=True,
        )
        taken = time.perf_counter() - start
        log = [json.loads(line) for line in (Path(folder) / "experiment_log.jsonl").read_text().splitlines()]
    row: Row = {"devices": devices, "seconds": taken, "steps": log[-1]["step"]}
    accuracies = [record["val/accuracy_reward"] for record in log if "val/accuracy_reward" in record]
    row |= {"accuracy before": accuracies[0], "accuracy after": accuracies[-1]} if accuracies else {}
    return row | {
        name: log[-1][name] for name in ("timing_s/gen", "timing_s/update_actor", "timing_s/step") if name in log[-1]
    }
