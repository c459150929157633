"""Where a run starts: the folder of another run, damaged checkpoints, two runs in one folder."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from faults_table import note_fault
from safetensors.torch import save_file

from r1_cli.checkpoint.damage import find_damage
from r1_cli.checkpoint.folders import CheckpointStore
from r1_cli.checkpoint.locks import lock_folder, require_free
from r1_cli.config import ConfigError, RunConfig, load_config
from r1_cli.main import main
from r1_cli.plan.start import find_start, rename_damaged, require_same_shape
from r1_core.learner.tensor_files import save as save_tensors

ROOT = Path(__file__).parents[3]
BASE = [
    "data.train_files=owner/rows@train",
    "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
]


def config_of(*words: str) -> RunConfig:
    return load_config([*BASE, *words])[0]


def make_run(folder: Path, model: str, **shape: Any) -> Path:
    """A folder as a run leaves it that was started from a model."""
    actor = folder / "global_step_3/actor"
    actor.mkdir(parents=True)
    (folder / "global_step_3/trainer.json").write_text("{}")
    (folder / "experiment_config.json").write_text(json.dumps({"worker": {"actor": {"model": {"model_path": model}}}}))
    (actor / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": 64, **shape}))
    return folder


def starting(folder: Path, model: str, *more: str) -> RunConfig:
    return config_of(f"worker.actor.model.model_path={model}", f"trainer.save_checkpoint_path={folder}", *more)


def test_a_folder_of_another_models_run_is_refused_with_what_to_set(tmp_path: Path) -> None:
    old, new, copied = (tmp_path / name for name in ("old", "new", "copied"))
    for folder in (old, new):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    run = make_run(tmp_path / "run", str(old))
    store = CheckpointStore(run)
    assert find_start(starting(run, str(old)), store) == run / "global_step_3"
    for model in (str(new), "owner/model"):
        with pytest.raises(
            ConfigError, match=r"not the model of the run in .*run, which was started from .*old"
        ) as error:
            find_start(starting(run, model), store)
        for key in ("trainer.experiment_name", f"trainer.load_checkpoint_path={run}/global_step_3"):
            assert key in str(error.value)
        assert find_start(starting(run, model, f"trainer.load_checkpoint_path={run}/global_step_3"), store)
        assert find_start(starting(run, model), CheckpointStore(tmp_path / "another")) is None
    copied.symlink_to(old)
    assert find_start(starting(run, str(copied)), store)
    copied.unlink()
    old.rename(copied)  # the model has moved: nothing tells that it is another one
    assert find_start(starting(run, str(copied)), store)


@pytest.mark.parametrize("damaged", ["", "[]", "{"])
def test_damaged_settings_beside_checkpoints_are_refused_by_their_file(tmp_path: Path, damaged: str) -> None:
    run = make_run(tmp_path / "run", "model")
    (run / "experiment_config.json").write_text(damaged)
    with pytest.raises(ConfigError, match=r"experiment_config.json is damaged \(.*restore the file, or delete it"):
        find_start(starting(run, "model"), CheckpointStore(run))


def test_a_checkpoint_of_another_architecture_is_named_before_weights_are_loaded(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "owner/model")
    config, start = starting(run, "owner/model"), run / "global_step_3"
    same = {"model_type": "qwen2", "hidden_size": 64, "vocab_size": 7}
    require_same_shape(config, start, same)
    require_same_shape(config, None, {**same, "hidden_size": 128})
    with pytest.raises(ConfigError, match=r"experiment_name .*\(hidden_size 64 there, 128 here\)"):
        require_same_shape(config, start, {**same, "hidden_size": 128})
    with pytest.raises(ConfigError, match=r"model_type qwen2 there, qwen2_vl here"):
        require_same_shape(config, start, {"model_type": "qwen2_vl", "text_config": {"hidden_size": 64}})


def test_damaged_checkpoints_are_passed_over_by_name_and_never_pruned_for_or_removed(tmp_path: Path) -> None:
    run, store = make_run(tmp_path / "run", "owner/model"), CheckpointStore(tmp_path / "run", limit=1)
    config = starting(run, "owner/model")
    for step in (5, 7):
        shutil.copytree(run / "global_step_3", run / f"global_step_{step}")
    save_file({"x": torch.zeros(9)}, run / "global_step_7/actor/model.safetensors")
    whole = (run / "global_step_7/actor/model.safetensors").read_bytes()
    (run / "global_step_7/actor/model.safetensors").write_bytes(whole[:-1])
    (run / "global_step_5/trainer.json").write_text('{"step": ')
    assert find_start(config, store) == run / "global_step_3"
    five, seven = rename_damaged(store, run / "global_step_3")[::-1]
    assert "actor/model.safetensors: it has " in seven
    assert "trainer.json is cut off" in five
    assert "2 steps are taken again" in five
    store.publish(store.write(4, lambda folder: None, {}))
    assert store.steps() == [4]
    assert (run / "damaged_global_step_7/actor/model.safetensors").read_bytes() == whole[:-1]
    (run / "global_step_4/trainer.json").write_text("")
    with pytest.raises(ConfigError, match=r"no complete checkpoint \(global_step_4: trainer.json .*experiment_name"):
        find_start(config, store)
    with pytest.raises(ConfigError, match=r"load_checkpoint_path.*is damaged: trainer.json is cut off"):
        find_start(starting(run, "owner/model", f"trainer.load_checkpoint_path={run}/global_step_4"), store)
    note_fault("the newest checkpoint is cut off", outcome="resumes")


@pytest.mark.parametrize("place", ["tensor", "name", "text", "state"])
def test_a_flipped_bit_in_the_newest_checkpoint_falls_back_to_the_one_before_with_one_line(
    tmp_path: Path, place: str
) -> None:
    run = make_run(tmp_path / "run", "owner/model")

    def fill(folder: Path) -> None:
        (folder / "actor").mkdir()
        save_tensors({"weight": torch.arange(1000.0)}, folder / "actor/model.safetensors")
        (folder / "actor/learner.json").write_text('{"step": 12}')

    store = CheckpointStore(run, limit=1)
    written = store.publish(store.write(4, fill, {"step": 4, "val_reward_score": None}))
    shutil.copytree(written, run / "global_step_3", dirs_exist_ok=True)
    file, before, after, told = {
        "tensor": ("actor/model.safetensors", b"\x00\x80\x26\x44", b"\x00\x80\x27\x44", "tensor 'weight' has another"),
        "name": ("actor/model.safetensors", b'"weight":{', b'"wfight":{', "tensor 'wfight' has another checksum"),
        "text": ("actor/learner.json", b"12", b"13", "actor/learner.json has another checksum"),
        "state": ("trainer.json", b'"step": 4', b'"step": 5', "trainer.json has another checksum"),
    }[place]
    content = (written / file).read_bytes()
    assert content.count(before) == 1
    (written / file).write_bytes(content.replace(before, after))
    assert find_damage(written) is None, "nothing is truncated or missing"
    config, store = starting(run, "owner/model"), CheckpointStore(run, limit=1)
    assert find_start(config, store) == run / "global_step_3"
    (line,) = rename_damaged(store, run / "global_step_3")
    assert told in line
    assert line.endswith(
        "it is now damaged_global_step_4, and the run resumes from global_step_3: 1 step is taken again"
    )
    named = starting(run, "owner/model", f"trainer.load_checkpoint_path={run}/damaged_global_step_4")
    with pytest.raises(ConfigError, match=r"load_checkpoint_path.*is damaged: .*another checksum"):
        find_start(named, store)
    note_fault("a flipped bit in the newest checkpoint", outcome="resumes")


def test_a_file_that_a_checkpoint_was_written_with_and_lacks_is_damage_and_so_is_its_state(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "owner/model")
    config, store = starting(run, "owner/model"), CheckpointStore(run)
    written = store.publish(store.write(4, lambda folder: save_file({}, folder / "optimizer.safetensors"), {}))
    (written / "optimizer.safetensors").unlink()
    assert store.damaged() == {written: "optimizer.safetensors is missing"}
    (run / "global_step_5/actor").mkdir(parents=True)
    (run / "global_step_5/actor/learner.json").write_text("{}")
    assert store.damaged() == {run / "global_step_5": "trainer.json is missing", written: store.damaged()[written]}
    assert find_start(config, store) == run / "global_step_3"
    store.publish(store.write(5, lambda folder: None, {}))  # as a run that goes on from another folder's checkpoint
    assert (run / "damaged_global_step_5/actor/learner.json").is_file()
    note_fault("a file of the newest checkpoint is missing", outcome="resumes")


def test_a_damaged_checkpoint_is_none_of_those_that_save_limit_keeps(tmp_path: Path) -> None:
    run, store = make_run(tmp_path / "run", "owner/model"), CheckpointStore(tmp_path / "run", limit=2)
    for step in (5, 7):
        shutil.copytree(run / "global_step_3", run / f"global_step_{step}")
    (run / "global_step_5/actor/config.json").write_text("{")
    (line,) = rename_damaged(store, find_start(starting(run, "owner/model"), store))
    assert line.endswith("it is now damaged_global_step_5, and the run resumes from global_step_7")
    store.publish(store.write(9, lambda folder: None, {}))
    assert store.steps() == [7, 9]


def test_checkpoints_of_another_trainer_are_named_not_resumed_and_never_removed(tmp_path: Path) -> None:
    shard = tmp_path / "run/global_step_4/actor/model_world_size_1_rank_0.pt"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"weights")
    store, words = CheckpointStore(tmp_path / "run", limit=1), (tmp_path / "run", "owner/model")
    assert (store.damaged(), store.latest(), store.foreign()) == ({}, None, [4])
    with pytest.raises(ConfigError, match=r"r1 has not written \(global_step_4\).*experiment_name"):
        find_start(starting(*words), store)
    assert find_start(starting(*words, "trainer.find_last_checkpoint=false"), store) is None
    store.publish(store.write(4, lambda folder: None, {}))
    assert (tmp_path / "run/foreign_global_step_4/actor" / shard.name).read_bytes() == b"weights"
    assert find_start(starting(*words), store) == tmp_path / "run/global_step_4"


def test_an_index_of_a_missing_file_is_damage(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-2.safetensors"}}')
    assert find_damage(tmp_path) == "model-2.safetensors is missing"
    (tmp_path / "model-2.safetensors").write_bytes(b"")
    assert find_damage(tmp_path) == "model-2.safetensors: its header is cut off"


HOLD = """
import os, sys, time
from pathlib import Path
from r1_cli.checkpoint.locks import lock_folder
with lock_folder(Path(sys.argv[1])):
    child = os.fork()  # as libraries do; it outlives a run that is killed
    if child:
        print(child, flush=True)
    time.sleep(600)
