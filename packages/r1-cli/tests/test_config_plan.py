"""The arithmetic of a run: the table that a dry run and a start show."""

import io
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
from rich.console import Console
from safetensors.torch import save_file

from r1_cli.build.learner import build_batching
from r1_cli.checkpoint.folders import CheckpointStore, find_damage
from r1_cli.checkpoint.locks import lock_folder, require_free
from r1_cli.config import ConfigError, Provenance, RunConfig, load_config
from r1_cli.main import main
from r1_cli.plan import disk
from r1_cli.plan.announce import announce, find_oddities, memory_warnings
from r1_cli.plan.batches import Plan, count, make_plan
from r1_cli.plan.disk import checkpoint_bytes, checkpoints_kept, require_disk_space, size_text
from r1_cli.plan.phases import find_phases
from r1_cli.plan.start import find_start, rename_damaged, require_same_shape
from r1_core.learner.batching import rounds
from r1_core.learner.pack import SharedPrompts
from r1_core.types import Sample

ROOT = Path(__file__).parents[3]
BASE = [
    "data.train_files=owner/rows@train",
    "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
]
TUTORIAL = [
    "data.rollout_batch_size=256",
    "worker.rollout.n=6",
    "worker.actor.global_batch_size=64",
    "worker.actor.micro_batch_size_per_device_for_update=2",
    "worker.actor.micro_batch_size_per_device_for_experience=8",
    "trainer.n_gpus_per_node=8",
]


def config_of(*words: str) -> RunConfig:
    return load_config([*BASE, *words])[0]


def text_of(config: RunConfig, plan: Plan) -> str:
    out = io.StringIO()
    announce(Console(file=out, width=100), config, Provenance(notices=("command line: x is now y",)), plan)
    return out.getvalue()


APART = "worker.actor.share_prompts=false"


def test_the_numbers_of_the_tutorial() -> None:
    plan = make_plan(config_of(*TUTORIAL, APART, "trainer.total_epochs=2"), rows=2100)
    assert plan.steps_per_epoch == 8
    assert plan.total_steps == 16
    assert plan.sequences_per_step == 1536
    assert plan.sequences_per_device == 192
    assert plan.sequences_per_optimizer_step_and_device == 48
    assert plan.optimizer_steps_per_step == 4
    assert plan.accumulations == 24
    assert plan.experience_forwards == 24


def test_the_table_shows_them() -> None:
    config = config_of(*TUTORIAL, APART, "worker.actor.dynamic_batching=false")
    lines = [line.split() for line in text_of(config, make_plan(config, rows=2100)).splitlines()]
    for expected in ("rows 2,100", "steps per epoch 8", "sequences 1,536", "sequences per device 192"):
        assert any(line[: len(expected.split())] == expected.split() for line in lines), expected
    for expected in ("sequences per device 48", "optimizer steps 4", "accumulations 24", "log-prob forwards 24"):
        assert any(line[: len(expected.split())] == expected.split() for line in lines), expected


def test_a_token_budget_makes_the_pass_counts_upper_bounds() -> None:
    config = config_of(*TUTORIAL, APART)
    assert "at most 24" in text_of(config, make_plan(config, rows=2100))


@pytest.mark.parametrize(
    ("words", "rows", "total"),
    [
        (["trainer.total_epochs=3"], 1024, 6),
        (["trainer.max_steps=100"], 1024, 100),
        (["trainer.max_steps=100"], None, 100),
        ([], None, None),
        (["data.mini_rollout_batch_size=128", "trainer.total_epochs=1"], 1023, 1),
    ],
)
def test_the_number_of_steps(words: list[str], rows: int | None, total: int | None) -> None:
    assert make_plan(config_of(*words), rows).total_steps == total


def test_optimizer_steps_count_every_epoch_over_the_batch() -> None:
    assert make_plan(config_of("worker.actor.ppo_epochs=3"), 512).optimizer_steps_per_step == 12


def test_devices_that_share_a_sequence_count_as_one() -> None:
    plan = make_plan(config_of(*TUTORIAL, "worker.actor.ulysses_size=2"), 2100)
    assert (plan.devices, plan.sequences_per_device) == (8, 384)


