"""Logs have neither gaps nor repeats, and no logger can end a run."""

import dataclasses
import json
import logging
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
from faults_table import note_fault

from r1_cli.checkpoint.folders import CheckpointError
from r1_cli.runs.track import Generation, RunInfo, Tracker
from r1_cli.runs.track import tracker as tracker_module
from r1_cli.runs.track.files import FileLogger, JsonLines
from r1_cli.runs.track.loggers.mlflow import metric_name
from r1_cli.runs.track.loggers.wandb import choose_mode

SEEN = Generation(
    split="val", id="row:1", sample=0, prompt="How many?", response="2", ground_truth="2", score=1.0,
    parts={"accuracy": 1.0}, extracted="2", reason="the same text", failure=None, reward=1.0, tokens=2,
    finish_reason="stop", pictures=1,
)  # fmt: skip


class Silent:
    """A console that remembers the steps it was told of."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, step: int, record: dict[str, float]) -> None:
        self.steps.append(step)

    def log_generations(self, step: int, rows: list[dict[str, Any]]) -> None: ...
    def close(self) -> None: ...
    def stage(self, name: str) -> None: ...
    def show(self, generations: Any) -> None: ...
    def show_processes(self, line: str) -> None: ...


class Broken(Silent):
    def log(self, step: int, record: dict[str, float]) -> None:
        raise ConnectionError("gone")


def info(folder: Path) -> RunInfo:
    return RunInfo("project", "experiment", folder, {"trainer": {"max_steps": 3}}, resumed_from=0)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_record_is_one_flat_object_a_line(tmp_path: Path) -> None:
    FileLogger(info(tmp_path)).log(5, {"val/reward_score": 0.61})
    assert lines(tmp_path / "experiment_log.jsonl") == [{"step": 5, "val/reward_score": 0.61}]
    assert json.loads((tmp_path / "experiment_config.json").read_text()) == {"trainer": {"max_steps": 3}}


def test_a_full_disk_leaves_whole_lines_and_says_what_could_not_be_written(tmp_path: Path) -> None:
    records = FileLogger(info(tmp_path))
    records.log(1, {"x": 0.5})
    full = (tmp_path / "experiment_log.jsonl").stat().st_size + 5
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (full, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"experiment_log.jsonl could not be written: .*; make room"):
            records.log(2, {"x": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert lines(tmp_path / "experiment_log.jsonl") == [{"step": 1, "x": 0.5}]
    records.log(2, {"x": 0.5})
    assert [line["step"] for line in lines(tmp_path / "experiment_log.jsonl")] == [1, 2]


def test_records_that_a_full_disk_refuses_wait_in_memory_and_are_written_in_order_when_there_is_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    console, name = Silent(), tmp_path / "experiment_log.jsonl"
    tracker = Tracker([], info(tmp_path), console)
    tracker.log(1, {"x": 0.5})
    tracker.flush()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (name.stat().st_size + 5, before[1]))
    try:
        for step in (2, 3):
            tracker.log(step, {"x": 0.5})
        with pytest.raises(CheckpointError, match="could not be written"):
            tracker.flush()  # so that no checkpoint is published without its log
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    tracker.log(4, {"x": 0.5})
    tracker.flush()
    assert [line["step"] for line in lines(name)] == console.steps == [1, 2, 3, 4]
    assert caplog.text.count("waits in memory, and the run goes on") == 1
    monkeypatch.setattr(tracker_module, "BEHIND", 2)
    monkeypatch.setattr(FileLogger, "log", refuse)
    for step in (5, 6):
        tracker.log(step, {"x": 0.5})
        with pytest.raises(CheckpointError):
            tracker.flush()
    with pytest.raises(CheckpointError, match="read-only"):
        tracker.log(7, {"x": 0.5})
    tracker.close()


def refuse(self: FileLogger, step: int, record: Any) -> None:
    raise CheckpointError("the disk is read-only")


def test_a_disk_that_is_read_only_from_now_on_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    records = FileLogger(info(tmp_path))
    records.log(1, {"x": 0.5})
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refused)
        patched.setattr("os.truncate", refused)
        with pytest.raises(CheckpointError, match=r"experiment_log.jsonl could not be .*Read-only"):
            records.log(2, {"x": 0.5})
    records.log(2, {"x": 0.5})
    assert [line["step"] for line in lines(tmp_path / "experiment_log.jsonl")] == [1, 2]


def test_a_service_that_hangs_holds_up_neither_steps_nor_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, other = threading.Event(), Silent()
    hanging = Silent()
    hanging.log = lambda step, record: answers.wait(60) and None  # type: ignore[method-assign]
    monkeypatch.setattr(tracker_module, "BEHIND", 3)
    monkeypatch.setattr(tracker_module, "CLOSING", 0.05)
    opened: dict[str, Any] = {"wandb": hanging, "mlflow": other}
    monkeypatch.setattr(tracker_module, "_open", lambda name, info: [opened[name]])
    tracker = Tracker(["wandb", "mlflow"], info(tmp_path), Silent())
    for step in range(1, 9):
        tracker.log(step, {"x": 0.5})
        tracker.flush()
    tracker.close()
    assert [line["step"] for line in lines(tmp_path / "experiment_log.jsonl")] == list(range(1, 9))
    assert other.steps == list(range(1, 9)), "another service is not held up"
    assert caplog.text.count("has not answered for 3 records") == 1
    assert caplog.text.count("does not answer: its last records are not sent") == 1
    answers.set()
    note_fault("a tracker that hangs", outcome="goes on")


def test_a_resumed_run_neither_repeats_nor_loses_a_step(tmp_path: Path) -> None:
    first = FileLogger(info(tmp_path))
    for step in (1, 2, 3):
        first.log_generations(step, [{"id": "row", "response": "a"}])
        first.log(step, {"x": step})
    resumed = FileLogger(info(tmp_path))  # from the checkpoint of step 1
    for step in (2, 3, 4):
        resumed.log_generations(step, [{"id": "row", "response": "b"}])
        resumed.log(step, {"x": -step})
    assert lines(tmp_path / "experiment_log.jsonl") == [
        {"step": s, "x": x} for s, x in [(1, 1), (2, 2), (3, 3), (4, -4)]
    ]
    assert [row["step"] for row in lines(tmp_path / "generations.jsonl")] == [1, 2, 3, 4]


def test_a_new_run_with_other_settings_moves_the_old_records_aside(tmp_path: Path) -> None:
    FileLogger(info(tmp_path)).log(1, {"x": 1.0})
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "evaluations.jsonl").write_text("{}")
    other = dataclasses.replace(info(tmp_path), config={"trainer": {"max_steps": 4}})
    FileLogger(other).log(1, {"x": 2.0})
    assert {path.name for path in tmp_path.glob("evaluations*")} == {"evaluations.1", "evaluations.1.jsonl"}
    assert lines(tmp_path / "experiment_log.1.jsonl") == [{"step": 1, "x": 1.0}]
    assert lines(tmp_path / "experiment_log.jsonl") == [{"step": 1, "x": 2.0}]


def test_records_beside_damaged_settings_are_moved_aside_as_another_runs(tmp_path: Path) -> None:
    FileLogger(info(tmp_path)).log(1, {"x": 1.0})
    (tmp_path / "experiment_config.json").write_text("[]")
    FileLogger(info(tmp_path)).log(1, {"x": 2.0})
    assert lines(tmp_path / "experiment_log.1.jsonl") == [{"step": 1, "x": 1.0}]


def test_a_line_torn_by_a_kill_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "x": 0.')
    file = JsonLines(path)
    file.append([{"step": 2}])
    assert lines(path) == [{"step": 1}, {"step": 2}]
    note_fault("SIGKILL while a line of the log is written", outcome="resumes")


def test_non_finite_numbers_are_written_as_valid_json(tmp_path: Path) -> None:
    FileLogger(info(tmp_path)).log(1, {"loss": float("nan"), "max": float("inf")})
    assert lines(tmp_path / "experiment_log.jsonl") == [{"step": 1, "loss": None, "max": None}]


def test_a_logger_that_breaks_is_dropped_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Tracker(["console"], info(tmp_path), Broken())
    with caplog.at_level(logging.WARNING, "r1"):
        tracker.log(1, {"x": 1.0})
        tracker.log(2, {"x": 2.0})
        tracker.flush()
    assert [row["step"] for row in lines(tmp_path / "experiment_log.jsonl")] == [1, 2]
    assert len(caplog.records) == 1
    assert "Broken is off from step 1: ConnectionError: gone" in caplog.text
    note_fault("a tracker that fails", outcome="goes on")


def test_tensorboard_gets_scalars_and_texts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = Tracker(["tensorboard"], info(tmp_path), Silent())
    tracker.log(1, {"reward/overall": 0.5}, [SEEN])
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Scalars("reward/overall")[0].value == 0.5
    assert events.Tags()["tensors"] == ["val/generations/row:1/text_summary"]


def test_wandb_without_a_key_logs_offline_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with caplog.at_level(logging.WARNING, "r1"):
        tracker = Tracker(["wandb"], info(tmp_path), Silent())
        tracker.log(1, {"reward/overall": 0.5}, [SEEN])
        tracker.close()
    assert len(caplog.records) == 1
    assert "offline" in caplog.text
    assert list((tmp_path / "wandb").glob("offline-run-*"))


def test_wandb_with_a_key_but_no_network_logs_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert choose_mode("a-key") == "offline"


def test_a_logger_that_is_not_installed_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "swanlab", None)
    with caplog.at_level(logging.WARNING, "r1"):
        Tracker(["swanlab"], info(tmp_path), Silent())
    assert "logger swanlab is off" in caplog.text
    assert "pip install swanlab" in caplog.text


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("val/reward_score", "val/reward_score"),
        ("val/avg@16", "val/avg_at_16"),
        ("val/openai/gsm8k:main#v1[:10%]/avg@1", "val/openai/gsm8k:main_v1_:10__/avg_at_1"),
        ("/data/../rows//x", "rows/x"),
        ("reward/../../x", "x"),
        ("reward/größe", "reward/größe"),
    ],
)
def test_mlflow_is_told_names_that_it_takes(name: str, told: str) -> None:
    assert metric_name(name) == told


def test_mlflow_takes_a_validation_and_writes_into_the_runs_folder_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for made in (folder, elsewhere):
        made.mkdir()
    monkeypatch.chdir(elsewhere)
    tracker = Tracker(["mlflow"], info(folder), Silent())
    tracker.log(0, {"val/avg@1": 0.5, "val/a b/../c": float("nan")}, [SEEN])
    tracker.flush()
    assert len(tracker.loggers) == 3, caplog.text
    tracker.close()
    assert not list(elsewhere.iterdir())


def test_trackio_takes_a_validation_and_a_resumed_run_goes_on_in_its_charts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("trackio", reason="the extra `trackio` is not installed")
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    for step in (1, 2):
        tracker = Tracker(["trackio"], info(tmp_path), Silent())
        tracker.log(step, {"val/avg@4": 0.5, "val/a b/../c": float("nan")}, [SEEN])
        tracker.flush()
        assert len(tracker.loggers) == 3, caplog.text
        tracker.close()
    assert (tmp_path / "trackio" / "project.db").is_file()


def test_the_file_gets_all_responses_and_others_the_first_to_each_validation_prompt(tmp_path: Path) -> None:
    class Showing(Silent):
        shown: list[dict[str, Any]]

        def log_generations(self, step: int, rows: list[dict[str, Any]]) -> None:
            self.shown = rows

    console = Showing()
    tracker = Tracker(["console"], info(tmp_path), console)
    second, trained = dataclasses.replace(SEEN, sample=1), dataclasses.replace(SEEN, split="train")
    tracker.log(1, {"x": 1.0}, [SEEN, second, trained])
    tracker.log(1, {"x": 1.0}, [SEEN, second, trained])  # as a resumed run does
    tracker.flush()
    rows = lines(tmp_path / "generations.jsonl")
    assert [(row["split"], row["sample"], row["parts"]) for row in rows] == [
        ("val", 0, {"accuracy": 1.0}), ("val", 1, {"accuracy": 1.0}), ("train", 0, {"accuracy": 1.0})
    ]  # fmt: skip
    assert [row["sample"] for row in console.shown] == [0]
    assert console.shown[0]["parts"] == '{"accuracy": 1.0}'
