"""The GPU benchmark runs on CPUs, so that its errors are found before GPU time is spent."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
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


def test_the_rows_of_a_stage_that_fails_are_kept(tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(bench: Any) -> Any:
        yield {"way": "first", "ms": 1.5}
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(measure=measure))
    with pytest.raises(RuntimeError, match="CUDA error"):
        gpu.measure("machine", tmp_path, cpu=True)
    gpu.fail(tmp_path, "machine", "exit 1: CUDA error")
    found = gpu.read(tmp_path, "machine")
    assert found["rows"] == [{"way": "first", "ms": 1.5}]
    page = gpu.table("machine", found)
    assert "failed: exit 1: CUDA error" in page
    assert "| first | 1.5 |" in page


def test_what_users_type_first_is_measured_first(gpu: Any) -> None:
    assert list(gpu.STAGES)[:2] == ["smoke", "runs"]


def test_the_exact_attention_of_the_benchmark_is_that_of_all_heads_at_once(gpu: Any) -> None:
    attention = importlib.import_module("gpu_stages.attention")
    query, key, value = (torch.randn(1, heads, 16, 8) for heads in (4, 2, 2))
    found = attention._exact(query, key, value, [5, 9, 2])
    assert torch.allclose(found, attention._by_pieces(query.double(), key.double(), value.double(), [5, 9, 2]))
