"""What `r1 view` shows first of a run: its state, how far it is, what it gained, and what differs between runs."""

import json
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import pytest
from cli_pages import write_log, write_samples
from cli_processes import write

from r1_cli.runs.diff import differing
from r1_cli.runs.processes import Process
from r1_cli.runs.reader import RunReader
from r1_cli.runs.view.app import METRICS
from r1_cli.runs.view.overview import Overview, differences, gain, process_table, status

RUNS = Path(__file__).parent / "runs"
ROOT = Path(__file__).resolve().parents[3]
GONE = 2**22 + 1  # above the largest process id of Linux


def write_start(run: Path, **values: Any) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    start = {"began": "2026-01-01T00:00:00+00:00", "ended": None, "end": "is running, or was killed", "from_step": 0}
    (run / "manifest.json").write_text(json.dumps({"starts": [start | values]}))
    return run


def test_a_run_waits_lives_ends_dies_or_is_silent(tmp_path: Path) -> None:
    def state(run: Path) -> tuple[str, str]:
        found = status(RunReader(run), [100.0])
        return found["state"], found["told"]

    assert state(tmp_path / "none") == ("waiting", "this folder does not exist yet")
    assert state(tmp_path) == ("waiting", "nothing is written there yet")
    here = {"name": platform.node()}
    assert state(write_start(tmp_path / "a", host=here, process=os.getpid())) == ("live", "")
    died, told = state(write_start(tmp_path / "b", host=here, process=GONE))
    assert (died, "killed" in told) == ("stopped", True)
    assert state(write_start(tmp_path / "c", host={"name": "another"}, process=GONE)) == ("live", "")
    assert state(write_start(tmp_path / "d", ended="x", end="complete", process=GONE)) == ("finished", "")
    assert state(write_start(tmp_path / "e", ended="x", end="OSError: full")) == ("stopped", "OSError: full")
    os.utime(tmp_path / "c/manifest.json", (0, 0))
    assert state(tmp_path / "c")[0] == "silent"


