"""Reports: one file of HTML that needs nothing else, says what the run says, and takes no text for markup."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from cli_pages import HOSTILE, PICTURE, write_episodes, write_run, write_samples
from click.testing import CliRunner

from r1_cli.main import main
from r1_cli.runs.reader import RunReader
from r1_cli.runs.report.chart import MOST_POINTS, draw, thin
from r1_cli.runs.report.page import choose, pictures_of, write_report
from r1_cli.runs.report.validation import interval, measure

VOID = {"meta", "img", "br", "polyline", "path", "circle", "line"}


class Page(HTMLParser):
    """What a page consists of: its tags, addresses and text; raises where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def test_a_report_holds_the_run_and_needs_nothing_else(tmp_path: Path) -> None:
    run = write_run(tmp_path / HOSTILE.replace("/", ""), steps=12)
    write_samples(run, 12, groups=40, each=1, phase="validation")
    page = Page(write_report(run))
    assert not {"script", "link", "iframe", "object"} & {*page.tags}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    addresses = [value or "" for name, value in page.attributes if name in ("src", "href", "action", "srcset")]
    assert addresses
    assert all(address.startswith("data:image/png;base64,") for address in addresses)
    assert HOSTILE in page.text  # as text
    assert "12 steps" in page.text
    assert "reward 0 to 0.9167" in page.text
    assert "worst" in page.text
    assert "timeout: 3 s" in page.text


def test_an_episode_is_shown_turn_by_turn(tmp_path: Path) -> None:
    text = write_report(write_episodes(tmp_path / "run"))
    page = Page(text)
    assert HOSTILE in page.text  # as text
    told = page.text[page.text.index("I look.") :]
    assert "[reward 0.5]" in told
    failed = '[look {"x0": 0.5}: 0.25 s, failed (exception): no such part]'
    assert f'[look {{"x0": 0.5}}: 0.25 s]\n{failed}\nHere it is:\n[picture]' in told
    assert told.index("[picture]") < told.index("It is 4.") < told.index("nobody reads this")
    assert "stopped: done" in told
    assert text.count("<pre class=answer>") == text.count("It is 4.") * 2


def test_a_run_that_has_only_a_log_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "experiment_log.jsonl").write_text(json.dumps({"step": 1, "reward/overall": 0.5}) + "\n")
    page = Page(write_report(tmp_path))
    assert "1 steps" in page.text
    assert "Faults survived" in page.text
    assert "img" not in page.tags


def test_faults_are_listed(tmp_path: Path) -> None:
    rows = [
        {"step": s, "reward/failures": 2.0, "reward/failures/timeout": 2.0, "actor/skipped_steps": 1.0} for s in (1, 2)
    ]
    (tmp_path / "experiment_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    host = {"system": "Linux", "processors": 2, "devices": ["cpu"]}
    start = {"began": "a", "ended": None, "command": "r1", "packages": {}, "seeds": {}, "rows": {}, "host": host}
    starts = [start | {"from_step": 0, "end": "is running, or was killed"}, start | {"from_step": 1, "end": "complete"}]
    (tmp_path / "manifest.json").write_text(json.dumps({"starts": starts}))
    text = Page(write_report(tmp_path)).text
    for words in ("start 1, from step 0", "was killed", "reward/failures/timeout", "4 answers", "1 optimizer steps"):
        assert words in text


def test_pictures_that_are_gone_too_large_or_elsewhere_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=1)
    (run / "media" / PICTURE).write_bytes(b"x" * 400_001)
    assert "img" not in Page(write_report(run)).tags
    (run / "media" / PICTURE).unlink()
    assert "img" not in Page(write_report(run)).tags


def test_answers_that_cannot_be_read_are_those_of_the_step_before(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=2)
    write_samples(run, 1, phase="validation")
    for name in ("000000002-train", "000000002-validation"):
        (run / "samples" / f"{name}.parquet").write_bytes(b"PAR1 torn")
    text = Page(write_report(run)).text
    assert "Answers of step 1" in text
    assert [one.step for one in measure(RunReader(run))] == [1]


def test_an_answer_with_a_million_pictures_shows_six(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=1)
    assert len(pictures_of(RunReader(run), {"media": [PICTURE] * 10**6})) == 6
    assert pictures_of(RunReader(run), {"media": None}) == []


def test_typical_is_the_median_however_many_answers_there_are(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, groups=5_000, each=5)
    _, chosen = choose(RunReader(tmp_path))
    assert {row["score"] for row in chosen["typical"]} == {2.0}
    assert {row["score"] for row in chosen["best"]} == {4.0}


def test_nothing_on_the_page_may_load_or_run_even_if_it_got_past(tmp_path: Path) -> None:
    page = Page(write_report(write_run(tmp_path, steps=1)))
    (policy,) = (value for name, value in page.attributes if name == "content" and "default-src" in (value or ""))
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


@pytest.mark.parametrize(
    ("scores", "low", "high"),
    [
        ([1.0] * 8 + [0.0] * 2, 0.4902, 0.9433),  # Wilson's interval of 8 in 10
        ([1.0] * 10, 0.7225, 1.0),
        ([0.0], 0.0, 0.7935),
        ([0.2, 0.4, 0.6], 0.1737, 0.6263),  # 0.4 ± 1.96 · 0.2 / √3
    ],
)
def test_intervals_are_those_of_the_books(scores: list[float], low: float, high: float) -> None:
    found = interval(3, scores)
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_one_row_of_another_score_says_that_nothing_is_known() -> None:
    assert interval(1, [0.5]).high == math.inf


def test_validation_is_by_rows_and_leaves_out_what_is_no_number(tmp_path: Path) -> None:
    write_samples(tmp_path, 4, groups=3, each=2, phase="validation")
    (found,) = measure(RunReader(tmp_path))
    assert (found.step, found.rows, found.value) == (4, 3, 1.0)  # `accuracy` is 1 in all
    assert measure(RunReader(tmp_path / "nothing")) == []


@pytest.mark.parametrize(
    "values", [[], [math.nan], [1.0], [2.0, 2.0], [math.inf, 1.0], [1e308, -1e308], [*map(float, range(100_000))]]
)
def test_any_points_can_be_drawn(values: list[float]) -> None:
    figure = draw("<b>", [*enumerate(values)], [(0, -math.inf, math.inf)])
    assert "<b>" not in figure.replace("<b>" + figure.rpartition("<b>")[2], "")
    assert "nan" not in figure
    assert "inf" not in figure
    assert figure == "" or Page(figure).tags[0] == "figure"
    assert len(thin([*enumerate(values)])) <= MOST_POINTS


def test_the_command_writes_beside_the_run_or_where_it_is_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3)
    told = CliRunner().invoke(main, ["report", str(run)])
    assert told.exit_code == 0, told.output
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    told = CliRunner().invoke(main, ["report", str(run), "--output", str(tmp_path / "here.html")])
    assert str(tmp_path / "here.html") in told.output
    full: Any = CliRunner().invoke(main, ["report", str(run), "--output", "/dev/full"])
    assert full.exit_code == 2
    assert "/dev/full cannot be written: No space left on device; name another place" in full.output
    wrong: Any = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert wrong.exit_code == 2
    assert "is no run" in wrong.output
