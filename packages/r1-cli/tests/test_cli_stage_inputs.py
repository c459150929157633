"""What the file of `r1 run` may say, what makes a stage's digest, and what of a stage's record is believed."""

import os
import signal
from pathlib import Path

import pytest
import yaml

from r1_cli.config.problems import ConfigError
from r1_cli.config.stages import Stages, read_stages
from r1_cli.jobs import stages as jobs
from r1_cli.jobs.stages import StageError, StageRun


def read(folder: Path, stages: dict[str, object], **more: str) -> Stages:
    file = folder / "stages.yaml"
    file.write_text(yaml.safe_dump({"output": f"{folder}/out", "stages": stages, **more}, sort_keys=False))
    return read_stages(file)


def eval_of(model: Path | str, **more: object) -> dict[str, object]:
    return {"one": {"command": "eval", "model": str(model), **more}}


@pytest.fixture
def base(tmp_path: Path) -> str:
    (tmp_path / "base.yaml").write_text("trainer: {max_steps: 3}\n")
    return str(tmp_path / "base.yaml")


def digest(folder: Path, stages: dict[str, object], base: str) -> str:
    return StageRun(read(folder, stages, base=base)).digests["one"]


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (
            {"command": "eval", "model": "a", "samples": "b"},
            "one.samples=b .*a stage reads a model or samples, not both",
        ),
        ({"command": "train", "model": "a"}, "one.model .*r1 train takes no model: set worker.actor.model.model_path"),
        (
            {"command": "rows", "samples": "a", "settings": {"data.seed": 1}},
            "r1 rows has no configuration; set options",
        ),
        ({"command": "eval", "model": 7}, "one.model=7 .*must be text"),
        ({"command": "eval", "model": "a", "settings": 3}, "one.settings=3 .*unknown key"),
    ],
)
def test_a_stage_that_says_something_else_is_named(tmp_path: Path, base: str, stage: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, {"one": stage}, base=base)


def test_a_file_without_stages_or_with_a_name_that_is_no_folder_is_named(tmp_path: Path, base: str) -> None:
    with pytest.raises(ConfigError, match=r"stages .*there is none"):
        read(tmp_path, {}, base=base)
    with pytest.raises(ConfigError, match=r"stages.a b .*letters, digits, - and _ only"):
        read(tmp_path, {"a b": {"command": "train"}}, base=base)


def test_a_stages_own_configuration_comes_before_the_base_and_empty_sections_say_nothing(
    tmp_path: Path, base: str
) -> None:
    [stage] = read(tmp_path, eval_of("a", config="own.yaml", settings={}, options=None), base=base).stages
    assert (stage.config, stage.settings, stage.options) == ("own.yaml", [], [])


def test_a_stage_needs_another_once_however_often_it_names_it(tmp_path: Path, base: str) -> None:
    model = "${stages.first.model}"
    stages = {**eval_of(model, settings={"worker.reward.reward_function": model}), "first": {"command": "train"}}
    first, second = read(tmp_path, stages, base=base).stages
    assert (first.name, second.needs) == ("first", ["first"])


def test_a_configuration_is_checked_but_for_values_that_stages_give(tmp_path: Path, base: str) -> None:
    rows = {"data.train_files": "${stages.chosen.rows}", "trainer.max_steps": "${stages.chosen.rows}"}
    stages: dict[str, object] = {
        "chosen": {"command": "rows", "samples": "s"},
        "one": {"command": "train", "settings": {**rows, "worker.actor.model.model_path": ["m"]}},
    }
    with pytest.raises(ConfigError) as found:
        StageRun(read(tmp_path, stages, base=base)).check()
    assert [one.key for one in found.value.problems] == ["stages.one: worker.actor.model.model_path"]


# --- digests ----------------------------------------------------------------------------------------------------------


def test_what_is_written_does_not_change_a_digest_and_what_is_run_does(tmp_path: Path, base: str) -> None:
    (tmp_path / "logs").write_text("1")
    own = eval_of("a", settings={"trainer.save_checkpoint_path": str(tmp_path / "logs")})
    first = digest(tmp_path, own, base)
    (tmp_path / "logs").write_text("2")
    assert digest(tmp_path, own, base) == first
    trained = {"one": {"command": "train"}}
    assert digest(tmp_path, trained, base) != digest(tmp_path, {"one": {"command": "sft"}}, base)
    before = digest(tmp_path, trained, base)
    Path(base).write_text("trainer: {max_steps: 4}\n")
    assert digest(tmp_path, trained, base) != before


def test_a_checkpoint_that_is_loaded_is_read_and_a_folder_for_weights_is_not(tmp_path: Path, base: str) -> None:
    for name in ("start", "weights"):
        (tmp_path / name).mkdir()
    own = {"trainer.load_checkpoint_path": f"{tmp_path}/start", "worker.rollout.weights_folder": f"{tmp_path}/weights"}
    first = digest(tmp_path, eval_of("a", settings=own), base)
    (tmp_path / "weights/1.safetensors").write_text("1")
    assert digest(tmp_path, eval_of("a", settings=own), base) == first
    (tmp_path / "start/1.safetensors").write_text("1")
    assert digest(tmp_path, eval_of("a", settings=own), base) != first


