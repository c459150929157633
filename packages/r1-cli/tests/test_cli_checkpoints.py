"""Checkpoints are complete or absent, and pruned only when their successor is safe."""

import json
import resource
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faults_table import note_fault

from r1_cli.checkpoint.folders import CheckpointError, CheckpointStore, read_state
from r1_cli.checkpoint.saving import Saver
from r1_cli.jobs.resume import load_start


def save(store: CheckpointStore, step: int, score: float | None = None) -> None:
    def write(folder: Path) -> None:
        (folder / "actor").mkdir()
        (folder / "actor" / "weights").write_text(str(step))

    store.publish(store.write(step, write, {"step": step, "val_reward_score": score}))


def test_a_written_draft_is_invisible_until_it_is_published(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    draft = store.write(1, lambda folder: None, {"step": 1})
    assert store.latest() is None
    store.publish(draft)
    assert store.latest() == tmp_path / "global_step_1"


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, limit=2)
    for step, score in [(1, 0.1), (2, 0.9), (3, 0.3), (10, None), (11, 0.2)]:
        save(store, step, score)
    assert store.steps() == [2, 10, 11]
    tracker = json.loads((tmp_path / "checkpoint_tracker.json").read_text())
    assert tracker["last_global_step"] == 11
    assert tracker["best_global_step"] == 2
    assert tracker["best_val_reward_score"] == 0.9


ODD_SCORES = ['{"val_reward_score": "high"}', '{"val_reward_score": []}', '{"val_reward_score": NaN}']


@pytest.mark.parametrize("state", ["7", "[]", *ODD_SCORES, "{"])
def test_a_damaged_state_has_no_score_and_ends_no_run(state: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, 0.5)
    save(store, 2, 0.9)
    (store.path(2) / "trainer.json").write_text(state)
    save(store, 3, 0.1)
    assert store.best() == 1


def test_without_a_limit_everything_stays(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in range(1, 6):
        save(store, step)
    assert store.steps() == [1, 2, 3, 4, 5]


def test_the_same_step_can_be_saved_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, 0.1)
    save(store, 1, 0.2)
    assert read_state(store.path(1))["val_reward_score"] == 0.2


def test_a_failing_save_leaves_the_old_checkpoint_and_no_new_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, limit=1)
    save(store, 1)

    def fail(folder: Path) -> None:
        (folder / "half").write_text("…")
        raise OSError("disk full")

    with pytest.raises(CheckpointError, match="disk full"):
        store.write(2, fail, {"step": 2})
    assert store.steps() == [1]
    save(store, 3)
    assert store.steps() == [3]
    assert not list(tmp_path.glob(".draft*"))


def test_a_disk_that_is_full_when_a_checkpoint_gets_its_name_is_said_and_the_checkpoint_stands(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, limit=1)
    draft = store.write(1, lambda folder: (folder / "weights").write_text("w"), {"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"checkpoint_tracker.json of step 1 could not be written.*\n.*resumes"
        ):
            store.publish(draft)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert store.latest() == store.path(1)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(
        FileNotFoundError, match=r"not a checkpoint of r1: it has no trainer.json \(model.safetensors\)"
    ):
        read_state(tmp_path)


def test_a_checkpoint_is_written_beside_the_run_and_gets_its_name_after_the_records(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, limit=1)
    save(store, 1)
    saver, written, recorded, order = Saver(store), threading.Event(), threading.Event(), list[str]()

    def fill(folder: Path) -> None:
        assert written.wait(60)
        (folder / "weights").write_text("2")
        order.append("written")

    def flush() -> None:
        assert recorded.wait(60)
        order.append("recorded")

    saver.write(2, fill, {"step": 2}, apart=True)
    saver.publish(flush)
    saver.check()
    assert store.steps() == [1], "the one before goes when its successor is there"
    written.set()
    recorded.set()
    saver.write(3, lambda folder: order.append(f"{store.steps()}"), {"step": 3}, apart=False)
    assert order == ["written", "recorded", "[2]"], "one at a time"
    saver.publish(lambda: None)
    saver.finish()
    assert store.steps() == [3]
    saver.close()


def test_a_checkpoint_that_cannot_be_written_beside_the_run_is_named_once_and_the_one_before_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    store = CheckpointStore(tmp_path, limit=1)
    save(store, 1)
    saver = Saver(store)
    for ending in (saver.finish, lambda: saver.write(3, fail, {}, apart=True)):
        saver.write(2, fail, {"step": 2}, apart=True)
        saver.publish(lambda: None)
        with pytest.raises(CheckpointError, match=r"step 2 could not be written to .*No space left.*\n.*resumes from"):
            ending()
        saver.finish()
    saver.write(2, fail, {"step": 2}, apart=True)
    saver.publish(lambda: None)
    saver.finish_or_warn()
    assert "the checkpoint of step 2 could not be written" in caplog.text
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "global"))] == ["global_step_1"]
    saver.close()


