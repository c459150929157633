"""Runs that distil: both forms, on one rank and on two, and what they record."""

from pathlib import Path

import pytest
import torch
from endtoend import QUICKSTART, R1, ROOT, SMALL, read_log
from safetensors.torch import load_file, save_file

from r1_cli.runs.reader import RunReader

MODEL = ROOT / "examples/quickstart/model"
STEPS = [
    "trainer.max_steps=2", "trainer.save_freq=-1", "trainer.val_freq=-1", "trainer.val_before_train=false",
    "worker.reward.reward_function=null", "worker.rollout.n=1", "worker.actor.global_batch_size=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model with noise on its weights."""
    folder = tmp_path_factory.mktemp("teacher")
    for file in MODEL.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(0)
    weights = load_file(MODEL / "model.safetensors")
    noisy = {name: value + 0.01 * torch.randn(value.shape).to(value.dtype) for name, value in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("form", ["advantage", "loss"])
def test_two_ranks_distil_as_one_does(r1: R1, tmp_path: Path, teacher: Path, form: str) -> None:
    words = [*STEPS, f"worker.teacher.model.model_path={teacher}", f"algorithm.distillation.form={form}"]
    logs = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        more = [f"trainer.save_checkpoint_path={folder}", f"trainer.n_gpus_per_node={ranks}"]
        result = r1("train", QUICKSTART, *SMALL, *words, *more)
        assert result.exit_code == 0, result.output
        assert "distillation: 1 · " in result.output
        logs.append([record for record in read_log(folder) if "actor/grad_norm" in record])
        recorded = [row["teacher_logprobs"] for row in RunReader(folder).samples(1)]
        assert all(row is None if form == "loss" else min(row) < 0 for row in recorded)
    name = "distillation/kl" if form == "advantage" else "distillation/divergence"
    for one, two in zip(*logs, strict=True):
        assert one["actor/grad_norm"] > 1e-3
        for key in (name, "actor/grad_norm", "critic/advantages/mean"):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-6)