def test_the_time_that_is_left_counts_the_recent_steps_and_the_planned_ones(tmp_path: Path) -> None:
    write_start(tmp_path, plan={"steps": 50, "rows": {"a/b.parquet": 7}}, rows={"a/b.parquet": "digest"})
    rows = [{"step": s, "timing_s/step": 1.0 + s, "timing_s/validation": 2.0 * (s == 20)} for s in range(1, 21)]
    (tmp_path / "experiment_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen = Overview(RunReader(tmp_path)).read()
    assert (seen["step"], seen["total"]) == (20, 50)
    assert seen["left"] == pytest.approx(30 * (sum(range(12, 22)) + 2) / 10)
    assert seen["rows"] == [{"name": "b.parquet", "count": 7}]


def test_before_its_first_step_a_run_has_settings_and_no_gain(tmp_path: Path) -> None:
    write_start(
        tmp_path, config={"worker": {"actor": {"model": {"model_path": "org/tiny"}}}, "trainer": {"max_steps": 9}}
    )
    seen = Overview(RunReader(tmp_path)).read()
    assert (seen["step"], seen["total"], seen["records"], seen["gains"], seen["model"]) == (0, 9, 0, [], "tiny")


@pytest.mark.parametrize(("task_reward", "algorithm"), [(False, "distillation"), (True, "grpo")])
def test_a_run_with_a_teacher_distils_unless_the_task_is_rewarded(
    tmp_path: Path, task_reward: bool, algorithm: str
) -> None:
    algorithms = {"adv_estimator": "grpo", "distillation": {"task_reward": task_reward}}
    teacher = {"model": {"model_path": None}, "urls": "http://a:8000/v1"}
    write_start(tmp_path, config={"algorithm": algorithms, "worker": {"teacher": teacher}})
    assert Overview(RunReader(tmp_path)).read()["algorithm"] == algorithm


def test_the_summary_has_gains_and_what_r1_diagnose_says() -> None:
    run = RunReader(RUNS / "rate_too_high")
    seen = Overview(run).read()
    assert any("updates are too large" in one["what"] for one in seen["findings"])
    [reward] = [one for one in seen["gains"] if one["metric"] == "reward/overall"]
    known = [value for _, value in run.history.series("reward/overall")]
    assert reward["first"]["value"] == pytest.approx(sum(known[:4]) / 4)  # the first eighth of 30 steps
    assert reward["now"]["value"] < reward["first"]["value"]
    assert len(reward["line"]) <= 60


def test_processes_have_their_newest_record_and_survived_faults_their_cause(tmp_path: Path) -> None:
    restart = {"cause": "learner-1 died", "step": 4, "steps_again": 2, "seconds_lost": 41.2}
    write_start(tmp_path, restart=restart)
    spent = {"a": 1.0, "b": 9.0, "c": 3.0, "d": 2.0}
    now = time.time()
    for pid, began in ((7, 100.0), (5, 200.0), (6, 300.0)):
        write(tmp_path, Process("engine-0", "node-3", "another boot", pid, 1, began, now - 4, seconds=spent, tokens=5))
    found = process_table(RunReader(tmp_path))
    [engine] = found["processes"]
    assert (engine["pid"], engine["restarts"], engine["tokens"], engine["state"]) == (6, 2, 5, "idle")
    assert engine["phases"] == [["b", 9.0], ["c", 3.0], ["d", 2.0]]
    assert 4 <= engine["heard"] < 60
    assert found["restarts"] == [("restart at step 4", "learner-1 died; 2 steps taken again, 41 s lost")]
    assert process_table(RunReader(RUNS / "rate_too_high")) == {"processes": [], "restarts": []}


def test_one_step_is_compared_with_nothing(tmp_path: Path) -> None:
    write_log(tmp_path, 1)
    found = gain(RunReader(tmp_path).history, "reward/overall", "reward", "up")
    assert found["first"] == found["now"] == {"value": 0.0, "from": 1, "to": 1}


def test_a_validation_has_its_interval_and_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"step": step, "val/reward_score": 1.0} for step in (2, 4)]
    (tmp_path / "experiment_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_samples(tmp_path, 2, phase="validation")
    overview = Overview(RunReader(tmp_path))
    [one] = overview.read()["gains"]
    assert one["now"]["low"] < one["now"]["value"] == 1.0 <= one["now"]["high"]
    monkeypatch.setattr(
        RunReader, "readable_samples", lambda *words: [] if words[2] == "train" else pytest.fail("again")
    )
    write_start(tmp_path)
    overview._until = 0.0
    assert overview.read()["began"]


def test_what_differs_between_three_runs_is_a_row_of_three_values(tmp_path: Path) -> None:
    runs = [
        write_start(tmp_path / str(lr), config={"lr": lr, "n": 8}, packages={"torch": "2"}, rows={"a": "x"})
        for lr in (1, 1, 3)
    ]
    found = differences([RunReader(run) for run in runs])
    assert found["settings"] == [{"name": "lr", "values": ["1", "1", "3"]}]
    assert found["rows"] == found["packages"] == []
    assert differing([{"a": 1}, {"a": 1, "b": 2}]) == {"b": [None, 2]}
    assert differences([RunReader(runs[0]), RunReader(tmp_path / "none")])["settings"][0]["values"] == ["1", "–"]


@pytest.mark.skipif(not (ROOT / "docs/metrics.md").is_file(), reason="the repository's docs are not here")
def test_each_metric_is_explained_by_the_most_exact_row_of_the_docs() -> None:
    known = json.loads(METRICS.read_text())

    def explained(name: str) -> dict[str, Any]:
        return next(one for one in known if re.search(one["pattern"], name))

    assert "could not be scored" in explained("reward/failures")["text"]
    assert "part of the reward" in explained("reward/accuracy")["text"]
    assert explained("val/reward_score")["section"] == "Validation"
    assert explained("sft/nll")["section"] == "Fine-tuning"
    assert not any("`" in one["text"] or "](" in one["text"] for one in known)
