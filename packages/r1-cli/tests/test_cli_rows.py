"""What the run folder says of the rows: those left out, and a resume with others than the run was begun with."""

import json
import logging
from pathlib import Path

import pytest

from r1_cli.jobs.resume import record_rows
from r1_cli.models.load import load_tokenizer
from r1_data.dataset import PromptDataset
from r1_data.messages import RowReader
from r1_data.render import Renderer
from r1_data.sources import read_rows

MODEL = Path(__file__).resolve().parents[3] / "examples/quickstart/model"


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(load_tokenizer(str(MODEL), vision_language=False)[0])


def read(renderer: Renderer, folder: Path, *answers: str) -> PromptDataset:
    """Rows of these answers; one without an answer lacks its question, too, and is left out."""
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"problem": answer and "1 + 1?", "answer": answer or "2"}) + "\n" for answer in answers)
    )
    reader = RowReader(source="rows.jsonl")
    return PromptDataset(read_rows(str(path)), renderer, max_prompt_length=100, reader=reader, bad_rows="skip")


def test_every_row_that_is_left_out_stands_in_the_run_folder_with_its_reason(
    renderer: Renderer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record_rows(tmp_path / "run", [("train", read(renderer, tmp_path, "2", ""))], resumed=False)
    assert f"1 row is left out, with the reason in {tmp_path}/run/left_out_rows.txt" in caplog.text
    rows = read(renderer, tmp_path, "2", "", "2", "")
    record_rows(tmp_path / "run", [("train", rows)], resumed=False)
    assert "2 rows are left out, with" in caplog.text
    lines = (tmp_path / "run" / "left_out_rows.txt").read_text().splitlines()
    assert [line.split(": ")[:2] for line in lines] == [["train", "rows.jsonl:2"], ["train", "rows.jsonl:4"]]
    assert all("problem" in line or "prompt" in line for line in lines)


@pytest.mark.parametrize(("later", "warned"), [(("2", "3"), False), (("2", "4"), True), (("2", "3", "4"), True)])
def test_a_resume_with_other_rows_is_warned_of(
    renderer: Renderer, tmp_path: Path, caplog: pytest.LogCaptureFixture, later: tuple[str, ...], warned: bool
) -> None:
    record_rows(tmp_path / "run", [("train", read(renderer, tmp_path, "2", "3"))], resumed=False)
    with caplog.at_level(logging.WARNING, logger="r1"):
        record_rows(tmp_path / "run", [("train", read(renderer, tmp_path, *later))], resumed=True)
    assert ("the rows of train have changed" in caplog.text) is warned