def test_a_run_goes_on_after_failed_saves_saves_again_at_once_and_ends_after_several_in_a_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = True

    def fill(folder: Path) -> None:
        (folder / "weights").write_text("w")
        if full:
            raise OSError(28, "No space left on device")

    def try_to_save(step: int, *, apart: bool) -> None:
        saver.write(step, fill, {"step": step}, apart=apart)
        saver.publish(lambda: None)
        saver.finish()

    store = CheckpointStore(tmp_path, limit=1)
    save(store, 1)
    saver = Saver(store, most_failed=3)
    for step, apart in ((2, True), (3, False)):
        try_to_save(step, apart=apart)
        assert saver.due, "the next step is saved, whatever trainer.save_freq"
        assert store.steps() == [1], "nothing is pruned for a checkpoint that is not there"
    full = False
    try_to_save(4, apart=True)
    assert (store.steps(), saver.due) == ([4], False)
    assert caplog.text.count("No space left") == 1, "said once"
    assert "written again, after 2 that were not" in caplog.text
    full = True
    try_to_save(5, apart=True)
    try_to_save(6, apart=True)
    with pytest.raises(CheckpointError, match=r"step 7 could not be written"):
        try_to_save(7, apart=True)
    saver.write(8, fill, {"step": 8}, apart=True)
    with pytest.raises(CheckpointError, match=r"step 8"):
        saver.finish(last=True)
    saver.close()


def test_space_is_predicted_before_each_save_from_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    store.publish(store.write(1, lambda folder: (folder / "weights").write_bytes(bytes(5_000_000)), {"step": 1}))
    begun = list[Path]()
    free = SimpleNamespace(free=4_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: free)
    with pytest.raises(CheckpointError, match=r"it takes about 0.005 GB, as the one before, and 0.004 GB are free"):
        store.write(2, begun.append, {"step": 2})
    assert not begun, "nothing is written"
    free.free = 6_000_000
    store.write(2, begun.append, {"step": 2})
    assert begun


def test_nothing_is_pruned_for_a_checkpoint_that_is_damaged_when_it_gets_its_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, limit=1)
    save(store, 1)
    draft = store.write(2, lambda folder: (folder / "x.json").write_text("{}"), {"step": 2})
    (draft.folder / "x.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"global_step_2 is damaged \(x.json is cut off"):
        store.publish(draft)
    assert store.steps() == [1, 2]
    note_fault("a checkpoint that is damaged while it is written", outcome="goes on")


@pytest.mark.parametrize("moment", range(0, 24, 3))
def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path, moment: int) -> None:
    """The process dies at the n-th system call that the store makes for the second checkpoint."""
    script = textwrap.dedent(
        f"""
        import os, shutil, sys
        from pathlib import Path
        from r1_cli.checkpoint.folders import CheckpointError, CheckpointStore

        calls = 0
        def dying(function):
            def call(*args, **kwargs):
                global calls
                calls += 1
                if armed and calls > {moment}:
                    os._exit(9)
                return function(*args, **kwargs)
            return call

        armed = False
        os.fsync, Path.rename, shutil.rmtree = dying(os.fsync), dying(Path.rename), dying(shutil.rmtree)
        store = CheckpointStore(Path(sys.argv[1]), limit=1)
        save = lambda folder: (folder / "weights").write_text("w" * 1000)
        store.publish(store.write(1, save, {{"step": 1}}))
        armed, calls = True, 0
        store.publish(store.write(2, save, {{"step": 2}}))
        """
    )
    process = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    latest = CheckpointStore(tmp_path).latest()
    assert latest is not None
    assert (latest / "weights").read_text() == "w" * 1000
    assert process.returncode in (0, 9)
    note_fault("a process that dies at a system call of a save", outcome="resumes")


def test_a_checkpoint_that_the_learner_refuses_is_named_as_one(tmp_path: Path) -> None:
    class Refusing:
        def load(self, folder: Path, *, model_only: bool) -> None:
            raise FileNotFoundError(f"{folder} has neither optimizer.safetensors nor its index")

    (tmp_path / "trainer.json").write_text('{"step": 3, "model_only": false}')
    nothing: Any = None
    refusing: Any = Refusing()
    begin: Any = SimpleNamespace(resume=lambda state: None)
    with pytest.raises(CheckpointError, match=r"cannot be resumed from: .*actor has neither optimizer"):
        load_start(refusing, None, nothing, tmp_path, begin)
