"""The terminal while a run goes on: what it shows, at every width, and that nothing in an answer can control it."""

import io
import logging
import math
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from r1_cli.runs.track import libraries
from r1_cli.runs.track.console import ConsoleReporter
from r1_cli.runs.track.timing import Stopwatch
from r1_cli.runs.track.types import Generation
from r1_cli.runs.track.view import LEAST_HEIGHT, View, clock, pick, plot, quantity, spread

RECORD = {
    "reward/overall": 0.53591, "reward/failures": 0.0, "response_length/mean": 10.42,
    "response_length/clip_ratio": 0.02, "perf/samples_per_second": 431.2,
    "perf/throughput": 15_617.0, "timing_s/step": 60.0, "timing_s/validation": 6.0,
}  # fmt: skip
ANSWER = Generation("train", "row:1", 0, "How many?", "There are 3", "3", 1.0, {}, "3", "", None, 1.0, 4, "stop", 1)


def drawn(view: View, width: int = 80, height: int = 40) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, height=height).print(view.draw(width, height))
    return out.getvalue().splitlines()


def view_after(steps: int = 3, **more: float) -> View:
    view = View("shapes", 0, 140)
    for step in range(1, steps + 1):
        answers = [replace(ANSWER, score=score) for score in (0.0, 1.0, 0.5, 0.25)]
        view.update(step, RECORD | {"reward/overall": step / steps} | more, answers)
    return view


def test_a_run_is_read_at_a_glance() -> None:
    view = view_after(**{"val/reward_score": 0.25})
    view.stage, view.within = "gen", "3/16"
    text = "\n".join(drawn(view, 100))
    for shown in (
        "shapes", "step 3/140", "sampling 3/16", "2:30:42 left", "reward 1.000", "431 samples/s",
        "15.6k tokens/s a device", "2% cut off", "reward 1.000, best 1.000 at step 3",
        "validation 0.250, best 0.250 at step 1",
        "1.00 There are 3",
    ):  # fmt: skip
        assert shown in text, shown
    assert "failed" not in text
    assert "16 failed" in "\n".join(drawn(view_after(**{"reward/failures": 16.0})))


@pytest.mark.parametrize("width", [20, 40, 80, 100, 250])
@pytest.mark.parametrize("height", [8, 24, 60])
def test_it_is_never_wider_than_the_terminal_nor_higher(width: int, height: int) -> None:
    view = view_after(30, **{"val/reward_score": 0.25})
    view.answers = [replace(ANSWER, response="漢字 " * 500), replace(ANSWER, response="x" * 10**6)]
    view.title = "a long name " * 20
    lines = drawn(view, width, height)
    assert max(map(cell_len, lines)) <= width
    assert len(lines) <= height or width < 80
    assert ("the last answers" in "\n".join(lines)) == (height >= LEAST_HEIGHT) or width == 20


def test_nothing_in_an_answer_or_a_name_controls_the_terminal() -> None:
    view = view_after()
    view.title = "[red]name[/red]"
    view.answers = [replace(ANSWER, response="\x1b[2J[bold]gone[/bold]\n\x07 \u202etxt")]
    text = "\n".join(drawn(view))
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "\\x1b[2J[bold]gone[/bold] \\x07 \\u202etxt" in text
    assert "[red]name[/red]" in text


def test_a_run_without_a_step_yet_and_odd_values_are_shown() -> None:
    assert "the first step is under way" in "\n".join(drawn(View("", 0, 0)))
    view = View("odd", 5, 10)
    view.update(6, {"reward/overall": math.nan, "perf/throughput": math.inf, "timing_s/step": math.nan}, [])
    view.update(7, {"reward/overall": 0.5}, [])
    text = "\n".join(drawn(view))
    assert "step 7/10" in text
    assert "best 0.500 at step 7" in text
    assert "? left" in text


def test_the_best_a_middling_and_the_worst_answer_are_picked() -> None:
    group = [replace(ANSWER, score=score, sample=place) for place, score in enumerate((0.2, 1.0, 0.0, 0.6, 0.4))]
    assert [one.score for one in pick([*group, replace(ANSWER, split="val", score=9.0)])] == [1.0, 0.4, 0.0]
    assert [one.score for one in pick([replace(ANSWER, split="val")])] == [1.0]
    assert pick([]) == []


