"""`examples/one_file.py` is GRPO, needs no r1-cli, and learns."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from statistics import fmean
from types import ModuleType

import pytest
import torch
from endtoend import ROOT

from r1_core.advantages import GRPO, assign
from r1_core.losses.ppo import PPOClip
from r1_core.types import LossInputs, Sample, Totals

FILE = ROOT / "examples/one_file.py"


@pytest.fixture(scope="module")
def one_file() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("one_file", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["one_file"] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["one_file"]


def test_the_file_has_the_four_leaf_packages_and_nothing_of_the_application() -> None:
    source = FILE.read_text()
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    ours = {name.split(".")[0] for name in imported if name.startswith("r1_")}
    assert ours == {"r1_core", "r1_data", "r1_rewards", "r1_rollout"}
    assert len(source.splitlines()) <= 220


def test_its_advantages_are_those_of_the_package(one_file: ModuleType) -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.1, 1.0], [0.5, 0.5, 0.5, 0.5]])
    samples = [
        Sample(torch.arange(3), torch.tensor([False, True, True]), torch.arange(3)[None], row, float(reward))
        for row, group in enumerate(rewards)
        for reward in group
    ]
    found = one_file.grpo_advantages(rewards).flatten()
    expected = [float(sample.advantages[-1]) for sample in assign(samples, GRPO()) if sample.advantages is not None]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_its_loss_and_gradient_are_those_of_the_package(one_file: ModuleType) -> None:
    torch.manual_seed(0)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    inputs = LossInputs(
        logprobs=torch.randn(2, 3).requires_grad_(),
        loss_mask=mask,
        advantages=torch.tensor([[1.0], [-1.0]]).expand(2, 3),
        old_logprobs=torch.randn(2, 3),
        totals=Totals(tokens=4, sequences=2),
    )
    ours, theirs = (
        loss(inputs)[0].masked_select(mask)
        for loss in (
            one_file.ClippedLoss(),
            PPOClip(clip_low=one_file.CLIP_LOW, clip_high=one_file.CLIP_HIGH, clip_dual=float("inf")),
        )
    )
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(losses.sum(), inputs.logprobs)[0] for losses in (ours, theirs)]
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
def test_it_learns_to_count(one_file: ModuleType) -> None:
    """Half as many prompts as the example and twice its learning rate: fourteen small steps."""
    with one_file.open_trainer(prompts=8, learning_rate=2e-4) as trainer:
        rewards = [trainer.step(number)["reward"] for number in range(14)]
    assert fmean(rewards[-4:]) > fmean(rewards[:4]) + 0.25
