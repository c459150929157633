"""Replays: which checkpoint and which settings a step is taken again with, and how two records are compared."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from r1_cli.checkpoint.folders import STATE_FILE
from r1_cli.jobs.replay import NoReplayError, compare_step, compare_tables, plan_replay, read_metrics, show_group
from r1_cli.runs.reader import SAMPLES, sample_file
from r1_cli.runs.schema import SCHEMA

ROW: dict[str, Any] = {
    "step": 3, "phase": "train", "group": 0, "sample": 0, "prompt_id": "rows.parquet:0", "source": "shapes",
    "prompt": "How many?", "answer": "two\x1b[2J", "ground_truth": "3", "media": [], "prompt_tokens": [5, 6],
    "tokens": [1, 2], "rollout_logprobs": [-0.5, -1.0], "old_logprobs": [-0.5, -1.0], "entropies": [0.7, 0.0],
    "ref_logprobs": None,
    "advantages": [1.0, 1.0], "score": 0.5, "reward": 0.5, "parts": [("format", 1.0)], "extracted": None,
    "reason": "", "failure": None, "finish_reason": "stop", "weight_version": 2,
}  # fmt: skip


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist([ROW | {"sample": i} | row for i, row in enumerate(rows)], schema=SCHEMA)


def make_run(folder: Path, log: list[dict[str, Any]], checkpoints: dict[int, bool]) -> Path:
    """A run's files: its log, and checkpoints by step, of which some are of the model only."""
    config = {"trainer": {"record_gb": 0, "logger": ["wandb"], "max_steps": 9}, "data": {}, "worker": {}}
    folder.mkdir(exist_ok=True)
    (folder / "experiment_config.json").write_text(json.dumps(config))
    (folder / "experiment_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    for step, model_only in checkpoints.items():
        (folder / f"global_step_{step}").mkdir()
        (folder / f"global_step_{step}" / STATE_FILE).write_text(json.dumps({"model_only": model_only}))
    return folder


LOG = [{"step": step, "reward/overall": 0.5, "timing_s/step": 1.0} for step in range(1, 10)]


@pytest.mark.parametrize(("step", "start"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 4)])
def test_a_step_begins_at_the_last_whole_checkpoint_before_it(step: int, start: int, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", LOG, {4: False, 6: True})
    plan = plan_replay(run, step, tmp_path / "again")
    trainer = plan.config["trainer"]
    assert plan.start == start
    assert trainer["load_checkpoint_path"] == (str(run / f"global_step_{start}") if start else None)
    assert trainer["save_checkpoint_path"] == str(tmp_path / "again")
    assert (trainer["max_steps"], trainer["save_freq"], trainer["logger"], trainer["record_gb"]) == (9, -1, ["file"], 1)


def test_a_step_never_begins_at_a_damaged_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", LOG, {2: False, 4: False, 6: False})
    (run / "global_step_6" / STATE_FILE).write_text('{"model_only"')
    (run / "global_step_4/model.safetensors").write_bytes(b"")
    assert plan_replay(run, 8, tmp_path / "again").start == 2


def test_the_settings_are_those_of_the_start_that_took_the_step(tmp_path: Path) -> None:
    run = make_run(tmp_path, LOG, {})
    starts: list[dict[str, Any]] = [
        {"from_step": begin, "config": {"trainer": {"max_steps": most}}} for begin, most in ((0, 9), (4, 20), (4, 30))
    ]
    starts[0]["numerics"] = {"threads": 2}
    (run / "manifest.json").write_text(json.dumps({"starts": starts}))
    assert [plan_replay(run, step, tmp_path / "again").threads for step in (4, 5)] == [2, None]
    found = [plan_replay(run, step, tmp_path / "again").config["trainer"]["max_steps"] for step in (1, 4, 5, 9)]
    assert found == [9, 9, 30, 30]


def test_steps_that_the_run_has_not_taken_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NoReplayError, match="it has taken 9 steps"):
        plan_replay(make_run(tmp_path, LOG, {}), 10, tmp_path / "again")
    with pytest.raises(NoReplayError, match=r"neither manifest\.json nor"):
        plan_replay(tmp_path / "again", 1, tmp_path / "other")


def test_the_first_difference_is_named_in_the_order_of_a_step() -> None:
    then = table({}, {})
    assert compare_tables(then, then) == []
    now = table({}, {"tokens": [1, 3], "advantages": [1.0, 2.0], "rollout_logprobs": [-0.5, -1.0000001]})
    assert compare_tables(then, now) == [
        "tokens of group 0, answer 1", "rollout_logprobs of group 0, answer 1", "advantages of group 0, answer 1",
    ]  # fmt: skip
    assert compare_tables(then, table({})) == ["1 answers, there were 2"]


def test_nan_is_nan_and_null_is_null() -> None:
    odd = table({"rollout_logprobs": [math.nan, -math.inf], "score": math.nan, "old_logprobs": None})
    assert compare_tables(odd, odd) == []
    assert compare_tables(odd, table({"rollout_logprobs": [0.0, -math.inf], "score": math.nan})) == [
        "rollout_logprobs of group 0, answer 0", "old_logprobs of group 0, answer 0",
    ]  # fmt: skip


def test_what_depends_on_the_order_of_requests_is_compared_only_where_they_come_as_then(tmp_path: Path) -> None:
    run, again = (
        make_run(tmp_path / name, [{"step": 3, "a": 1.0, "gen/prefilled_per_token": value}], {})
        for name, value in (("run", 0.5), ("again", 0.6))
    )
    assert compare_step(run, again, 3).differences == ["gen/prefilled_per_token is 0.6, was 0.5"]
    assert compare_step(run, again, 3, 1e-3).same


def test_metrics_are_compared_but_for_the_clock_and_validation(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [{"step": 3, "a": 1.0, "timing_s/step": 2.0, "val/reward_score": 1.0}], {})
    again = make_run(tmp_path / "again", [{"step": 3, "a": 1.5, "timing_s/step": 9.0}], {})
    assert read_metrics(run, 3) == {"step": 3, "a": 1.0}
    compared = compare_step(run, again, 3)
    assert compared.differences == ["a is 1.5, was 1.0"]
    assert (compared.answers, compared.metrics, compared.same) == (None, 2, False)
    assert compare_step(run, run, 3).same
    nothing = compare_step(run, again, 7)
    assert (nothing.answers, nothing.metrics, nothing.same) == (None, None, False)


def test_a_groups_stages_are_shown_and_another_group_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, [{"step": 3, "actor/grad_norm": 0.25}], {})
    (run / SAMPLES).mkdir()
    long = {
        "tokens": [*range(100)],
        "rollout_logprobs": None,
        "old_logprobs": None,
        "advantages": None,
        "entropies": None,
    }
    rows = table(
        {}, long, {"tokens": [], "rollout_logprobs": [], "old_logprobs": [], "advantages": [], "entropies": []}
    )
    pq.write_table(rows, run / SAMPLES / sample_file(3, "train"))
    told = "\n".join(show_group(run, 3, 0))
    assert "actor/grad_norm" in told
    assert "…" in told
    with pytest.raises(NoReplayError, match="groups 0 to 0, not 5"):
        [*show_group(run, 3, 5)]


def test_a_record_that_lacks_a_newer_column_is_compared_by_the_others() -> None:
    assert compare_tables(table({}).drop_columns(["entropies"]), table({})) == []
