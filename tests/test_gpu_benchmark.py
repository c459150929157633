"""The benchmark for GPUs goes its ways on processors, so that it does not fail first where time is dear."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from endtoend import ROOT

STAGES = ["attention", "learner", "kill"]
SCRIPT = ROOT / "benchmarks/gpu.py"


def run(folder: Path, *stages: str) -> str:
    command = [sys.executable, SCRIPT, "--cpu", "--out", folder, "--stage", *stages]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stdout


@pytest.mark.slow
def test_stages_run_on_processors_and_are_not_measured_again(tmp_path: Path) -> None:
    (tmp_path / "offload.json").write_text(json.dumps({"status": "failed", "why": "exit 1: out of memory"}))
    report = run(tmp_path, *STAGES)
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in STAGES}
    assert all(one["status"] == "done" and one["rows"] for one in found.values())
    of_ranks = [row for row in found["learner"]["rows"] if row["ranks"] == 2]
    assert of_ranks[0]["loss to the first"] < 1e-6
    assert abs(of_ranks[0]["norm to the first"]) < 1e-5
    assert "| tiny-VL | 2 |" in report
    assert "failed: exit 1: out of memory" in report
    assert (tmp_path / "gpu.md").read_text() in report
    assert run(tmp_path, *STAGES).count("done before") == len(STAGES)
