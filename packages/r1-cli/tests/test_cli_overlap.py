"""`r1 data check --against` lists pairs of shared rows; a run warns of its own validation rows."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from r1_cli.build.rows import OpenSource, open_sources
from r1_cli.config.data import DataConfig
from r1_cli.config.problems import Provenance
from r1_cli.config.sources import training_sources
from r1_cli.jobs.data import warn_of_shared_rows
from r1_cli.main import main
from r1_cli.plan.data_check.overlap import find_shared_validation

QUESTION = "Rosa fills 4 baskets with plums in the old orchard and sells 3 of them at the fair before noon."
RENUMBERED = QUESTION.replace("4", "9").replace("3", "7")
OTHER = "A train with twenty wagons leaves the northern station late, so its passengers wait for a bus in the rain."
SUITE = """
title: Mine
page: none
rows: {{hub: someone/none, columns: [question, answer]}}
question: question
answer: {{column: answer}}
prompts:
  chat: {{text: "{{{{ content }}}} Think for a long while, then box the number that you have found.", source: none}}
grader: math
"""


def write(path: Path, questions: list[str], column: str = "question") -> str:
    path.write_text("".join(json.dumps({column: one, "answer": "1"}) + "\n" for one in questions))
    return str(path)


def check(*words: str) -> Result:
    return CliRunner().invoke(main, ["data", "check", *words])


def test_pairs_of_two_files_are_listed_with_both_texts(tmp_path: Path) -> None:
    training = write(tmp_path / "train.jsonl", [OTHER, RENUMBERED, QUESTION.upper()], "problem")
    against = write(tmp_path / "test.jsonl", ["What is <b>1</b>?", QUESTION])
    found = check(training, "--against", against, "--rows", f"{tmp_path}/pairs", "--html", f"{tmp_path}/page.html")
    assert found.exit_code == 0, found.output
    assert "test: 1 of 2 rows overlap with 3 training rows" in found.output
    assert QUESTION in found.output
    assert QUESTION.upper() in found.output
    (pair,) = map(json.loads, (tmp_path / "pairs").read_text().splitlines())
    assert pair == {
        "kind": "text",
        "share": 1.0,
        "set": "test",
        "row": "test.jsonl:2",
        "text": QUESTION,
        "training_row": "train.jsonl:3",
        "training_text": QUESTION.upper(),
        "training_rows": 2,
    }
    page = (tmp_path / "page.html").read_text()
    assert QUESTION in page
    assert QUESTION.upper() in page


def test_texts_on_the_page_are_escaped(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", ["<script>alert(1)</script>"])
    check(rows, "--against", rows, "--html", f"{tmp_path}/page.html")
    assert "<script>" not in (tmp_path / "page.html").read_text()


def test_strict_fails_if_rows_overlap(tmp_path: Path) -> None:
    rows, other = write(tmp_path / "rows.jsonl", [QUESTION]), write(tmp_path / "other.jsonl", [OTHER])
    same = write(tmp_path / "same.jsonl", [RENUMBERED])
    assert check(rows, "--against", other, "--strict").exit_code == 0
    assert check(rows, "--against", f"{other},{same}", "--strict").exit_code == 1


def test_a_configurations_own_validation_rows_are_compared_without_its_prompt(tmp_path: Path) -> None:
    template = tmp_path / "prompt.jinja"
    template.write_text("{{ content }} First think about the reasoning process, then give the answer in a box, please.")
    words = [f"data.train_files={write(tmp_path / 'train.jsonl', ['2 + 2?', '1 + 1?', RENUMBERED])}"]
    words += [f"data.val_files={write(tmp_path / 'val.jsonl', ['1 + 1?', '1 + 2?', QUESTION])}"]
    found = check(*words, f"data.format_prompt={template}", "--against", "val")
    assert "val: 2 of 3 rows overlap" in found.output
    assert "1 have the text of a training row" in found.output
    assert "1 differ from a training row in numbers and names only" in found.output
    assert "data.val_files" in check(words[0], "--against", "val").output


def test_a_suites_questions_are_compared(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(SUITE.format())
    write(tmp_path / "mine.jsonl", [OTHER, QUESTION])
    training = write(tmp_path / "train.jsonl", ["1 + 1?", QUESTION])
    words = [training, f"data.cache_dir={tmp_path}/cache", "--data-root", str(tmp_path)]
    found = check(*words, "--against", f"{tmp_path}/mine.yaml")
    assert "mine/chat: 1 of 2 rows overlap with 2 training rows" in found.output, found.output
    assert "no such suite" in check(*words, "--against", "nosuchsuite").output
    assert "has no prompt 'none'" in check(*words, "--against", "gsm8k/none").output


def test_fine_tuning_rows_are_compared_by_what_the_user_asks(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": OTHER}]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    against = write(tmp_path / "test.jsonl", [OTHER, QUESTION])
    assert "1 of 2 rows overlap" in check(f"{tmp_path}/talks.jsonl", "sft.loss=nll", "--against", against).output
    assert "1 of 1 rows overlap" in check(against, "--against", f"{tmp_path}/talks.jsonl").output


def open_rows(path: Path, questions: list[str]) -> list[OpenSource]:
    return open_sources(training_sources(DataConfig(train_files=write(path, questions))))


def test_a_run_warns_in_one_line_with_the_command_that_lists_the_pairs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = open_rows(tmp_path / "train.jsonl", [QUESTION, "1 + 1?", OTHER])
    shared, own = open_rows(tmp_path / "val.jsonl", ["1 + 1?", RENUMBERED]), open_rows(tmp_path / "own.jsonl", ["3?"])
    context: Any = SimpleNamespace(
        folder=SimpleNamespace(start=None), provenance=Provenance(Path("my run.yaml"), ("data.seed=3",))
    )

    def warn(validation: list[OpenSource]) -> list[str]:
        caplog.clear()
        split = SimpleNamespace(opened=training), SimpleNamespace(opened=validation)
        with caplog.at_level(logging.WARNING, "r1"):
            warn_of_shared_rows(context, SimpleNamespace(training=split[0], validation=split[1]))  # type: ignore[arg-type]
        return [record.getMessage() for record in caplog.records]

    (line,) = warn(shared)
    assert "2 validation rows are training rows, too, 1 of them with other numbers or names" in line
    assert "(2 of 2 compared with 3 of 3 training rows)" in line
    assert line.endswith("data check 'my run.yaml' data.seed=3 --against val")
    assert warn(own) == []
    context.folder.start = tmp_path  # a resumed run
    assert warn(shared) == []


def test_the_check_of_a_run_ends_in_time_and_says_how_much_it_read(tmp_path: Path) -> None:
    training = open_rows(tmp_path / "train.jsonl", [QUESTION] * 500)
    held_out = open_rows(tmp_path / "val.jsonl", [QUESTION] * 500)
    ticks = iter(range(10_000))
    _, line = find_shared_validation(training, held_out, seconds=200, clock=lambda: float(next(ticks)))
    assert "(99 of 500 compared with 99 of 500 training rows)" in line
    other, ticks = open_rows(tmp_path / "other.jsonl", [OTHER] * 500), iter(range(10_000))
    found = find_shared_validation(training, other, seconds=200, clock=lambda: float(next(ticks)))
    read = "99 of 500 compared with 99 of 500 training rows"
    assert found == (0, f"no validation row was found among the training rows ({read})")
