"""What a check of the data gathers: counts, comparisons, lengths, and the tokens of a step."""

import json
import re
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from r1_cli.build.rows import OpenSource, open_sources
from r1_cli.config import ConfigError, load_config
from r1_cli.config.sources import training_sources, validation_sources
from r1_cli.plan.batches import count_steps
from r1_cli.plan.data_check.findings import Report
from r1_cli.plan.data_check.page import prompt_rows, write_page
from r1_data.check import Examined
from r1_data.formats import Columns, Detected
from r1_data.types import DataError
from r1_data.workers import WorkerDied

WORDS = [
    "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
    "data.train_files=[owner/a,owner/b]",
    "data.val_files=owner/c",
    "data.rollout_batch_size=4",
    "data.max_response_length=10",
    "worker.rollout.n=2",
]


def report_of(*words: str, strict: bool = False) -> Report:
    config, _ = load_config([*WORDS, *words], command="data")
    training = training_sources(config.data)
    opened = [
        OpenSource(source, ["row"], Detected(Columns(), "trl"))  # type: ignore[arg-type]
        for source in [*training, *validation_sources(config.data)]
    ]
    return Report(config, opened, len(training), strict=strict)


def row(source: int, number: int, tokens: int = 8, asks: str = "", answer: str = "1") -> Examined:
    return Examined(source, number, f"s{source}:{number}", tokens, 0, answer, (asks or f"{source}:{number}").encode())


def told(report: Report) -> dict[str, tuple[str, int]]:
    return {finding.kind: (finding.level, finding.count) for finding in report.ordered()}


def test_rows_are_compared_within_their_set_and_with_training() -> None:
    report = report_of()
    asked = [(0, "x", "1"), (1, "x", "1"), (0, "x", "2"), (0, "y", "1"), (2, "x", "1"), (2, "z", "1")]
    for number, (source, asks, answer) in enumerate(asked):
        report.add_row(row(source, number, asks=asks, answer=answer))
    assert told(report) == {"duplicate": ("warning", 1), "contradiction": ("warning", 1), "leak": ("warning", 1)}
    assert not report.failed
    assert report.findings["leak"].examples[0][0] == "s2:4: is training row s0:0"


@pytest.mark.parametrize(("filtered", "level"), [("true", "warning"), ("false", "error")])
def test_a_prompt_over_the_limit_is_an_error_unless_it_is_filtered(filtered: str, level: str) -> None:
    report = report_of(f"data.filter_overlong_prompts={filtered}")
    report.add_row(Examined(0, 0, "s0:0", 9000, kind="overlong", reason="s0:0: the prompt has 9000 tokens"))
    assert told(report) == {"overlong": (level, 1)}
    assert (report.failed, report.sources[0].usable) == (level == "error", 0)


@pytest.mark.parametrize(
    ("bad_rows", "levels"),
    [
        ("refuse", {"media": "error", "damage": "error", "crash": "error", "missing column": "error"}),
        ("skip_media", {"media": "warning", "damage": "warning", "crash": "warning", "missing column": "error"}),
        ("skip", {"media": "warning", "damage": "warning", "crash": "warning", "missing column": "warning"}),
    ],
)
def test_rows_that_a_run_would_leave_out_are_warnings_unless_strict(bad_rows: str, levels: dict[str, str]) -> None:
    for strict in (False, True):
        report = report_of(f"data.bad_rows={bad_rows}", strict=strict)
        for number, kind in enumerate([*levels, "markup"]):
            report.add_row(Examined(0, number, f"s0:{number}", kind=kind, reason="why"))
        found = {kind: level for kind, (level, _) in told(report).items()}
        assert found == {"markup": "warning", **(dict.fromkeys(levels, "error") if strict else levels)}
        refused = {kind for kind, finding in report.findings.items() if finding.consequence == "a run would not start"}
        assert refused == {
            "refuse": {"media", "crash", "missing column"}, "skip_media": {"missing column"}, "skip": set(),
        }[bad_rows]  # fmt: skip
        assert report.sources[0].left_out == len(levels) - len(refused)


def test_a_source_of_which_no_row_would_be_left_is_an_error() -> None:
    report = report_of()
    report.add_row(row(1, 0))
    report.add_row(row(2, 0))
    assert not report.failed
    report.add_row(Examined(0, 0, "s0:0", kind="media", reason="s0:0: no such file"))
    report.close()
    assert told(report)["no rows"] == ("error", 1)
    assert report.findings["no rows"].examples[0][0].endswith("every row of it would be left out")


def test_usable_rows_too_few_for_one_batch_are_the_error_that_they_are_in_a_run() -> None:
    report = report_of("data.train_files=owner/a")
    for number in range(3):
        report.add_row(row(0, number))
    report.add_row(row(1, 0))  # of validation
    report.add_row(Examined(0, 9, "s0:9", 9000, kind="overlong", reason="s0:9: too long"))
    report.close(whole=False)  # rows that stand for many more
    assert "batch" not in report.findings
    report.close()
    assert told(report)["batch"] == ("error", 1)
    with pytest.raises(ConfigError) as caught:
        count_steps(report.config, [3])
    assert report.findings["batch"].examples[0][0] == str(caught.value.problems[0])
    enough = report_of("data.train_files=owner/a")
    for number in range(4):
        enough.add_row(row(0, number))
    enough.close()
    assert "batch" not in enough.findings


