"""What a dry run refuses in a second: files and folders that a run would trip over later."""

import errno
import json
import signal
from pathlib import Path

import pytest

from r1_cli.checkpoint.folders import CheckpointError, CheckpointStore
from r1_cli.checkpoint.stop import Stopped, StopRequest
from r1_cli.config import ConfigError, load_config

BASE = ["data.train_files=owner/rows@train", "worker.reward.reward_function=math", "data.max_response_length=64"]


def model(folder: Path, **settings: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return f"worker.actor.model.model_path={folder}"


def problems(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([*BASE, *words])
    return str(caught.value)


def test_a_configuration_that_is_not_text_is_named(tmp_path: Path) -> None:
    for content in (b"data:\n  seed: 1 # gr\xfc\xdfe\n", b"PAR1\x00\x15\x04\xff", b"\x00\x01"):
        (tmp_path / "run.yaml").write_bytes(content)
        text = problems(f"config={tmp_path / 'run.yaml'}")
        assert "not YAML text in UTF-8" in text
        assert str(tmp_path / "run.yaml") in text


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv.gz", "lines.json", "list.json"])
def test_rows_in_the_place_of_a_configuration_are_called_data(tmp_path: Path, name: str) -> None:
    rows = {"lines.json": '{"problem": "x", "answer": "3"}\n' * 2, "list.json": '[{"problem": "x", "answer": "3"}]'}
    (tmp_path / name).write_text(rows.get(name, "PAR1"))
    text = problems(str(tmp_path / name))
    assert "this is data, not a configuration" in text
    assert f"data.train_files={tmp_path / name}" in text


def test_a_configuration_written_as_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"data": {"seed": 7}}')
    assert load_config([*BASE, model(tmp_path / "model"), str(tmp_path / "run.json")])[0].data.seed == 7


def test_a_folder_that_cannot_be_made_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = problems(model(tmp_path / "model"), f"trainer.save_checkpoint_path={tmp_path / 'file' / 'run'}")
    assert f"trainer.save_checkpoint_path={tmp_path / 'file' / 'run'}" in text
    assert f"{tmp_path / 'file'} is a file" in text


def test_a_model_folder_without_a_readable_configuration_is_named(tmp_path: Path) -> None:
    shard = tmp_path / "step/actor/model_world_size_1_rank_0.pt"
    shard.parent.mkdir(parents=True)
    shard.touch()
    text = problems(f"worker.actor.model.model_path={tmp_path / 'step'}")
    assert f"no config.json: run r1 merge {tmp_path / 'step'} first" in text
    (tmp_path / "step" / "config.json").write_text("{")
    assert "its config.json cannot be read" in problems(f"worker.actor.model.model_path={tmp_path / 'step'}")


def test_a_checkpoint_stands_for_the_model_in_it(tmp_path: Path) -> None:
    def found() -> str | None:
        config, _ = load_config([*BASE, f"worker.actor.model.model_path={tmp_path / 'step'}"])
        return config.worker.actor.model.model_path

    merged = tmp_path / "step/actor/huggingface"
    merged.mkdir(parents=True)
    model(merged)
    (merged / "model.safetensors").touch()
    assert found() == str(merged), "shards of EasyR1 lie beside"
    model(tmp_path / "step/actor")
    assert found() == str(tmp_path / "step/actor")
    model(tmp_path / "step")
    assert found() == str(tmp_path / "step"), "a model, whatever it holds"


def test_a_response_longer_than_the_models_positions_is_refused(tmp_path: Path) -> None:
    plain = {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default"}}
    for settings in (plain, {"text_config": {"max_position_embeddings": 64}}):
        text = problems(model(tmp_path, **settings))
        assert "data.max_response_length=64" in text
        assert "64 positions" in text
    load_config([*BASE, model(tmp_path, max_position_embeddings=65)])
    load_config([*BASE, model(tmp_path, max_position_embeddings=64, rope_scaling={"type": "yarn", "factor": 4})])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("worker.actor.optim.learning_rate=1e-6", "worker.actor.optim.lr"),
        ("worker.actor.learning_rate=1e-6", "worker.actor.optim.lr"),
        ("worker.rollout.num_generations=8", "worker.rollout.n"),
        ("data.max_new_tokens=8", "data.max_response_length"),
    ],
)
def test_the_words_of_other_frameworks_lead_to_ours(typed: str, meant: str) -> None:
    assert f"did you mean {meant}?" in problems("worker.actor.model.model_path=a/b", typed)


def test_workers_start_early_only_where_rows_may_have_media(tmp_path: Path) -> None:
    def asked(*words: str) -> bool:
        return load_config([*BASE, *words])[0].reads_media

    assert asked(model(tmp_path / "sees", vision_config={}))
    assert not asked(model(tmp_path / "sees", vision_config={}), "data.filter_overlong_prompts_workers=1")
    assert not asked(model(tmp_path / "reads"))
    assert not asked("worker.actor.model.model_path=owner/model")


def test_a_full_disk_is_said_and_leaves_no_draft(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.publish(store.write(1, lambda folder: None, {"step": 1}))

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="step 2 could not be written") as caught:
        store.write(2, fail, {})
    assert "No space left" in str(caught.value)
    assert f"resumes from {tmp_path / 'global_step_1'}" in str(caught.value)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["checkpoint_tracker.json", "global_step_1"]


def test_a_run_that_a_signal_ended_says_so_in_its_exit_code() -> None:
    stop = StopRequest()
    assert stop.exit_code == 0
    with stop.listening():
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(Stopped):
        stop.check()
    assert stop.exit_code == 130


def test_a_keyword_that_the_reward_does_not_take_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def score(items, weight=1.0, *, form=0.1): ...\n"
        "def anything(items, **more): ...\n"
        "@print\ndef wrapped(items): ...\n"
    )
    base = [model(tmp_path / "model"), "+worker.reward.reward_function_kwargs.wieght=2"]
    text = problems(*base, f"worker.reward.reward_function={file}:score")
    assert f"{file}:score takes no 'wieght'; did you mean 'weight'?" in text
    for open_ended in ("anything", "wrapped"):
        load_config([*BASE, *base, f"worker.reward.reward_function={file}:{open_ended}"])


def test_a_tilde_is_the_home_folder_in_every_path_that_a_user_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    (tmp_path / "own.py").write_text("def score(inputs): ...\n")
    config, _ = load_config(
        ["worker.actor.model.model_path=~/model", "data.train_files=[~/rows.jsonl, json@~/, owner/rows@train~]",
         "worker.reward.reward_function=~/own.py:score", "trainer.save_checkpoint_path=~/runs/~x"]
    )  # fmt: skip
    assert config.worker.actor.model.model_path == f"{tmp_path}/model"
    assert config.data.train_files == [f"{tmp_path}/rows.jsonl", f"json@{tmp_path}/", "owner/rows@train~"]
    assert config.worker.reward.reward_function == f"{tmp_path}/own.py:score"
    assert config.trainer.checkpoint_folder == tmp_path / "runs/~x"
