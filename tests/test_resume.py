"""A run that is killed at any moment and started again equals one that was never killed."""

import json
import os
import random
import signal
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from episode_runs import calls_of, episodes, write_environment
from faults_table import note_fault
from forked import Forked
from patience import eventually
from safetensors.torch import load_file

from r1_cli.checkpoint.folders import CheckpointStore
from r1_cli.checkpoint.memory import find_copies, newest_copy
from r1_cli.jobs.replay import compare_tables
from r1_cli.runs.reader import RunReader

STEPS = 6

# Runs the command as a user would, and notes every sampled token of every step on the way.
DRIVER = textwrap.dedent(
    """
    import json, os, sys, time
    from pathlib import Path
    from r1_cli.main import main
    from r1_cli.train.sampling.collect import DynamicSampling
    from r1_core.learner import checkpoint

    sampled, collect = Path(sys.argv.pop(1)), DynamicSampling.collect
    held = float(sys.argv.pop(1))  # the step that is not taken until a signal comes

    def noting(collector, at, watch):
        while at.step >= held:
            time.sleep(0.01)
        groups, after, metrics = collect(collector, at, watch)
        tokens = [c.token_ids.tolist() for group in groups for c in group.completions]
        with sampled.open("a") as file:
            file.write(json.dumps([at.step, tokens]) + "\\n")
        return groups, after, metrics

    stalled, save = f".draft_{os.environ.get('R1_STALLED')}/", checkpoint.save_tensors

    def stalling(tensors, path):
        save(tensors, path)
        while stalled in str(path):
            time.sleep(0.01)

    checkpoint.save_tensors = stalling
    DynamicSampling.collect = noting
    main()
    """
)


def start(folder: Path, *overrides: str, held: float = STEPS, **environment: str) -> Forked:
    rows = "examples/quickstart"
    return Forked(
        str(folder / "sampled.jsonl"), str(held), "train",
        "examples/quickstart/config.yaml",
        f"trainer.save_checkpoint_path={folder / 'run'}", f"trainer.max_steps={STEPS}", "trainer.save_freq=2",
        f"data.train_files={rows}/train.parquet[:256]", f"data.val_files={rows}/val.parquet[:16]",
        "data.filter_overlong_prompts_workers=1", "trainer.val_freq=3", "trainer.save_limit=2",
        "data.rollout_batch_size=4", "worker.actor.global_batch_size=2", "worker.rollout.n=4",
        "worker.actor.micro_batch_size_per_device_for_update=32",
        "worker.actor.micro_batch_size_per_device_for_experience=64",
        "algorithm.disable_kl=false", *overrides, program=DRIVER, **environment,
    )  # fmt: skip


def finish(folder: Path, *overrides: str) -> str:
    """Let a run go on to its end."""
    output = (process := start(folder, *overrides)).communicate()
    assert process.returncode == 0, output
    return output


def whole_log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "experiment_log.jsonl").read_text().splitlines()]


def log_of(folder: Path) -> list[dict[str, Any]]:
    """Return the records without the values that a clock or the machine's memory decides."""
    clocked = ("timing_", "perf/", "gen/busy")
    return [{k: v for k, v in row.items() if not k.startswith(clocked)} for row in whole_log_of(folder)]


def sampled_of(folder: Path) -> dict[int, list[list[int]]]:
    """Return the tokens trained on by step; a step that was taken twice must have been the same both times."""
    batches: dict[int, list[list[int]]] = {}
    for line in (folder / "sampled.jsonl").read_text().splitlines():
        step, tokens = json.loads(line)
        assert batches.setdefault(step, tokens) == tokens
    return batches


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    finish(folder)
    return folder


def assert_same_run(folder: Path, other: Path) -> None:
    assert [row["step"] for row in log_of(folder)] == list(range(STEPS + 1))
    assert log_of(folder) == log_of(other)
    assert sampled_of(folder) == sampled_of(other)
    generations = "run/generations.jsonl"
    assert (folder / generations).read_text() == (other / generations).read_text()
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(path / f"run/global_step_{STEPS}/actor" / name) for path in (folder, other))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.slow
def test_sigkill_at_random_points_leaves_no_trace(tmp_path: Path, uninterrupted: Path) -> None:
    moments = random.Random(os.environ.get("R1_KILL_SEED", "3"))
    with_workers = "data.filter_overlong_prompts_workers=2"
    seconds_of_a_step = max(row.get("perf/time_per_step", 0.0) for row in whole_log_of(uninterrupted))
    in_memory = "trainer.memory_save_freq=1"
    process = start(tmp_path, with_workers, in_memory, held=3)
    wait_until(lambda: (copy := newest_copy(tmp_path / "run")) is not None and copy.name == "global_step_3", process)
    process.kill()
    process.wait()
    assert CheckpointStore(tmp_path / "run").steps() == [2]
    kills = 0
    for _ in range(2):
        process = start(tmp_path, with_workers, in_memory)
        # Counted from the first sign of progress: loading, which takes most of such a short run, is no random point.
        wait_for_growth(tmp_path / "run" / "experiment_log.jsonl", process)
        time.sleep(moments.uniform(0.0, seconds_of_a_step))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills, "every run ended before it was killed: make the run longer"
    output = finish(tmp_path, with_workers, in_memory)
    assert find_copies(tmp_path / "run") is None, output
    starts = {one["from_step"] for one in RunReader(tmp_path / "run").starts()}
    assert starts >= {0, 3}, "the second start was from memory"
    assert_same_run(tmp_path, uninterrupted)
    note_fault("SIGKILL of a whole run at a random moment", outcome="resumes")


