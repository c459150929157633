"""`r1 diff`: what two runs' folders say that is not the same, and where their curves part."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from rich.cells import cell_len

from r1_cli.main import main
from r1_cli.runs.diff import part
from r1_cli.runs.history import History

HEALTHY = Path(__file__).parent / "runs" / "healthy_01"
START: dict[str, Any] = {
    "config": {"data": {"seed": 1}, "worker": {"rollout": {"seed": 1}}},
    "rows": {"train": "aa"},
    "packages": {"torch": "2.7.0", "r1-core": "0.1.0"},
    "python": "3.11.7",
    "git": {"commit": "c1", "changed": False},
    "host": {"name": "one", "devices": ["cpu"]},
}


def run_with(folder: Path, start: dict[str, Any] | None = None, **settings: Any) -> Path:
    shutil.copytree(HEALTHY, folder)
    config = json.loads((folder / "experiment_config.json").read_text())
    (folder / "experiment_config.json").write_text(json.dumps(config | settings))
    if start:
        (folder / "manifest.json").write_text(json.dumps({"starts": [start]}))
    return folder


def diff(*words: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["diff", *map(str, words)])
    assert result.exit_code == code, result.output
    return result


def of(values: Any) -> History:
    rows = [{"step": step, "reward/overall": float(value)} for step, value in enumerate(values, start=1)]
    return History("made", "r1", rows)


def test_a_run_does_not_differ_from_itself(tmp_path: Path) -> None:
    run = run_with(tmp_path / "a", START)
    text = diff(run, run).output
    assert "settings, rows, code, packages and machine are the same" in text
    assert "numbers: identical in all 31 records" in text
    assert "parts at" not in text


def test_each_kind_of_change_is_told_with_both_values(tmp_path: Path) -> None:
    second = START | {
        "rows": {"train": "bb"},
        "packages": {"torch": "2.8.0", "r1-core": "0.1.0"},
        "git": {"commit": "c2", "changed": True},
        "host": {"name": "two", "devices": ["cpu"]},
    }
    runs = run_with(tmp_path / "a", START, odd={"lr": 1e-6}), run_with(tmp_path / "b", second, odd={"lr": 2e-6, "x": 1})
    found = json.loads(diff(*runs, "--json").output)
    told = {(kind, one["name"], one["first"], one["second"]) for kind, all in found["changes"].items() for one in all}
    assert told == {
        ("settings", "odd.lr", 1e-6, 2e-6), ("settings", "odd.x", None, 1), ("rows", "train", "aa", "bb"),
        ("code", "commit", "c1", "c2"), ("code", "changed", False, True), ("packages", "torch", "2.7.0", "2.8.0"),
        ("machine", "name", "one", "two"),
    }  # fmt: skip
    text = diff(*runs).output
    assert "odd.lr" in text
    assert "not committed" in text


def test_the_first_step_that_is_not_identical_is_named_and_times_do_not_count(tmp_path: Path) -> None:
    runs = run_with(tmp_path / "a", START), run_with(tmp_path / "b", START)
    lines = [json.loads(line) for line in (runs[1] / "experiment_log.jsonl").read_text().splitlines()]
    for row in lines[3:]:
        row["timing_s/step"] = 77.0
    lines[12]["reward/overall"] += 1e-12
    lines[13]["actor/entropy_loss"] = float("nan")
    (runs[1] / "experiment_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines) + '{"step": 3')
    found = json.loads(diff(*runs, "--json").output)
    assert found["unequal"] == [lines[12]["step"], ["reward/overall"]]
    assert found["same_seeds"] is True
    assert "the same seeds" in diff(*runs).output


def test_curves_part_where_they_were_made_to_and_noise_is_no_parting() -> None:
    draw = np.random.default_rng(0)
    rise = np.linspace(0, 1, 100)
    one, other = (of(rise + draw.normal(0, 0.05, 100)) for _ in range(2))
    later = of(rise - 0.5 * (np.arange(100) >= 60) + draw.normal(0, 0.05, 100))
    same, parted = part("reward/overall", one, other), part("reward/overall", one, later)
    assert same is not None
    assert not same.parts
    assert parted is not None
    assert parted.parts
    assert 55 <= parted.begin <= 61


def test_of_forty_pairs_of_the_same_noise_at_most_one_is_said_to_part() -> None:
    draw = np.random.default_rng(1)
    pairs = [part("reward/overall", *(of(draw.normal(0, 1, 200)) for _ in range(2))) for _ in range(40)]
    assert sum(one is not None and one.parts for one in pairs) <= 1


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 1e308])
def test_odd_values_say_nothing_of_a_curve(odd: float) -> None:
    assert part("reward/overall", of([odd, -odd] * 20), of([0.5] * 40)) is None
    assert part("reward/overall", of([1]), of([1])) is None


def test_constants_that_are_not_equal_part_at_once() -> None:
    found = part("reward/overall", of([0.1] * 20), of([0.2] * 20))
    assert found is not None
    assert found.parts
    assert found.begin == 1


def test_every_line_fits_100_columns_and_controls_nothing(tmp_path: Path) -> None:
    odd = {"a" * 200: "\x1b[2J" + "漢" * 300, "list": list(range(400)), "many": {str(i): i for i in range(200)}}
    runs = run_with(tmp_path / "a", START), run_with(tmp_path / "b", None, **odd)
    for text in (diff(*runs).output, diff(*reversed(runs)).output):
        assert max(cell_len(line) for line in text.splitlines()) <= 100
        assert "\x1b" not in text
        assert "no manifest" in text


def test_a_run_before_its_first_step_and_one_of_another_trainer_are_compared(tmp_path: Path) -> None:
    early = tmp_path / "early"
    early.mkdir()
    (early / "manifest.json").write_text(json.dumps({"starts": [START]}))
    assert "no step that both have" in diff(HEALTHY, early).output
    log = tmp_path / "trainer_state.json"
    log.write_text(json.dumps({"log_history": [{"step": step, "reward": 9.0} for step in range(1, 31)]}))
    assert "parts at step 1 " in diff(HEALTHY, log).output


def test_what_is_no_run_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    assert "experiment_log.jsonl" in diff(HEALTHY, tmp_path, code=2).stderr
