"""Run options do what they promise, in real runs of one or two steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from endtoend import QUICKSTART, R1, ROOT, SMALL, read_log, without_clock
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

TWO_STEPS = [
    *SMALL,
    "trainer.max_steps=2",
    "trainer.val_before_train=false",
    "trainer.val_freq=-1",
    "trainer.save_freq=2",
    "worker.rollout.canary=false",  # test_fresh_weights has it
]


def train(r1: R1, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    r1("train", QUICKSTART, *TWO_STEPS, f"trainer.save_checkpoint_path={folder}", *overrides)
    return read_log(folder)


@pytest.fixture(scope="module")
def plain(r1: R1, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train(r1, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "worker.actor.model.enable_gradient_checkpointing=true",
            "worker.actor.model.enable_activation_offload=true",
            "worker.actor.dynamic_batching=false",
            "worker.actor.micro_batch_size_per_device_for_update=2",
            "worker.actor.micro_batch_size_per_device_for_experience=4",
            "worker.reward.num_cpus=2",
            "data.mini_rollout_batch_size=4",
        ],
        ["worker.actor.padding_free=false"],
    ],
    ids=lambda overrides: overrides[0].rsplit(".", 1)[-1],
)
def test_the_split_of_the_work_does_not_change_what_is_learned(
    r1: R1, tmp_path: Path, plain: list[dict[str, Any]], overrides: list[str]
) -> None:
    found, expected = (without_clock(records) for records in (train(r1, tmp_path, *overrides), plain))
    if overrides == ["worker.actor.padding_free=false"]:  # then a prompt is computed with every answer
        for one, other in zip(found, expected, strict=True):
            sizes = [
                {name: record.pop(name) for name in [*record] if "global_seqlen" in name} for record in (one, other)
            ]
            assert sizes[0]["global_seqlen/mean"] > sizes[1]["global_seqlen/mean"]
    # To the precision of sums taken in another order.
    assert found == [pytest.approx(record, rel=1e-3, abs=1e-5) for record in expected]


@pytest.fixture(scope="module")
def frozen(r1: R1, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run of three epochs a step, with a frozen vision tower."""
    folder = tmp_path_factory.mktemp("frozen")
    words = ["worker.actor.ppo_epochs=3", "worker.actor.loss_avg_mode=seq"]
    train(r1, folder, *words, "worker.actor.model.freeze_vision_tower=true")
    return folder / "global_step_2/actor"


def test_each_epoch_over_a_batch_is_another_optimizer_step(frozen: Path) -> None:
    state = json.loads((frozen / "learner.json").read_text())
    assert state["step"] == 2 * 2 * 3  # steps × optimizer steps an epoch × epochs


def test_a_frozen_vision_tower_keeps_its_weights(frozen: Path) -> None:
    folders = ROOT / "examples/quickstart/model", frozen
    before, after = (AutoModelForImageTextToText.from_pretrained(f, dtype="float32").state_dict() for f in folders)
    same = {name: torch.equal(after[name], tensor) for name, tensor in before.items()}
    assert all(kept for name, kept in same.items() if "visual." in name)
    assert not any(kept for name, kept in same.items() if "q_proj.weight" in name and "visual." not in name)


def test_dynamic_sampling_trains_on_groups_that_can_teach(r1: R1, tmp_path: Path) -> None:
    overrides = ["algorithm.online_filtering=true", "algorithm.filter_key=accuracy", "data.mini_rollout_batch_size=2"]
    records = train(r1, tmp_path, *overrides, "worker.rollout.n=3")
    assert sum(record["rollout/groups_sampled"] for record in records) > 8
    for record in records:
        assert record["rollout/groups_trained"] == 4
        # Every kept group of three has one or two right answers.
        assert 1 / 3 <= record["reward/accuracy"] <= 2 / 3
    assert json.loads((tmp_path / "global_step_2/trainer.json").read_text())["cursor"] > 4


def test_dynamic_sampling_gives_up_with_a_smaller_step_not_an_error(r1: R1, tmp_path: Path) -> None:
    never = ["algorithm.online_filtering=true", "algorithm.filter_low=0.98", "trainer.max_try_make_batch=1"]
    process = r1("train", QUICKSTART, *TWO_STEPS, f"trainer.save_checkpoint_path={tmp_path}", *never)
    assert "passed the filter" in process.output
    assert [record["step"] for record in read_log(tmp_path)] == [1, 2]


def test_val_only_validates_and_stops(r1: R1, tmp_path: Path) -> None:
    records = train(r1, tmp_path, "trainer.val_only=true")
    assert [record["step"] for record in records] == [0]
    assert not list(tmp_path.glob("global_step_*"))


def test_the_newest_checkpoints_stay_and_one_without_the_optimizer_can_be_gone_on_from(r1: R1, tmp_path: Path) -> None:
    saved = ["trainer.save_freq=1", "trainer.save_limit=2", "trainer.save_model_only=true"]
    train(r1, tmp_path, *saved, "trainer.max_steps=3")
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_2", "global_step_3"]
    assert not list(tmp_path.glob("global_step_3/actor/optimizer*"))
    changed = [*saved, "trainer.max_steps=4", f"trainer.save_checkpoint_path={tmp_path}"]
    output = r1("train", QUICKSTART, *TWO_STEPS, *changed).output
    assert "the moments start at zero" in output
    assert "setting changed since the last start: trainer.max_steps=4, was 3" in output
    assert [record["step"] for record in read_log(tmp_path)] == [1, 2, 3, 4]
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_3", "global_step_4"]


def test_a_run_wholly_in_bfloat16_trains_and_goes_on(r1: R1, tmp_path: Path) -> None:
    bf16 = ["worker.actor.optim.strategy=adamw_bf16", "worker.actor.fsdp.torch_dtype=null"]
    bf16 += ["algorithm.disable_kl=false", "algorithm.use_kl_loss=true"]
    records = train(r1, tmp_path, *bf16)
    assert [record["step"] for record in records] == [1, 2]
    assert any(record["actor/grad_norm"] > 0 for record in records)
    actor = tmp_path / "global_step_2/actor"
    tensors = load_file(actor / "model.safetensors") | load_file(actor / "optimizer.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    records = train(r1, tmp_path, *bf16, "trainer.max_steps=3", "trainer.save_freq=3")
    assert [record["step"] for record in records] == [1, 2, 3]
    learner = json.loads((tmp_path / "global_step_3/actor/learner.json").read_text())
    assert set(learner["optimizer"]["step"].values()) == {6}  # 3 steps × 2 optimizer steps


def test_wandb_without_a_key_never_asks_and_no_file_of_the_run_holds_a_secret_of_the_environment(
    r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name in ("HF_TOKEN", "R1_SERVERS_TOKEN", "RAY_AUTH_TOKEN", "SWANLAB_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, f"planted-{name}")
    loggers = "trainer.logger=[console,wandb,tensorboard]"
    output = r1("train", QUICKSTART, *TWO_STEPS, f"trainer.save_checkpoint_path={tmp_path}", loggers).output
    assert output.count("wandb has no API key: logging offline") == 1
    assert list(tmp_path.glob("wandb/offline-run-*"))
    assert list(tmp_path.glob("tensorboard/events.*"))
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.json", "manifest.json"} <= {path.name for path in written}
    assert [path for path in written if b"planted-" in path.read_bytes()] == []