def test_partial_micro_batches_count_whole() -> None:
    plan = make_plan(config_of(*TUTORIAL, APART, "worker.actor.micro_batch_size_per_device_for_update=5"), 2100)
    assert plan.accumulations == 10


def test_token_bounds_follow_from_the_lengths() -> None:
    lengths = ["data.max_prompt_length=100", "data.max_response_length=28"]
    plan = make_plan(config_of(*TUTORIAL, APART, *lengths), 2100)
    assert (plan.tokens_per_micro_batch, plan.tokens_per_step) == (256, 1536 * 128)
    plan = make_plan(config_of(*TUTORIAL, *lengths), 2100)  # 256 prompts with 6 answers each
    assert (plan.tokens_per_micro_batch, plan.tokens_per_step) == (256, 256 * 100 + 1536 * 28)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("micro", [1, 2, 4, 6, 8, 16, 64])
@pytest.mark.parametrize("lengths", [(100, 28), (10, 40)], ids=str)
def test_micro_batches_of_shared_prompts_are_those_that_full_groups_are_cut_into(
    lengths: tuple[int, int], micro: int, dynamic: bool
) -> None:
    prompt, answer = lengths
    words = [f"data.max_prompt_length={prompt}", f"data.max_response_length={answer}"]
    words += [f"worker.actor.dynamic_batching={dynamic}".lower(), "trainer.n_gpus_per_node=2"]
    config = config_of(*TUTORIAL, *words, f"worker.actor.micro_batch_size_per_device_for_update={micro}")
    plan, token_ids = make_plan(config, 2100), torch.zeros(prompt + answer, dtype=torch.int64)
    samples = [
        Sample(
            torch.cat([torch.full((prompt,), group), token_ids[prompt:]]), torch.arange(prompt + answer) >= prompt,
            torch.arange(prompt + answer)[None], group, 0.0, prompt_length=prompt,
        )
        for group in range(64) for _ in range(6)
    ]  # fmt: skip
    limit = build_batching(config, config.worker.actor).update
    cut = rounds(samples, limit, 2, share_prompts=True)
    assert len(cut) <= plan.accumulations if dynamic else len(cut) == plan.accumulations
    work = SharedPrompts.find(samples)
    assert max(work.tokens(part) for parts in cut for part in parts) <= plan.tokens_per_micro_batch
    assert plan.accumulations <= 1.5 * len(cut) + 1


def test_a_card_with_too_little_memory_is_warned_of_with_what_to_set(tmp_path: Path) -> None:
    model = f"worker.actor.model.model_path={ROOT}/examples/quickstart/model"
    config = config_of(model, "trainer.n_gpus_per_node=1", "data.max_prompt_length=64", "data.max_response_length=20")
    plan = make_plan(config, 10**4)
    assert plan.memory is not None
    phases = find_phases(config, plan.memory, None)
    needed = max(phase.total for phase in phases)
    assert memory_warnings(config, phases, None) == memory_warnings(config, phases, needed) == []
    (warning,) = memory_warnings(config, phases, needed - 1)
    assert "of this GPU: " in warning


def test_that_padding_leaves_no_prompt_to_share_is_said() -> None:
    config = config_of(*TUTORIAL, "worker.actor.padding_free=false")
    plan = make_plan(config, 2100)
    assert not plan.shares_prompts
    assert "worker.actor.share_prompts takes worker.actor.padding_free=true" in text_of(config, plan)


def test_the_plan_says_how_stale_samples_are_corrected() -> None:
    key = "algorithm.rollout_correction.rollout_is"
    for words, expected in (
        (["trainer.max_staleness=1"], f"importance weights by token correct for that ({key}=token; null turns it off)"),
        (["trainer.max_staleness=1", f"{key}=null"], f"nothing corrects for that ({key}=null): set {key}=token"),
        (
            ["algorithm.online_filtering=true"],
            "groups that a step did not need are trained on up to 1 step later; importance weights by token",
        ),
    ):
        config = config_of(*words)
        assert any(expected in note for note in find_oddities(config, make_plan(config, 512)))
    assert not any("max_staleness" in note for note in find_oddities(config_of(), make_plan(config_of(), 512)))


