"""Tests of row formats: a tiny real file of each, found by itself and read to the same question."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from r1_data.formats import NAMES, Columns, detect
from r1_data.messages import to_example
from r1_data.sources import read_rows
from r1_data.types import DataError

QUESTION, TURN = "How many?", [{"role": "user", "content": "How many?"}]
SYSTEM = {"role": "system", "content": "Think."}
LMM_R1 = [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": QUESTION}]}]
VERL = {
    "data_source": "shapes", "prompt": TURN, "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "3"}, "extra_info": {"index": 7, "split": "train"},
}  # fmt: skip

ROWS = {
    "easyr1": {"problem": f"<image>{QUESTION}", "answer": "3", "images": ["a.png"]},
    "messages": {"messages": TURN, "answer": "3"},
    "lmm_r1": {"message": json.dumps(LMM_R1), "answer": "3", "datasource": "shapes"},
    "verl": VERL,
    "rlpr": {**VERL, "prompt": [SYSTEM, *TURN], "scoreA": 0.25},
    "trl": {"prompt": TURN, "solution": "3", "difficulty": 2},
    "r1v": {"image": {"bytes": b"png", "path": None}, "problem": QUESTION, "solution": "3"},
    "gsm8k": {"question": QUESTION, "answer": "3"},
}


def read(path, row):
    """Write the row to the file and read it back."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps(row) + "\n")
    [(row_id, read_back)] = read_rows(str(path))
    found = detect(read_back, Columns())
    return found, to_example(row_id, read_back, found.columns, source="here")


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in NAMES for kind in ("parquet", "jsonl") if (name, kind) != ("r1v", "jsonl")],
)
def test_each_format_is_found_and_asks_the_same(tmp_path, name, kind):
    found, example = read(tmp_path / f"train.{kind}", ROWS[name])
    assert found.format == name
    text = example.messages[-1]["content"]
    if isinstance(text, list):
        assert text[0] == {"type": "image"}
        text = text[1]["text"]
    assert (text, example.ground_truth) == (QUESTION, "3")
    assert len(example.media) == (name in ("easyr1", "lmm_r1", "r1v"))
    assert [m["role"] for m in example.messages] == (["system", "user"] if name == "rlpr" else ["user"])


@pytest.mark.parametrize(("name", "source"), [("verl", "shapes"), ("lmm_r1", "shapes"), ("gsm8k", "here")])
def test_a_row_keeps_its_own_data_source_and_else_gets_its_sources_name(tmp_path, name, source):
    _, example = read(tmp_path / "train.jsonl", ROWS[name])
    assert (example.metadata["data_source"], example.source) == (source, "here")


def test_what_is_not_read_stays_with_the_row(tmp_path):
    _, example = read(tmp_path / "train.parquet", ROWS["rlpr"])
    assert example.metadata["extra_info"] == {"index": 7, "split": "train"}
    assert (example.metadata["scoreA"], example.metadata["reward_model"]["style"]) == (0.25, "rule")


def test_columns_that_follow_no_format_are_named_so():
    assert detect(["ask", "reply"], Columns("ask", "reply"), explicit=True).format == ""


def test_an_explicit_format_overrides_what_would_be_found():
    keys = ["prompt", "answer", "problem", "solution"]
    assert detect(keys, Columns()).format == "trl"
    found = detect(keys, Columns("prompt", "answer"), explicit=True, row_format="r1v")
    assert (found.format, found.columns.prompt, found.columns.ground_truth) == ("r1v", "problem", "solution")


@pytest.mark.parametrize(
    ("row_format", "message"),
    [
        ("gsm8k", r"not of row format gsm8k \(prompt in question, answer in answer\); columns found: prompt, text"),
        ("veRL", "there is no row format 'veRL'; there are rlpr, verl"),
    ],
)
def test_an_explicit_format_that_does_not_fit_is_refused(row_format, message):
    with pytest.raises(DataError, match=message):
        detect(["prompt", "text"], Columns(), row_format=row_format)


def test_named_columns_still_find_verls_answer():
    """As EasyR1's RLPR fork reads them: `answer_key` names a column that is not there."""
    found = detect(VERL, Columns("prompt", "answer"), explicit=True)
    assert (found.format, found.columns.ground_truth) == ("verl", "reward_model.ground_truth")


def test_an_answer_may_be_an_entry_of_a_mapping():
    row = {**VERL, "extra_info": {"answer": "three"}}
    found = detect(row, Columns("prompt", "extra_info.answer"), explicit=True)
    assert to_example("t:1", row, found.columns).ground_truth == "three"


@pytest.mark.parametrize(
    ("reward_model", "message"),
    [({}, "no answer column"), ({"ground_truth": None}, "is empty"), ("3", "no answer column")],
)
def test_a_verl_row_without_an_answer_is_named(reward_model, message):
    row = {**VERL, "reward_model": reward_model}
    with pytest.raises(DataError, match=rf"^t:1: .*{message}"):
        to_example("t:1", row, detect(row, Columns()).columns)


@pytest.mark.parametrize("prompt", ["[{'role': 'user', 'content': 'Hi'}]", '[{"role": "user", "content": "Hi"},]'])
def test_messages_that_are_almost_json_are_refused_not_asked(prompt):
    with pytest.raises(DataError, match=r"^t:1: the prompt looks like a list of messages but is no JSON"):
        to_example("t:1", {"prompt": prompt, "answer": "1"}, Columns())


@pytest.mark.parametrize("prompt", ["[1, 2, 3] is sorted?", '[{"a": 1}] has how many keys?', "[]"])
def test_text_that_begins_with_a_bracket_stays_text(prompt):
    assert to_example("t:1", {"prompt": prompt, "answer": "1"}, Columns()).messages[0]["content"] == prompt
