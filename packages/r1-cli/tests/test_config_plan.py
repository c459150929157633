"""The arithmetic of a run: the table that a dry run and a start show."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from r1_cli.build.learner import build_batching
from r1_cli.config import ConfigError, Provenance, RunConfig, load_config
from r1_cli.plan import disk
from r1_cli.plan.announce import announce, find_oddities, memory_warnings
from r1_cli.plan.batches import Plan, count, make_plan
from r1_cli.plan.disk import checkpoint_bytes, checkpoints_kept, require_disk_space, size_text
from r1_cli.plan.phases import find_phases
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
