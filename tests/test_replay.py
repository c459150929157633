"""`r1 replay` repeats a step of an old run bit for bit, and names what differs."""

import json
import shutil
from pathlib import Path

import pytest
from endtoend import QUICKSTART, R1, SMALL, read_log

from r1_cli.runs.reader import MANIFEST_FILE, RunReader

pytestmark = pytest.mark.slow  # they look at a run that other fast tests need on the other worker
SHOWN = ["1. prompt", "2. answer 0", "3. score", "2. answer 3", "4. group", "5. update", "actor/grad_norm"]


def listed(folder: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime for path in folder.rglob("*")}


def test_the_step_after_a_checkpoint_is_the_same_to_the_bit_and_shows_its_stages(quickstart: Path, r1: R1) -> None:
    before = listed(quickstart)
    told = r1("replay", quickstart, "--step", "3", "--debug", "--group", "1").output
    assert "steps 3 to 3, from checkpoint 2" in told
    assert "step 3 is the same to the bit: 16 answers" in told
    places = [told.index(stage) for stage in SHOWN]
    assert places == sorted(places)
    norm = read_log(quickstart)[3]["actor/grad_norm"]
    assert f"{norm:.9g}" in told
    assert listed(quickstart) == before


def test_a_step_in_the_middle_of_a_run_that_began_anew_is_the_same_though_it_chose_its_micro_batches(
    quickstart: Path, r1: R1, tmp_path: Path
) -> None:
    told = r1("replay", quickstart, "--step", "2", "--output", tmp_path / "kept").output
    assert "steps 1 to 2, from the start" in told
    assert "step 2 is the same to the bit" in told
    assert RunReader(tmp_path / "kept").recorded_steps() == [1, 2]


def test_another_setting_is_taken_and_what_differs_is_named(quickstart: Path, r1: R1, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(quickstart, run)
    manifest = json.loads((run / MANIFEST_FILE).read_text())
    manifest["starts"][0]["packages"]["torch"] = "1.0"
    (run / MANIFEST_FILE).write_text(json.dumps(manifest))
    told = r1("replay", run, "--step", "3", "worker.rollout.seed=77", ok=False)
    assert told.exit_code == 1
    assert "since then: torch" in told.output
    first = told.output.index("not the same")
    assert told.output[first:].startswith("not the same: tokens of group 0, answer")


def test_a_step_that_was_sampled_ahead_is_the_same(r1: R1, tmp_path: Path) -> None:
    few = ["trainer.max_steps=4", "trainer.save_freq=2", "trainer.val_freq=-1", "trainer.val_before_train=false"]
    r1("train", QUICKSTART, *SMALL, *few, "trainer.max_staleness=1", f"trainer.save_checkpoint_path={tmp_path}")
    assert "step 4 is the same to the bit: 16 answers" in r1("replay", tmp_path, "--step", "4").output
    first, *later = read_log(tmp_path)
    assert first["rollout/effective_sample_size"] > 1 - 1e-6, "the first step is of the learner's own weights"
    for record in later:
        assert "rollout/logprob_gap_mean" not in record, "nothing is of the current weights"
        assert record["rollout/stale_logprob_gap_mean"] > 100 * first["rollout/logprob_gap_mean"]
        assert record["actor/rollout_ess"] < 1, "the loss is weighted without being asked to"
        assert record["actor/rollout_weight_max"] > 1


def test_what_is_no_run_and_a_step_that_was_never_taken_are_refused(quickstart: Path, r1: R1, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    told = r1("replay", tmp_path / "nothing", "--step", "3", ok=False)
    assert told.exit_code == 2
    assert "no run of r1" in told.output
    told = r1("replay", quickstart, "--step", "4", ok=False)
    assert told.exit_code == 2
    assert "it has taken 3 steps" in told.output
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "is not empty" in r1("replay", quickstart, "--step", "3", "--output", tmp_path / "full", ok=False).output
