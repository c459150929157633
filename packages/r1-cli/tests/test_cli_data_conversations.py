"""`r1 data check` and `show` of fine-tuning rows: what is trained, what cannot be used, what validation shares."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from r1_cli.main import main

MODEL = Path(__file__).resolve().parents[3] / "examples/quickstart/model"


def talk(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def data(folder: Path, command: str, rows: list[Any], *words: str, val: list[Any] | None = None) -> Result:
    for name, listed in (("t", rows), ("v", val or [])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    settings = [f"data.train_files={folder}/t.jsonl", f"worker.actor.model.model_path={MODEL}", "sft.loss=nll"]
    settings += [f"data.val_files={folder}/v.jsonl"] if val else []
    settings += ["data.max_length=100", "data.filter_overlong_prompts_workers=1", "data.cache_dir=null"]
    return CliRunner().invoke(main, ["data", command, *settings, *words])


def test_a_check_counts_what_is_trained_and_names_rows(tmp_path: Path) -> None:
    many = [talk(f"{i} + 1?", str(i + 1)) for i in range(10, 50)]
    rows = [talk("1 + 1?", "2"), talk(" 1 +  1?", "2"), talk("2 + 2?", "4"), {"messages": []}, *many]
    page, bad = tmp_path / "page.html", tmp_path / "bad.jsonl"
    words = ["--html", str(page), "--rows", str(bad)]
    result = data(tmp_path, "check", rows, *words, val=[talk("1 + 1?", "2"), talk("2 + 2?", "5")])
    assert result.exit_code == 0, result.output
    for text in (
        "v.jsonl:1: is training row t.jsonl:1",
        "v.jsonl:2: asks what training row t.jsonl:3 asks, with another answer",
        "t.jsonl:2: says what t.jsonl:1 says",
        "1 × rows without an answer to train on: left out",
        "a step of 128 rows has about",
        "t.jsonl:1, trained text in green",
    ):
        assert text in result.output
    found = [json.loads(line) for line in bad.read_text().splitlines()]
    assert [(row["kind"], row["row"]) for row in found] == [
        ("duplicate", "t.jsonl:2"), ("no answer", "t.jsonl:4"), ("leak", "v.jsonl:1"), ("leak", "v.jsonl:2"),
    ]  # fmt: skip
    assert "<mark>2&lt;|im_end|&gt;" in page.read_text()


@pytest.mark.parametrize(
    ("truncation", "code", "message"),
    [
        ("error", 1, "1 × conversations over data.max_length: a run would not start"),
        ("drop", 0, "left out (data.truncation=drop)"),
        ("right", 0, "of which the end is cut off"),
    ],
)
def test_rows_that_are_too_long_are_named_by_what_a_run_does(
    tmp_path: Path, truncation: str, code: int, message: str
) -> None:
    rows = [talk("1 + 1?", "2"), talk("3 + 3?", "6 " * 300)]
    result = data(tmp_path, "check", rows, f"data.truncation={truncation}")
    assert result.exit_code == code, result.output
    assert message in result.output
    assert "t.jsonl:2: 6" in result.output  # its tokens


def test_more_than_five_percent_of_bad_rows_is_an_error(tmp_path: Path) -> None:
    result = data(tmp_path, "check", [talk("1 + 1?", "2"), {"messages": []}])
    assert result.exit_code == 1
    assert "1 of 2 rows cannot be used, which is more than 5%" in result.output


def test_a_row_is_shown_with_what_is_trained(tmp_path: Path) -> None:
    rows = [talk("1 + 1?", "2"), {"messages": []}]
    result = data(tmp_path, "show", rows, "--row", "1")
    assert "[[2<|im_end|>" in result.output
    assert "are trained" in result.output
    assert "cannot be used: t.jsonl:2: " in data(tmp_path, "show", rows, "--row", "2").output
