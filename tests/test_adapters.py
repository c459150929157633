"""Runs that train a part of the weights: an adapter, or the parameters that patterns do not freeze."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from endtoend import QUICKSTART, R1, ROOT, SMALL, read_log, without_clock
from safetensors.torch import load_file

from r1_rollout.names import core

pytestmark = pytest.mark.slow

LORA = ["worker.actor.model.lora.rank=8", "worker.actor.model.lora.alpha=16", "worker.actor.optim.lr=2e-3"]
THREE_STEPS = [
    *SMALL, "algorithm.disable_kl=false", "trainer.max_steps=3", "trainer.save_freq=1", "trainer.val_freq=-1",
    "trainer.val_before_train=false",
]  # fmt: skip


def test_a_run_of_an_adapter_is_proven_goes_on_to_the_bit_and_is_read_by_the_other_commands(
    r1: R1, tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    said = r1("train", QUICKSTART, *THREE_STEPS, *LORA, f"trainer.save_checkpoint_path={whole}")
    assert "48,128 of 914,592 weights are trained" in said.output
    assert "one copy of it is in memory" in said.output
    records = read_log(whole)
    assert all(record["rollout/canary_gap"] < 2e-6 for record in records)
    assert records[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-4)
    assert records[2]["actor/kl_loss"] > records[0]["actor/kl_loss"]
    shutil.copytree(whole, resumed)
    for step in (2, 3):
        shutil.rmtree(resumed / f"global_step_{step}")
    r1("train", QUICKSTART, *THREE_STEPS, *LORA, f"trainer.save_checkpoint_path={resumed}")
    assert without_clock(read_log(resumed)) == without_clock(records)
    one, other = (load_file(run / "global_step_3/actor/adapter_model.safetensors") for run in (whole, resumed))
    assert all(tensor.equal(other[name]) for name, tensor in one.items())
    checkpoint = whole / "global_step_3"
    folder = json.loads((checkpoint / "actor/adapter_config.json").read_text())["base_model_name_or_path"]
    assert Path(folder) == ROOT / "examples/quickstart/model"
    r1("merge", checkpoint, "--output", tmp_path / "merged")
    base, merged = (load_file(path / "model.safetensors") for path in (Path(folder), tmp_path / "merged"))
    moved = {name for name, tensor in merged.items() if not torch.equal(tensor, base[name].float())}
    adapted = {name.removeprefix("base_model.model.") for name in one if ".lora_A." in name}
    # Files leave a word out of the names that the model has.
    assert {name.replace("language_model.", "").replace("lora_A.", "") for name in adapted} == moved
    shown = [
        r1("eval", path, f"config={QUICKSTART}", "data.val_files=examples/quickstart/val.parquet[:8]", "--json", out)
        and json.loads(out.read_text())["reward_score"]
        for path, out in ((checkpoint, tmp_path / "one.json"), (tmp_path / "merged", tmp_path / "other.json"))
    ]
    assert shown[0] == shown[1]


def test_what_patterns_freeze_stays_and_groups_are_told_apart(r1: R1, tmp_path: Path) -> None:
    said = r1(
        "train", QUICKSTART, *THREE_STEPS, f"trainer.save_checkpoint_path={tmp_path}", "trainer.max_steps=1",
        r"worker.actor.model.freeze=['.*\.layers\.0\..*','.*embed_tokens.*']",
        "worker.actor.optim.groups=[{pattern: '.*visual.*', lr: 0.0, weight_decay: 0.0, name: vision}]",
    )  # fmt: skip
    assert "of 866,464 weights are trained" in said.output
    assert "of them (vision) at a rate of 0" in said.output
    record = read_log(tmp_path)[0]
    assert record["actor/grad_norm/vision"] > 0
    assert record["actor/grad_norm"] ** 2 >= record["actor/grad_norm/vision"] ** 2
    before, after = (
        {core(name): tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        for folder in (ROOT / "examples/quickstart/model", tmp_path / "global_step_1/actor")
    )
    same = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    assert {name for name in after if "visual." in name or "layers.0." in name or "embed_tokens" in name} <= same
    assert any("layers.1." in name for name in after.keys() - same)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["worker.actor.model.freeze=['.*visul.*']"],
            ["worker.actor.model.freeze", "'.*visul.*' matches none", "visual."],
        ),
        (
            ["worker.actor.optim.groups=[{pattern: layers, lr: 1.0e-3}]"],
            ["worker.actor.optim.groups", "'layers' matches none", "layers.0."],
        ),
        ([*LORA, "worker.actor.model.lora.target_modules=[q_prj]"], ["'q_prj'", "q_proj"]),
        ([*LORA, "worker.actor.optim.strategy=adamw_bf16"], ["worker.actor.optim.strategy", "fp32; set adamw"]),
    ],
)
def test_a_pattern_that_matches_nothing_ends_the_start_with_near_names(
    r1: R1, tmp_path: Path, words: list[str], said: list[str]
) -> None:
    result = r1("train", QUICKSTART, *THREE_STEPS, *words, f"trainer.save_checkpoint_path={tmp_path}", ok=False)
    assert result.exit_code == 2
    assert all(part in result.stderr for part in said), result.stderr