def test_a_curve_shows_means_by_column_from_lowest_to_highest() -> None:
    rising = [(step, float(step)) for step in range(8)]
    assert plot(rising, 8, 1, 0, 8) == ["▁▁▂▃▅▆▇█"]
    assert plot(rising, 4, 2, 0, 8) == ["  ▃█", "▁▅██"]
    assert plot([(0, 2.0), (1, 2.0)], 2, 1, 0, 2) == ["▄▄"]
    assert plot([(0, 0.0), (3, 1.0)], 5, 1, 0, 5) == ["▁▁▁█ "]
    assert plot([], 3, 2, 0, 1) == ["   ", "   "]
    assert spread([(0, 1.0), (1, 3.0), (2, math.nan), (3, math.inf)], 2, 0, 4) == [2.0, None]
    million = plot([(step, step % 7) for step in range(10**5)], 60, 4, 0, 10**5)
    assert {len(line) for line in million} == {60}


def test_times_and_quantities_are_short() -> None:
    assert [clock(one) for one in (0, 59.6, 3723, 200_000, -1, math.nan)] == [
        "0:00:00", "0:01:00", "1:02:03", "2 d 7:33:20", "0:00:00", "?",
    ]  # fmt: skip
    assert [quantity(one) for one in (0.5312, 12.44, 430.2, 5100, 15_617, 2.34e6, math.nan)] == [
        "0.531", "12.4", "430", "5100", "15.6k", "2.34M", "nan",
    ]  # fmt: skip


def test_the_picture_follows_the_stages_of_a_step() -> None:
    out = io.StringIO()
    reporter = ConsoleReporter(Console(file=out, force_terminal=True, width=80, height=40), step_lines=True)
    told = []
    with reporter:
        reporter.begin(0, 4, "shapes")
        reporter.show([ANSWER])
        reporter.log(1, RECORD)
        view = reporter._view
        assert view is not None
        watch = Stopwatch(reporter.stage)
        for stage in ("gen", "reward", "old", "update_actor"):
            with watch(stage):
                told.append("\n".join(drawn(view)))
    words = ("sampling", "rewards", "old log-probs", "update")
    assert all(word in text for word, text in zip(words, told, strict=True))
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n").split("\n")
    assert max(map(cell_len, lines)) <= 80
    assert any("step 1/4  reward 0.536" in line for line in lines), "the step's line scrolls above"
    assert any("There are 3" in line for line in lines)


def test_a_stage_tells_how_far_it_is() -> None:
    reporter = ConsoleReporter(Console(file=io.StringIO(), force_terminal=True, width=80), step_lines=True)
    reporter.begin(0, 4)
    reporter.stage("validation")
    assert list(reporter.progress(range(3), "validation", 3)) == [0, 1, 2]
    assert reporter._view is not None
    assert reporter._view.within.endswith("/3")


def test_a_file_gets_lines_and_no_picture() -> None:
    out = io.StringIO()
    with ConsoleReporter(Console(file=out, width=100), step_lines=False) as reporter:
        reporter.begin(0, 4, "shapes")
        reporter.log(1, RECORD)
        list(reporter.progress(range(3), "validation", 3))
    assert out.getvalue() == "step 1/4  reward 0.536  length 10.4  seconds 60\n"


def test_what_libraries_say_is_kept_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run/logs/driver.log"
    own = logging.getLogger("my_rewards")
    with libraries.redirect_library_logs(file):
        assert not file.exists(), "there is nothing to say yet"
        warnings.warn("old way of doing it", stacklevel=1)
        logging.getLogger("transformers.generation").warning("ignored flags")
        own.handlers = [logging.StreamHandler(sys.stderr)]
        own.warning("of the user's own code")
    own.handlers = []
    kept = file.read_text()
    assert "old way of doing it" in kept
    assert "WARNING transformers.generation: ignored flags" in kept
    said = capsys.readouterr().err
    assert "own code" in said
    assert "ignored" not in said
    assert "old way" not in said
    assert logging.getLogger("transformers").propagate or logging.getLogger("transformers").handlers