def test_too_few_rows_for_one_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.rollout_batch_size=512.*more than the 100 rows"):
        make_plan(config_of(), 100)


def test_a_broken_row_of_too_few_is_named_by_file_and_line(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "answer": "1"}\n{"prompt": "x", "ans', encoding="utf-8")
    config = config_of(f"data.train_files={rows}")
    with pytest.raises(ConfigError) as caught:
        make_plan(config, *count(config))
    first, second = caught.value.problems
    assert str(first).startswith(f"data.train_files: {rows}:2: not a JSON row (Unterminated string")
    assert "more than the 2 rows" in second.message


def test_local_rows_are_counted_and_hub_rows_are_not(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "answer": "1"}\n' * 7, encoding="utf-8")
    assert count(config_of(f"data.train_files={rows}", f"data.val_files=[{rows}]")) == ([7], 7, 0)
    assert count(config_of(f"data.val_files={rows}")) == (None, 7, 0)
    config = config_of()
    assert "not downloaded" in text_of(config, make_plan(config, *count(config)))


def write_model(folder: Path) -> None:
    """Write the header of a safetensors file of 100 + 20 values; the values themselves are never read."""
    tensors = {"model.w": [10, 10], "visual.w": [20]}
    header = json.dumps(
        {"__metadata__": {"format": "pt"}}
        | {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in tensors.items()}
    ).encode()
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def test_memory_is_read_off_the_headers_of_a_local_model(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    shutil.copy(tmp_path / "model/model.safetensors", tmp_path / "model/optimizer-00001-of-00002.safetensors")
    model = f"worker.actor.model.model_path={tmp_path / 'model'}"
    memory = make_plan(config_of(model, "trainer.n_gpus_per_node=1"), 512).memory
    assert memory is not None
    assert (memory.parameters, memory.weights, memory.gradients, memory.optimizer) == (120, 480, 480, 960)
    assert (memory.reference, memory.engine, memory.total) == (240, 240, 2400)
    words = ["algorithm.disable_kl=true", "worker.actor.model.freeze_vision_tower=true", "worker.rollout.dtype=fp32"]
    memory = make_plan(config_of(model, "trainer.n_gpus_per_node=1", *words), 512).memory
    assert memory is not None
    assert (memory.gradients, memory.optimizer, memory.reference, memory.engine) == (400, 800, 0, 480)
    strategy = "worker.actor.optim.strategy=adamw_bf16"
    memory = make_plan(config_of(model, "trainer.n_gpus_per_node=1", strategy), 512).memory
    assert memory is not None
    assert (memory.weights, memory.gradients, memory.optimizer, memory.reference) == (240, 720, 720, 240)
    one = ["worker.actor.global_batch_size=1", "worker.actor.micro_batch_size_per_device_for_update=5"]
    memory = make_plan(config_of(model, "trainer.n_gpus_per_node=1", strategy, *one), 512).memory
    assert memory is not None
    assert memory.gradients == 240  # a single micro-batch has nothing to add up


def test_an_adapter_takes_its_factors_alone_and_no_second_model(tmp_path: Path) -> None:
    shapes = {"layers.0.q_proj": (8, 4), "visual.qkv": (6, 4), "embed_tokens": (9, 4)}
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    save_file(
        {f"model.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()},
        tmp_path / "model/model.safetensors",
    )
    words = [f"worker.actor.model.model_path={tmp_path / 'model'}", "trainer.n_gpus_per_node=1"]
    config = config_of(*words, "worker.actor.model.lora.rank=2")
    memory = make_plan(config, 512).memory
    assert memory is not None
    assert (memory.parameters, memory.trained) == (92, 24)
    assert (memory.weights, memory.gradients, memory.optimizer, memory.reference) == (184 + 96, 96, 192, 0)
    assert checkpoint_bytes(config) == 96 + 192
    one = ["worker.actor.model.lora.rank=2", "worker.actor.model.lora.target_modules=[qkv]"]
    memory = make_plan(config_of(*words, *one, "worker.actor.model.lora.exclude_modules=null"), 512).memory
    assert memory is not None
    assert memory.trained == 20
    memory = make_plan(config_of(*words, r"worker.actor.model.freeze=['model\.layers\..*']"), 512).memory
    assert memory is not None
    assert memory.trained == 60


def test_memory_of_a_hub_model_or_a_broken_file_is_unknown(tmp_path: Path) -> None:
    assert make_plan(config_of(), 512).memory is None
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"not safetensors")
    config = config_of(f"worker.actor.model.model_path={tmp_path / 'model'}")
    assert make_plan(config, 512).memory is None
    assert "unknown" in text_of(config, make_plan(config, 512))


@pytest.mark.parametrize(
    ("words", "steps", "kept"),
    [
        ("trainer.save_freq=5 trainer.save_limit=3", 100, 5),  # beside the newest the best one, and one being written
        ("trainer.save_freq=5 trainer.save_limit=3 trainer.val_freq=-1", 100, 4),
        ("trainer.save_freq=5 trainer.save_limit=3", 12, 3),
        ("trainer.save_freq=5 trainer.save_limit=-1", 100, 20),
        ("trainer.save_freq=5", None, 1),
        ("trainer.save_freq=-1", 100, 0),
    ],
)
def test_checkpoints_are_counted_as_they_come_to_lie_on_the_disk(words: str, steps: int | None, kept: int) -> None:
    assert checkpoints_kept(config_of(*words.split()), steps) == kept


def test_a_disk_without_room_for_one_checkpoint_is_refused_and_for_those_that_are_kept_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model")
    words = [f"worker.actor.model.model_path={tmp_path / 'model'}", f"trainer.save_checkpoint_path={tmp_path / 'a/b'}"]
    words += ["trainer.n_gpus_per_node=1", "trainer.save_freq=1", "trainer.save_limit=2", "trainer.max_steps=9"]
    config = config_of(*words)  # 480 bytes of weights, 960 of the optimizer
    free = 1439
    monkeypatch.setattr(disk, "disk_usage", lambda folder: (0, 0, free) if folder == tmp_path else None)
    with pytest.raises(
        ConfigError, match=r"save_checkpoint_path=.*b: a checkpoint takes about 1.44 KB, and .* 1.44 KB"
    ):
        require_disk_space(config)
    require_disk_space(config_of(*words, "trainer.save_model_only=true"))
    require_disk_space(config_of(*words, "trainer.save_freq=-1"))
    free = 4 * 1440 - 1
    require_disk_space(config)
    assert "note: 4 checkpoints of about 1.44 KB come to lie in" in text_of(config, make_plan(config, 512))
    free = 4 * 1440
    assert "come to lie in" not in text_of(config, make_plan(config, 512))
    require_disk_space(config_of("trainer.save_freq=1"))  # of a model of the hub nothing is known yet


def test_the_announcement_names_limits_and_notices() -> None:
    config = config_of("worker.rollout.name=embedded", "worker.rollout.limit_images=3")
    text = text_of(config, make_plan(config, 512))
    assert "worker.rollout.limit_images=3" in text
    assert "note: command line: x is now y" in text


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 KB"), (7_600_000_000, "7.6 GB")])
def test_sizes_read_easily(size: int, text: str) -> None:
    assert size_text(size) == text


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


def test_a_file_that_a_checkpoint_was_written_with_and_lacks_is_damage_and_so_is_its_state(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "owner/model")
    config, store = starting(run, "owner/model"), CheckpointStore(run)
    written = store.publish(store.write(4, lambda folder: (folder / "optimizer.safetensors").write_bytes(b""), {}))
    (written / "optimizer.safetensors").unlink()
    assert store.damaged() == {written: "optimizer.safetensors is missing"}
    (run / "global_step_5/actor").mkdir(parents=True)
    (run / "global_step_5/actor/learner.json").write_text("{}")
    assert store.damaged() == {run / "global_step_5": "trainer.json is missing", written: store.damaged()[written]}
    assert find_start(config, store) == run / "global_step_3"
    store.publish(store.write(5, lambda folder: None, {}))  # as a run that goes on from another folder's checkpoint
    assert (run / "damaged_global_step_5/actor/learner.json").is_file()


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