@pytest.mark.slow
def test_sigkill_while_a_checkpoint_is_written_leaves_no_trace_where_groups_are_kept_for_the_next_step(
    tmp_path: Path,
) -> None:
    dynamic = ["algorithm.online_filtering=true", "algorithm.filter_key=accuracy", "data.rollout_batch_size=6"]
    dynamic += ["trainer.save_freq=1", "trainer.val_freq=-1"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    finish(whole, *dynamic)
    first = next(row["step"] for row in log_of(whole) if row.get("rollout/groups_kept"))
    process = start(killed, *dynamic, R1_STALLED=str(first + 1))
    # The run goes on: what the step after the one that is being saved trains on is sampled.
    while process.poll() is None and first + 1 not in (sampled_of(killed) if noted(killed) else ()):
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert (killed / "run" / f".draft_{first + 1}" / "actor" / "model.safetensors").exists()
    assert CheckpointStore(killed / "run").latest() == killed / "run" / f"global_step_{first}"
    assert (killed / "run" / f"global_step_{first}" / "surplus.json").exists()
    finish(killed, *dynamic)
    assert_same_run(killed, whole)
    assert any(row.get("staleness/mean", 0) > 0 for row in log_of(whole))
    note_fault("SIGKILL of a whole run while it writes a checkpoint", outcome="resumes")


@pytest.mark.slow
def test_sigkill_in_a_tool_in_a_checkpoint_and_between_steps_of_episodes_leaves_no_trace_and_no_process(
    tmp_path: Path,
) -> None:
    whole, killed, album = tmp_path / "whole", tmp_path / "killed_0", write_environment(tmp_path)
    own = episodes(album, environment_kwargs="{seconds: 0.02}")
    going = [*own, "trainer.save_freq=1", "trainer.val_freq=-1"]
    for folder in (whole, killed):
        folder.mkdir()
    finish(whole, *going)
    assert any(row.get("rollout/groups_kept") for row in log_of(whole)), "no episode was in a checkpoint"
    moments = random.Random(os.environ.get("R1_KILL_SEED", "3"))
    kills = 0
    while kills < (most := int(os.environ.get("R1_KILLS", "3"))):
        process = start(killed, *going)
        if wait_for_moment(MOMENTS[kills % len(MOMENTS)], moments, killed / "run", album, process):
            started = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            kills += 1
            assert eventually(lambda left=started: not any(one.is_running() for one in left)), "a process is left"
        if process.wait() == 0:  # the next kill is of a new run
            assert_same_episodes(killed, whole)
            (killed := killed.with_name(f"killed_{kills}")).mkdir()
        assert process.returncode in (0, -signal.SIGKILL)
    assert kills == most
    finish(killed, *going)
    assert_same_episodes(killed, whole)
    note_fault("SIGKILL of a whole run in a tool's call", outcome="resumes")


MOMENTS = ("tool", "checkpoint", "between")


def wait_for_moment(moment: str, moments: random.Random, run: Path, album: Path, process: Forked) -> bool:
    """Wait until a run is in a tool, in a checkpoint's write, or between steps; return whether it still runs."""
    before, some = calls_of(album), moments.randrange(1, 100)
    wait_until(lambda: calls_of(album) > before, process)
    if moment == "tool":
        wait_until(lambda: calls_of(album) >= before + some, process)
    elif moment == "checkpoint":
        wait_until(lambda: any(run.glob(".draft_*")), process)
        time.sleep(moments.uniform(0, 0.03))
    else:
        wait_for_growth(run / "experiment_log.jsonl", process)
        time.sleep(moments.uniform(0, 0.5))
    return process.poll() is None


def assert_same_episodes(folder: Path, other: Path) -> None:
    assert_same_run(folder, other)
    for step in range(1, STEPS + 1):
        ours, theirs = (RunReader(path / "run").sample_table(step) for path in (folder, other))
        assert compare_tables(theirs, ours) == []
    assert len(theirs["turns"][0]) == 4


def noted(folder: Path) -> bool:
    path = folder / "sampled.jsonl"
    return path.exists() and path.read_text().endswith("\n")


def wait_for_growth(path: Path, process: Forked) -> None:
    size = path.stat().st_size if path.exists() else 0
    wait_until(lambda: path.exists() and path.stat().st_size > size, process)


def wait_until(condition: Callable[[], object], process: Forked) -> None:
    """Wait until a condition is true, or the process ends."""
    assert eventually(lambda: process.poll() is not None or condition(), 600.0)


@pytest.mark.slow
def test_sigterm_saves_says_so_in_the_exit_code_and_resumes(tmp_path: Path, uninterrupted: Path) -> None:
    process = start(tmp_path, held=STEPS - 2)
    wait_for_growth(tmp_path / "run" / "experiment_log.jsonl", process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "SIGTERM" in output
    assert list((tmp_path / "run").glob("global_step_*/trainer.json"))
    finish(tmp_path)
    assert_same_run(tmp_path, uninterrupted)
    note_fault("SIGTERM, as schedulers send it", outcome="resumes")


@pytest.mark.slow
def test_load_checkpoint_path_goes_on_from_the_checkpoint_that_is_named(tmp_path: Path, uninterrupted: Path) -> None:
    named = uninterrupted / "run" / f"global_step_{STEPS - 2}"
    finish(tmp_path, f"trainer.load_checkpoint_path={named}")
    assert [row["step"] for row in log_of(tmp_path)][-2:] == [STEPS - 1, STEPS]
    assert log_of(tmp_path)[-1] == log_of(uninterrupted)[-1]


@pytest.mark.slow
def test_starting_anew_never_mixes_with_an_older_run(tmp_path: Path, uninterrupted: Path) -> None:
    output = (process := start(uninterrupted, "trainer.find_last_checkpoint=false")).communicate()
    assert process.returncode == 2, output
    assert "trainer.find_last_checkpoint=false" in output
    assert str(uninterrupted / "run") in output.replace("\n", "")