def test_errors_come_first_and_only_some_rows_are_named() -> None:
    report = report_of()
    for number in range(9):
        report.add_row(row(0, number, asks="same"))
    report.add_row(Examined(0, 9, "s0:9", kind="empty", reason="s0:9: the answer is empty"))
    first, second = report.ordered()
    assert (first.kind, second.kind, second.count, len(second.examples)) == ("empty", "duplicate", 8, 3)
    assert report.failed


def test_the_histogram_counts_every_training_row_once() -> None:
    report = report_of()
    for number, tokens in enumerate([5, 6, 40, 40, 99]):
        report.add_row(row(number % 2, number, tokens))
    report.add_row(row(2, 9, 500))
    bins = report.histogram()
    assert sum(rows for _, _, rows in bins) == 5
    assert (bins[0][0], bins[-1][1] > 99) == (5, True)
    assert [low for low, _, _ in bins[1:]] == [high for _, high, _ in bins[:-1]]
    assert report_of().histogram() == []


def test_a_steps_tokens_follow_the_weights_and_count_no_row_that_is_left_out() -> None:
    for words, mean in ([], 50 / 3), (["data.train_probs=[0.25,0.75]"], 25):
        report = report_of(*words)
        report.add_row(Examined(0, 7, "s0:7", 9000, kind="overlong", reason="too long"))
        for number, source in enumerate([0, 0, 1]):
            report.add_row(row(source, number, 10 if source == 0 else 30))
        prompts, answers = report.tokens_per_step() or (0, 0)
        assert prompts == pytest.approx(4 * 2 * mean, abs=1)
        assert answers == 4 * 2 * 10


class Dying:
    """Workers of which every one dies."""

    def submit(self, *_: Any, **__: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(WorkerDied("it took longer than 120 seconds"))
        return future


def test_media_that_break_a_worker_are_no_danger_to_the_page() -> None:
    report = report_of()
    for tally in report.sources:
        tally.opened.rows[:] = [("<s>:1", {"prompt": "<image>?", "answer": "1", "images": [b"picture"]})]  # type: ignore[index]
    report.add_row(Examined(0, 0, "<s>:1", media=1, kind="crash", reason="<s>:1: it took longer than 120 seconds"))
    page = write_page(report, prompt_rows(SimpleNamespace(render=print), Dying()))  # type: ignore[arg-type]
    assert page.count("<pre>it took longer than 120 seconds</pre>") == 4  # in the finding, and as a row of each source
    assert "rows on which a worker process died: left out (data.bad_rows=skip_media)" in page
    assert "<s>" not in page


@pytest.mark.parametrize(
    ("row", "words", "message"),
    [
        (
            {"question": "?", "answer": "1"},
            ("data.prompt_key=questions",),
            "prompt_key=questions (did you mean 'question'?)",
        ),
        ({"prompt": "?", "answer": "1"}, ("data.answer_key=answers",), "answer_key=answers (did you mean 'answer'?)"),
        ({"prompt": "<image>?", "answer": "1", "pictures": ["a.png"]}, (), "most prompts hold <image>, but no row has"),
        ({"prompt": "?", "key": "1"}, (), "none of the first 3 rows has the column data.answer_key=answer"),
    ],
)
def test_keys_that_no_row_has_are_refused_from_the_first_rows(tmp_path, row, words, message):  # type: ignore[no-untyped-def]
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    config = load_config([*WORDS, f"data.train_files={tmp_path / 'train.jsonl'}", *words], command="data")[0]
    with pytest.raises(DataError, match=re.escape(message)):
        open_sources(training_sources(config.data))


@pytest.mark.parametrize("named", ["ok.png", "pictures/ok.png"])
def test_pictures_that_lie_where_their_rows_are_lead_to_the_folder_to_set(tmp_path: Path, named: str) -> None:
    rows, wrong = tmp_path / "data" / "rows" / "train.jsonl", tmp_path / "wrong"
    rows.parent.mkdir(parents=True)
    wrong.mkdir()
    rows.write_text(f"{json.dumps({'problem': '<image>?', 'answer': '1', 'images': [named]})}\n" * 3)
    words = [*WORDS, f"data.train_files={rows}", "data.val_files=null"]

    def sources(*more: str) -> list[OpenSource]:
        return open_sources(training_sources(load_config([*words, *more], command="data")[0].data))

    sources()  # no such picture anywhere: its row is named when all are checked
    folder = rows.parent if "/" not in named else rows.parent.parent  # as data sets are laid out
    (folder / named).parent.mkdir(exist_ok=True)
    (folder / named).touch()
    for more in ((), (f"data.image_dir={wrong}",)):
        with pytest.raises(DataError, match=re.escape(f"there is {folder / named}: set data.image_dir={folder}")):
            sources(*more)
    assert sources(f"data.image_dir={folder}")