"""


def test_two_runs_never_share_a_folder_and_a_killed_one_leaves_it_free(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", str(ROOT / "examples/quickstart/model"))
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        child = int(first.stdout.readline())
        said = rf"save_checkpoint_path={run}.*in use by another run: process {first.pid} on {platform.node()}"
        with pytest.raises(ConfigError, match=said), lock_folder(run):
            pass
        words = ["train", str(ROOT / "examples/quickstart/config.yaml"), f"trainer.save_checkpoint_path={run}"]
        refused = CliRunner().invoke(main, [*words, "--dry-run"])
        assert refused.exit_code == 2
        assert f"process {first.pid} on " in refused.stderr
        first.kill()
        first.wait()
        try:
            require_free(run)
        finally:
            os.kill(child, signal.SIGKILL)
    with lock_folder(run), pytest.raises(ConfigError, match="in use by another run"):
        require_free(run)
    with lock_folder(tmp_path / "refused"):  # a configuration that is refused writes nothing
        pass
    assert not (tmp_path / "refused").exists()
    note_fault("a second run in the same folder", outcome="refused")


def test_a_dry_run_says_last_what_would_be_resumed(tmp_path: Path) -> None:
    model = ROOT / "examples/quickstart/model"
    words = ["train", str(ROOT / "examples/quickstart/config.yaml"), "--dry-run"]
    words += [f"worker.actor.model.model_path={model}"]
    run, new = make_run(tmp_path / "run", str(model)), tmp_path / "new"
    for folder, last in ((run, f"resumes from {run}/global_step_3"), (new, f"starts anew in {new}")):
        result = CliRunner().invoke(main, [*words, f"trainer.save_checkpoint_path={folder}"])
        assert result.exit_code == 0, result.output
        assert result.stdout.splitlines()[-1] == last
    other = make_run(tmp_path / "other", "owner/another")
    refused = CliRunner().invoke(main, [*words, f"trainer.save_checkpoint_path={other}"])
    assert refused.exit_code == 2
    assert "trainer.experiment_name" in refused.stderr
