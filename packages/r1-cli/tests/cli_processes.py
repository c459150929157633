"""Records of processes for tests."""

import json
from dataclasses import asdict
from pathlib import Path

from r1_cli.runs.processes import PROCESSES, Process


def write(run: Path, process: Process) -> None:
    (run / PROCESSES).mkdir(exist_ok=True)
    (run / PROCESSES / f"{process.name}-{process.pid}.json").write_text(json.dumps(asdict(process)))
