"""`r1 eval --watch`: which checkpoints it evaluates and when it ends, with evaluations that are written here."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cli_evaluations import Marks, write_sets
from click.testing import CliRunner

from r1_cli.checkpoint.locks import find_holder, lock_folder
from r1_cli.config import ConfigError, RunConfig
from r1_cli.jobs import watch as watching
from r1_cli.jobs.evaluate import EvalOptions
from r1_cli.jobs.sample import name_model
from r1_cli.jobs.watch import StartModel, WatchOptions, watch
from r1_cli.main import main
from r1_cli.models.load import ModelError
from r1_cli.runs.diagnose.signatures import diagnose
from r1_cli.runs.diff import compare
from r1_cli.runs.evaluation.logged import read_logged
from r1_cli.runs.evaluation.stored import Evaluation, read_evaluation
from r1_cli.runs.reader import RunReader
from r1_cli.runs.report.page import write_report

RIGHT: Marks = [[1.0]] * 12
SETS: dict[str, Marks] = {"a/chat": RIGHT, "b/chat": [[0.0]] * 12}


def publish(run: Path, step: int, weights: str = "") -> None:
    """Write a checkpoint as a run does: whole, and then by its name."""
    draft = run / f".draft_{step}"
    (draft / "actor").mkdir(parents=True)
    (draft / "actor/model.safetensors").write_text(weights or f"weights of step {step}")
    (draft / "trainer.json").write_text("{}")
    shutil.rmtree(run / f"global_step_{step}", ignore_errors=True)
    draft.rename(run / f"global_step_{step}")


class Run:
    """A run whose next actions happen whenever the watcher waits or evaluates, and its evaluations."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, output: Callable[[], str]) -> None:
        self.folder, self.output = folder, output
        self.asked: list[str] = []  # models, by the folder of their answers
        self.while_waiting: Iterator[Callable[[], object]] = iter(())
        self.while_reading: dict[str, Callable[[], object]] = {}
        self.sets: dict[str, dict[str, Marks]] = {}  # by the folder of the answers; SETS by default
        folder.mkdir()
        (folder / "experiment_config.json").write_text("{}")
        (folder / "experiment_log.jsonl").write_text("".join(json.dumps({"step": s}) + "\n" for s in range(1, 7)))
        patch.setattr(watching, "sample_evaluation", self.evaluate)
        patch.setattr(watching.time, "sleep", lambda seconds: next(self.while_waiting)())

    def evaluate(
        self, config: RunConfig, output: Path, options: EvalOptions, console: object, *, describe: bool
    ) -> Evaluation:
        self.asked.append(output.name)
        model = name_model(config.worker.actor.model.model_path or "", options.adapter)
        if action := self.while_reading.pop(output.name, None):
            action()
        if not output.exists():
            names = [source.name for source in config.data.val_sources or ()] or list(SETS)
            found = self.sets.get(output.name, SETS)
            write_sets(output, {name: found[name] for name in names}, model)
        return read_evaluation(output)

    def watch(self, config: RunConfig | None = None, **options: Any) -> list[int]:
        answers = self.folder / options.pop("answers", "evaluations")
        return watch(self.folder, config or RunConfig(), WatchOptions(answers, **options))

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "evaluations.jsonl").read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("COLUMNS", "300")
    return Run(tmp_path / "run", monkeypatch, lambda: capsys.readouterr().out)


def test_while_a_run_trains_its_newest_checkpoint_is_evaluated_first_and_waiting_is_told_once(run: Run) -> None:
    with ExitStack() as training:
        training.enter_context(lock_folder(run.folder))
        run.while_waiting = iter([
            lambda: None, lambda: [publish(run.folder, step) for step in (2, 4)], lambda: publish(run.folder, 6),
            training.close,
        ])  # fmt: skip
        assert run.watch() == []
    assert run.asked == ["global_step_4", "global_step_2", "global_step_6"]
    assert run.output().count("is training (process ") == 1
    assert [row["step"] for row in run.rows()] == [4, 2, 6]
    history = RunReader(run.folder).history
    assert history.series("eval/a/chat/avg@1") == [(2, 1.0), (4, 1.0), (6, 1.0)]
    assert [one["step"] for one in history.steps] == [1, 2, 3, 4, 5, 6]
    assert [len([*RunReader(run.folder).records()]), len(read_logged(history))] == [9, 6]


