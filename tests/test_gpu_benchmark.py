"""The GPU benchmark runs on CPUs, so that its errors are found before GPU time is spent."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from endtoend import ROOT

SCRIPT = ROOT / "benchmarks/gpu.py"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module: what it starts for a stage goes on in this process, which has torch already."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("gpu")


@pytest.mark.slow
def test_stages_run_on_processors_and_are_not_measured_again(
    tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "offload.json").write_text(json.dumps({"status": "failed", "why": "exit 1: out of memory"}))
    words = ["--cpu", "--out", str(tmp_path), "--stage"]
    subprocess.run([sys.executable, SCRIPT, *words, "attention"], check=True, capture_output=True, cwd=tmp_path)
    for stage in ("learner", "decoding", "kill"):
        gpu.measure(stage, tmp_path, cpu=True)
    stages = ["attention", "learner", "decoding", "kill"]
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in stages}
    assert all(one["status"] == "done" and one["rows"] for one in found.values())
    assert {row["way"]: row["tokens/s"] > 0 for row in found["decoding"]["rows"]} == {
        "stack": True,
        "the model's forward": True,
    }
    assert found["decoding"]["rows"][0]["step ms"] > 0
    of_ranks = [row for row in found["learner"]["rows"] if row["ranks"] == 2]
    assert of_ranks[0]["loss to the first"] < 1e-6
    assert abs(of_ranks[0]["norm to the first"]) < 1e-5
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words, *stages])
    gpu.main()
    report = capsys.readouterr().out
    assert report.count("done before") == len(stages)
    assert "| tiny-VL | 2 |" in report
    assert "failed: exit 1: out of memory" in report
    assert (tmp_path / "gpu.md").read_text() in report
