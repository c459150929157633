"""What the end-to-end tests share: where things are, a small run's settings, and how to read its log."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import Result

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = "examples/quickstart/config.yaml"
# A few small steps: enough to go through everything, not to learn much.
SMALL = [
    "data.rollout_batch_size=4",
    "worker.actor.global_batch_size=2",
    "worker.rollout.n=4",
    "trainer.logger=[console,file]",
]

R1 = Callable[..., Result]


def read_log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "experiment_log.jsonl").read_text().splitlines()]