def test_a_run_that_was_killed_is_evaluated_and_the_same_again_logs_nothing(run: Run) -> None:
    (run.folder / ".lock").write_text("process 1 on here")
    assert find_holder(run.folder) is None
    publish(run.folder, 2)
    assert run.watch() == []
    before = run.rows()
    assert run.watch() == []
    assert run.rows() == before
    (run.folder / "evaluations.jsonl").open("a").write('{"step": 4, "ev')  # by a watcher that was killed
    publish(run.folder, 4)
    run.watch()
    assert [row["step"] for row in run.rows()] == [2, 4]


@pytest.mark.parametrize("read", [False, True])
def test_a_checkpoint_that_is_removed_before_or_while_it_is_read_is_told_once(run: Run, read: bool) -> None:
    publish(run.folder, 2)
    publish(run.folder, 4)

    def remove() -> None:
        shutil.rmtree(run.folder / "global_step_2")
        if read:
            raise FileNotFoundError(run.folder / "global_step_2/actor/config.json")

    run.while_reading = {"global_step_2" if read else "global_step_4": remove}
    assert run.watch() == []
    assert run.output().count("step 2: removed before it was evaluated") == 1
    assert [row["step"] for row in run.rows()] == [4]


def test_a_failure_is_named_and_the_others_are_evaluated_but_an_unknown_one_ends_all(run: Run) -> None:
    def fail(error: Exception) -> Callable[[], None]:
        def raises() -> None:
            raise error

        return raises

    for step in (2, 4):
        publish(run.folder, step)
    run.while_reading = {"global_step_4": fail(ModelError("its head is missing"))}
    assert run.watch() == [4]
    assert "step 4: not evaluated: its head is missing" in run.output()
    assert [row["step"] for row in run.rows()] == [2]
    run.while_reading = {"global_step_4": fail(KeyError("x"))}
    with pytest.raises(KeyError):
        run.watch()
    assert run.watch() == []


def test_a_step_that_is_written_again_with_other_weights_is_evaluated_again(run: Run) -> None:
    with ExitStack() as training:
        training.enter_context(lock_folder(run.folder))
        publish(run.folder, 2)
        run.while_reading = {"global_step_4": lambda: publish(run.folder, 4, "others")}
        run.sets = {"global_step_2": {"a/chat": RIGHT}}
        run.while_waiting = iter([
            lambda: run.sets.clear(), lambda: publish(run.folder, 2), lambda: publish(run.folder, 2, "others"),
            lambda: publish(run.folder, 4), training.close,
        ])  # fmt: skip
        sources = RunConfig.model_validate({"data": {"val_sources": [{"files": "x", "name": "a/chat"}]}})
        run.watch(sources)
    assert run.asked == ["global_step_2"] * 3 + ["global_step_4"] * 2
    assert (run.folder / "evaluations/global_step_2.1/sampling.json").is_file()
    assert (run.folder / "evaluations/global_step_4.1/sampling.json").is_file()
    assert [row["step"] for row in run.rows()] == [2, 2, 4]  # equal weights: nothing new
    run.watch(answers="both")
    assert "eval/b/chat/avg@1" in RunReader(run.folder).history.steps[1]
    publish(run.folder, 2, "third")
    run.watch(sources)
    assert "eval/b/chat/avg@1" not in RunReader(run.folder).history.steps[1]  # of weights that are no more