def test_a_value_of_the_base_that_a_stage_replaces_is_no_input(tmp_path: Path, base: str) -> None:
    stages = eval_of("a", settings={"trainer.max_steps": 1})
    before = digest(tmp_path, stages, base)
    Path(base).write_text("trainer: {max_steps: 4}\n")
    assert digest(tmp_path, stages, base) == before


@pytest.mark.parametrize(
    "written", ["{}:compute_score", "{}@train", "{}", "{}[:8]", "{}@train[10%:]", "json@{}", {"files": "{}[:8]"}]
)
def test_a_file_is_read_by_its_name_with_a_function_a_split_a_kind_or_a_slice(
    tmp_path: Path, base: str, written: str | dict[str, str]
) -> None:
    file = tmp_path / "reward.py"
    file.write_text("1")
    named = {"files": written["files"].format(file)} if isinstance(written, dict) else written.format(file)
    stages = eval_of("a", settings={"data.val_sources": [named]})
    before = digest(tmp_path, stages, base)
    file.write_text("2")
    assert digest(tmp_path, stages, base) != before


def test_a_path_may_begin_at_home_and_be_one_word_under_a_key_of_paths(
    tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "grpo").mkdir()

    def digests() -> list[str]:
        settings = {"model": {"worker.actor.model.model_path": "grpo"}, "name": {"algorithm.adv_estimator": "grpo"}}
        named = [eval_of("a", settings=settings["model"]), eval_of("grpo"), eval_of("~/grpo")]
        return [digest(tmp_path, stages, base) for stages in (*named, eval_of("a", settings=settings["name"]))]

    before = digests()
    (tmp_path / "grpo/config.json").write_text("{}")
    assert [one == other for one, other in zip(before, digests(), strict=True)] == [False, False, False, True]


def test_a_file_of_several_stages_is_read_once(tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    stage, found = {"command": "train", "settings": {"data.train_files": f"{tmp_path}/rows.jsonl"}}, list[str]()
    monkeypatch.setattr(jobs, "fingerprint", lambda path: found.append(path.name) or "1")
    StageRun(read(tmp_path, {"one": stage, "two": stage}, base=base))
    assert found == ["rows.jsonl"]


def test_a_folders_files_count_by_name_size_and_time(tmp_path: Path, base: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_text("1")
    before = digest(tmp_path, eval_of(model), base)
    assert digest(tmp_path, eval_of(model), base) == before
    os.utime(model / "weights", ns=(1, 1))
    later = digest(tmp_path, eval_of(model), base)
    assert later != before
    (model / "weights").write_text("longer")
    os.utime(model / "weights", ns=(1, 1))
    assert digest(tmp_path, eval_of(model), base) not in (before, later)


def test_an_output_counts_by_its_content_or_a_folders_data_which_a_copy_keeps(tmp_path: Path) -> None:
    rows, model = tmp_path / "rows.parquet", tmp_path / "global_step_2"
    (model / "actor").mkdir(parents=True)
    files = {rows: "rows", model / "actor/model.safetensors": "weights", model / "trainer.json": "{}"}

    def fingerprints() -> tuple[str, str]:
        return jobs.output_fingerprint(rows), jobs.output_fingerprint(model)

    for file, text in files.items():
        file.write_text(text)
    before = fingerprints()
    for file in files:
        os.utime(file, ns=(1, 1))
    (model / "trainer.json").write_text('{"seconds": 2}')
    assert fingerprints() == before
    rows.write_text("ROWS")
    (model / "actor/model.safetensors").write_text("more weights")
    assert not set(fingerprints()) & set(before)
    further = model.rename(tmp_path / "global_step_4")
    (further / "actor/model.safetensors").write_text("weights")
    assert jobs.output_fingerprint(further) != before[1], "another checkpoint has the same sizes"


# --- records ----------------------------------------------------------------------------------------------------------


def test_a_stage_whose_output_is_missing_or_that_was_stopped_does_not_stand(
    tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = read(tmp_path, eval_of("a"), base=base)
    run, result = StageRun(stages), tmp_path / "out/one/result.json"
    answer: tuple[int, int | None] = (0, None)
    monkeypatch.setattr(jobs, "run_command", lambda words: answer)
    with pytest.raises(StageError, match=r"stage one ended without its output, .*result.json"):
        run.run(run.stages[0])
    assert run.states() == {"one": "resumes"}
    result.write_text("{}")
    answer = 0, signal.SIGTERM  # it ended in order because it was asked to
    with pytest.raises(StageError, match="stage one was stopped by SIGTERM"):
        run.run(run.stages[0])
    answer = 0, None
    run.run(run.stages[0])
    assert run.states() == {"one": "complete"}
    result.unlink()
    assert run.states() == {"one": "resumes"}
    record = tmp_path / "out/one.stage.json"
    for torn in (record.read_text()[:20], "[]"):
        record.write_text(torn)
        assert run.states() == {"one": "begins"}


def test_the_seconds_of_all_attempts_are_added(tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = StageRun(read(tmp_path, eval_of("a"), base=base))
    clock = iter([0.0, 5.0, 100.0, 107.0])
    monkeypatch.setattr(jobs, "run_command", lambda words: (1, None))
    monkeypatch.setattr("r1_cli.jobs.stages.time.time", lambda: next(clock))
    for _ in range(2):
        with pytest.raises(StageError):
            run.run(run.stages[0])
    assert run.folders["one"].record()["seconds"] == 12.0
