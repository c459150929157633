"""The table of docs/hardware.md is what `r1 estimate` prints for each model."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from endtoend import ROOT
from test_small_card import write_header

from r1_cli.main import main

PAGE = ROOT / "docs/hardware.md"
WORDS = [
    "worker.rollout.tensor_parallel_size=1",
    "worker.rollout.name=vllm",
    "data.train_files=examples/quickstart/train.parquet",
    "data.val_files=null",
]
TRAINED = {"all weights": [], "LoRA, rank 32": ["worker.actor.model.lora.rank=32"]}
ROWS = re.findall(r"^\| (Qwen\S+) \| (.+?) \| (.+?) \| .+ \| .+ \|$", PAGE.read_text(), re.MULTILINE)


def row(model: str, trained: str, cards: str, folder: Path) -> str:
    """The table's row of a model whose sizes are in `folder`."""
    words = [*WORDS, *TRAINED[trained], f"worker.actor.model.model_path={folder}", "--gpus", cards, "--json"]
    said = json.loads(CliRunner().invoke(main, ["estimate", "examples/config.yaml", *words]).stdout)
    phase = max((one for one in said["phases"] if one["name"] != "sampling"), key=lambda one: one["bytes"])
    fits = "yes" if said["fits"] else "no"
    return f"| {model} | {trained} | {cards} | {phase['name']}, {phase['bytes'] / 1e9:.1f} GB | {fits} |"


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted({model for model, *_ in ROWS}))
def test_the_rows_of_a_model_are_what_r1_estimate_says(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    write_header(model, tmp_path)
    found = [row(*one, tmp_path) for one in ROWS if one[0] == model]
    assert [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {model} |")] == found


def test_the_page_has_rows_that_fit_and_rows_that_do_not() -> None:
    assert len(ROWS) >= 10
    assert {line.split(" | ")[-1] for line in PAGE.read_text().splitlines() if line.startswith("| Qwen")} == {
        "yes |", "no |",
    }  # fmt: skip