def test_a_loss_of_what_the_start_model_could_is_a_warning_everywhere(run: Run, tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start/model.safetensors").write_text("start")
    few, many = [[0.0]] * 6 + [[1.0]] * 6, [[0.0]] * 12
    run.sets = {"start": {"a/chat": RIGHT, "b/chat": RIGHT, "c/chat": RIGHT},
                "global_step_2": {"a/chat": many, "b/chat": few, "c/chat": RIGHT},
                "global_step_4": {"a/chat": few, "b/chat": RIGHT, "c/chat": many}}  # fmt: skip
    names = [{"files": "x", "name": name} for name in ("a/chat", "b/chat", "c/chat")]
    config = RunConfig.model_validate({"data": {"val_sources": names}})
    publish(run.folder, 2)
    run.watch(config, start=StartModel(str(tmp_path / "start")), guarded=["a/chat", "b/chat"])
    # 6 of 12 rows worse: mid-p 1/64, with two guarded sets 1/32 at most by Holm.
    assert run.asked == ["start", "global_step_2"]
    start, row = run.rows()
    assert (start["step"], start["eval/a/chat/avg@1"], "eval/c/chat/avg@1" in start) == (0, 1.0, False)
    assert row["eval/a/chat/change"] == row["eval/a/chat/change/high"] == -1.0
    assert row["eval/a/chat/change/p"] == pytest.approx(2 * 0.5**12)
    assert (row["eval/b/chat/change"], row["eval/b/chat/change/p"]) == (-0.5, pytest.approx(0.5**6))
    assert "eval/c/chat/change" not in row
    told = "a/chat avg@1 is 0.000, -1.000 (-1.000 to -1.000) since the start, p 0.000488"
    assert f"warning: step 2 has lost what the start model could: {told}\n" in run.output()
    assert len(row["warnings"]) == 2
    reader = RunReader(run.folder)
    (found,) = [one for one in diagnose(reader.history) if one.signature == "forgetting"]
    assert told in found.evidence
    assert "warning: lost, p 0.000488" in write_report(run.folder)
    publish(run.folder, 4)
    run.watch(config, start=StartModel(str(tmp_path / "start")), guarded=["a/chat", "b/chat"])
    (found,) = [one for one in diagnose(RunReader(run.folder).history) if one.signature == "forgetting"]
    assert "b/chat" not in found.evidence  # it has come back
    assert "step 4: a/chat" in found.evidence


def test_a_loss_that_is_significant_alone_is_none_among_many_guarded_sets(run: Run, tmp_path: Path) -> None:
    few = [[0.0]] * 6 + [[1.0]] * 6
    names = [f"{letter}/chat" for letter in "abcd"]
    run.sets = {"start": dict.fromkeys(names, RIGHT), "global_step_2": dict.fromkeys(names, RIGHT) | {"a/chat": few}}
    config = RunConfig.model_validate({"data": {"val_sources": [{"files": "x", "name": name} for name in names]}})
    publish(run.folder, 2)
    run.watch(config, start=StartModel(str(tmp_path)), guarded=names)
    row = run.rows()[1]
    assert row["eval/a/chat/change/high"] < 0
    assert row["eval/a/chat/change/p"] == pytest.approx(4 * 0.5**6)
    assert row["warnings"] == []
    assert [one for one in diagnose(RunReader(run.folder).history) if one.signature == "forgetting"] == []


def test_two_watchers_do_not_write_to_one_folder(run: Run) -> None:
    told = "in use by another r1 eval --watch: process .*name another --output"
    with lock_folder(run.folder / "evaluations", ".lock-watch"), pytest.raises(ConfigError, match=told):
        run.watch()


def test_the_weights_of_an_adapter_tell_models_apart(tmp_path: Path) -> None:
    names = set()
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_text(f"factors {number}")
        names |= {name_model(str(folder)), name_model(str(tmp_path), folder)}
    assert len(names) == 4


def test_an_evaluated_run_differs_in_no_step_from_the_same_one_without_evaluations(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "other")
    publish(run.folder, 2)
    run.watch()
    one, other = RunReader(run.folder), RunReader(tmp_path / "other")
    assert compare(one, other).unequal is None
    row = {**run.rows()[0], "eval/a/chat/avg@1": 0.5}
    (tmp_path / "other/evaluations.jsonl").write_text(json.dumps(row) + "\n")
    assert compare(one, RunReader(tmp_path / "other")).unequal == (2, ["eval/a/chat/avg@1"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["none"], "none: no such folder"),
        (["."], "is no run of r1 (it has no experiment_config.json)"),
        (["run/global_step_2"], "is in the folder of the run"),
        (["run"], "data.val_files: is missing"),
        (["run", "--suite", "math501"], "no such suite; did you mean"),
        (["run", "--guard", "math500"], "does not say which model it began with: name it by --start"),
        (["run", "--json", "x"], "takes no --json"),
        (["run", "--compare"], "exclude one another"),
    ],
)
def test_what_cannot_be_watched_is_told(run: Run, monkeypatch: pytest.MonkeyPatch, words: list[str], told: str) -> None:
    publish(run.folder, 2)
    monkeypatch.chdir(run.folder.parent)
    ended = CliRunner().invoke(main, ["eval", "--watch", *words])
    assert ended.exit_code == 2
    assert told in ended.output
