"""Checkpoints at URLs: uploaded whole or not at all, downloaded on a new machine, and never in the way of a run."""

import json
import logging
from pathlib import Path
from typing import Any

import fsspec
import pytest
from faults_table import note_fault

from r1_cli.checkpoint import remote
from r1_cli.checkpoint.folders import CheckpointError, CheckpointStore
from r1_cli.checkpoint.remote import RemoteFolder, Uploader, fetch_newest
from r1_cli.checkpoint.saving import Saver
from r1_cli.config import ConfigError, load_config
from r1_cli.models.files import find_model_files, resolve_model_path
from r1_cli.models.load import ModelError
from r1_cli.plan.start import fetch_start, find_start

BASE = [
    "data.train_files=owner/rows@train",
    "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
]


def save(saver: Saver, *steps: int) -> None:
    for step in steps:

        def fill(folder: Path, step: int = step) -> None:
            (folder / "actor").mkdir()
            (folder / "actor/learner.json").write_text(json.dumps({"step": step}))

        saver.write(step, fill, {"step": step, "val_reward_score": None}, apart=True)
        saver.publish(lambda: None)
        saver.finish()


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}/run" if request.param == "memory" else f"file://{tmp_path}/bucket/run"


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSE", 0.0)


def open_run(folder: Path, url: str) -> tuple[Saver, Uploader]:
    folder.mkdir(exist_ok=True)
    (folder / "experiment_log.jsonl").write_text("{}")
    store = CheckpointStore(folder, limit=2)
    uploader = Uploader(store, url)
    return Saver(store, published=uploader.upload), uploader


def test_a_new_machine_resumes_from_the_newest_whole_checkpoint_of_the_url(tmp_path: Path, url: str) -> None:
    saver, uploader = open_run(tmp_path / "run", url)
    for step in (1, 2, 3):
        save(saver, step)
        uploader.wait()
    uploader.close()
    assert RemoteFolder(url).steps() == [2, 3], "as many as the run keeps"
    config, _ = load_config([*BASE, f"trainer.upload_path={url}", f"trainer.save_checkpoint_path={tmp_path}/new"])
    store = CheckpointStore(tmp_path / "new")
    assert find_start(fetch_start(config, store), store) == tmp_path / "new/global_step_3"
    assert (tmp_path / "new/experiment_log.jsonl").read_text() == "{}", "the log goes on without a gap"
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/global_step_3/actor/learner.json", b'{"step": 4}')
    assert fetch_newest(url, tmp_path / "damaged") == tmp_path / "damaged/global_step_2"
    fs.rm(f"{root}/global_step_2/trainer.json")  # as if its upload was cut off
    assert RemoteFolder(url).steps() == [3]
    named, _ = load_config([*BASE, f"trainer.load_checkpoint_path={url}/global_step_3"])
    with pytest.raises(ConfigError, match=r"load_checkpoint_path.*learner.json has another checksum"):
        fetch_start(named, CheckpointStore(tmp_path / "other"))
    with pytest.raises(CheckpointError, match=r"has no whole checkpoint global_step_2; its steps: \[3\]"):
        RemoteFolder(url).fetch("global_step_2", tmp_path / "other")


def test_an_upload_that_fails_is_said_once_and_the_next_one_succeeds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("the network is down")

    url = f"file://{tmp_path}/bucket"
    saver, uploader = open_run(tmp_path / "run", url)
    with caplog.at_level(logging.WARNING, "r1"):
        with monkeypatch.context() as patched:
            patched.setattr(RemoteFolder, "_put", refuse)
            for step in (1, 2):
                save(saver, step)
                uploader.wait()
        assert RemoteFolder(url).steps() == []
        save(saver, 3)
        uploader.close()
    assert caplog.text.count("the network is down; the run goes on") == 1
    assert f"checkpoints are uploaded to {url} again" in caplog.text
    assert RemoteFolder(url).steps() == [3]


@pytest.mark.parametrize(
    ("value", "told"),
    [("bucket/run", "is not a URL"), ("s3://key" + ":secret@bucket/run", "put the secret into the environment")],
)
def test_what_is_no_url_or_has_a_password_is_refused(value: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config([*BASE, f"trainer.upload_path={value}"])


def test_a_storage_library_that_is_not_installed_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"gs://bucket/run cannot be opened: .*pip install gcsfs"):
        RemoteFolder("gs://bucket/run")


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    """The file system and the path of a model at a URL."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    fs, root = fsspec.core.url_to_fs(url)
    names = ("config.json", "model.safetensors", "pytorch_model.bin", "optimizer.safetensors", "parts/1.json")
    for name in names:
        fs.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{root}/{name}", name.encode())
    return fs, root


def test_a_model_is_downloaded_once_and_again_when_it_has_changed(url: str, model: tuple[Any, str]) -> None:
    fs, root = model
    first = Path(find_model_files(url))
    assert sorted(path.relative_to(first).as_posix() for path in first.rglob("*.*")) == [
        "config.json", "model.safetensors", "parts/1.json",
    ]  # fmt: skip
    assert (first / "parts/1.json").read_text() == "parts/1.json"
    assert Path(find_model_files(f"{url}/")) == first
    fs.pipe_file(f"{root}/model.safetensors", b"trained on")
    second = Path(find_model_files(url))
    assert second != first
    assert (second / "model.safetensors").read_bytes() == b"trained on"


def test_the_actor_of_a_checkpoint_is_a_model(url: str, model: tuple[Any, str]) -> None:
    fs, root = model
    fs.mv(root, f"{root}_of/actor", recursive=True)
    assert (Path(find_model_files(f"{url}_of")) / "model.safetensors").is_file()


def test_what_was_downloaded_serves_while_the_storage_is_away(
    url: str, model: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("the network is down")

    before = find_model_files(url)
    monkeypatch.setattr(type(model[0]), "find", refuse)
    assert find_model_files(url) == before
    assert "the files of the last download are used" in caplog.text
    note_fault("storage that is away at a restart, with a model at a URL", outcome="goes on")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", f"{before}/other")
    with pytest.raises(OSError, match=r"cannot be downloaded \(ConnectionError: the network is down"):
        find_model_files(url)


def test_a_url_without_a_model_is_named(url: str) -> None:
    with pytest.raises(ModelError, match=r"model_path=.*/nothing: cannot be downloaded .*has no config.json"):
        resolve_model_path(f"{url}/nothing", "worker.actor.model.model_path")


def test_a_password_in_a_models_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="put the secret into the environment"):
        load_config([*BASE, "worker.actor.model.model_path=s3://key" + ":secret@bucket/model"])
