"""Helpers of the end-to-end tests: paths, the settings of a small run, and reading its log."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import Result
from metric_tables import metric_rows, pattern

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = "examples/quickstart/config.yaml"
# A few small steps: enough to go through everything, not to learn much. Runs that are compared bit for bit must cut
# alike, so the sizes of micro-batches are those of no rehearsal.
SHORT = [
    "worker.actor.micro_batch_size_per_device_for_update=32",
    "worker.actor.micro_batch_size_per_device_for_experience=64",
    "data.rollout_batch_size=4",
    "worker.actor.global_batch_size=2",
    "worker.rollout.n=4",
    "trainer.logger=[console,file]",
]
# The same on a few rows, which are read in this process: to check all of the quickstart's takes longer than the steps.
SMALL = [
    *SHORT,
    "data.train_files=examples/quickstart/train.parquet[:256]",
    "data.val_files=examples/quickstart/val.parquet[:32]",
    "data.filter_overlong_prompts_workers=1",
]

R1 = Callable[..., Result]


def read_log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "experiment_log.jsonl").read_text().splitlines()]


def without_clock(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What two equal runs log alike: all but times and memory."""
    return [
        {k: v for k, v in record.items() if not k.startswith(("timing_", "perf/", "gen/busy"))} for record in records
    ]


def listed_metrics(section: str = "") -> list[re.Pattern[str]]:
    """The names in the first columns of `docs/metrics.md`, {a,b} written out, words in capitals standing for any.

    Of all sections but the critic's, which most runs have not, or of that one that is asked for.
    """
    rows = [row for row in metric_rows() if (row.section == "The critic") == (section == "The critic")]
    return [re.compile(pattern(name)) for row in rows for name in row.names]
