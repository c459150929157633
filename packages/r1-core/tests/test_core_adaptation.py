"""Only the adapter is trained, synced and saved; parameter groups by pattern have their own rates and norms."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from core_toy import Toy, samples
from safetensors.torch import load_file
from torch import Tensor, nn

from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.checkpoint import Adaptation
from r1_core.learner.optim import RateGroup, build_optimizer, group_norms, matching
from r1_core.learner.tensor_files import cut
from r1_core.objective import Objective

NAMES = ["layers.0.weight", "layers.0.bias", "layers.1.weight", "visual.blocks.0.qkv.weight", "lm_head.weight"]


class AdaptedHead(nn.Linear):
    """A head with something trained beside it, which can be left out."""

    def __init__(self) -> None:
        super().__init__(6, 11, bias=False)
        self.factor = nn.Parameter(0.3 * torch.randn(11, 6))
        self.used = True

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + (hidden @ self.factor.t() if self.used else 0)


def adapted_learner(digest: str = "abc") -> Learner:
    """A toy whose adapter is on its head, which the full KL computes some tokens at a time."""
    model: Any = Toy()
    model.head = AdaptedHead()
    model.double()
    for name, param in model.named_parameters():
        param.requires_grad_(name == "head.factor")

    @contextmanager
    def off() -> Iterator[None]:
        model.head.used = False
        yield
        model.head.used = True

    adaptation = Adaptation(
        {"head.factor": "base.head.factor"}, off, {"adapter_config.json": "{}\n"}, {"name": "toy", "digest": digest}
    )
    return Learner(
        model, build_optimizer(model.named_parameters(), lr=1e-2), lambda step: 1.0, reference=model,
        batching=Batching(True, MicroLimit(1)), adaptation=adaptation,
    )  # fmt: skip


@pytest.mark.parametrize("penalty", ["low_var_kl", "full"])
def test_the_model_without_its_adapter_is_the_reference(penalty: Any) -> None:
    learner, other = adapted_learner(), adapted_learner()
    apart: Any = adapted_learner().model
    apart.head.used = False
    other = Learner(
        other.model, other.optimizer, lambda step: 1.0, reference=apart, batching=Batching(True, MicroLimit(1))
    )
    objective = Objective(kl_penalty=penalty, kl_coef=0.1)
    for _ in range(2):
        found = []
        for one in (learner, other):
            annotated = one.add_logprobs(samples(), ["old_logprobs", "ref_logprobs", "full_kl"])
            found.append(one.forward_backward(annotated, objective) | one.optim_step())
        assert found[0] == pytest.approx(found[1], abs=1e-12)
        assert found[0]["kl_loss"] > 1e-3
    assert [name for name, _ in learner.weights()] == ["head.factor"]


def test_a_checkpoint_of_an_adapter_holds_no_more_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    learner, resumed = adapted_learner(), adapted_learner()
    for _ in range(2):
        learner.forward_backward(samples(), Objective())
        learner.optim_step()
    learner.save(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "learner.json",
    }  # fmt: skip
    assert [*load_file(tmp_path / "adapter_model.safetensors")] == ["base.head.factor"]
    assert json.loads((tmp_path / "learner.json").read_text())["base"] == {"name": "toy", "digest": "abc"}
    resumed.load(tmp_path)
    for one in (learner, resumed):
        one.forward_backward(samples(), Objective())
        one.optim_step()
    assert dict(learner.weights())["head.factor"].equal(dict(resumed.weights())["head.factor"])


def test_an_adapter_is_one_file_whatever_its_size() -> None:
    tensors = {name: torch.zeros(100) for name in "abc"}
    assert len(cut("model", tensors, 400)) == 3
    assert [file.name for file in cut("adapter_model", tensors, 400)] == ["adapter_model.safetensors"]


def test_an_adapter_of_another_base_and_a_whole_model_are_refused(tmp_path: Path) -> None:
    adapted_learner().save(tmp_path / "adapter", model_only=True)
    with pytest.raises(
        ValueError, match=re.escape("holds an adapter of toy (abc…), but the weights of toy are others")
    ):
        adapted_learner("xyz").load(tmp_path / "adapter", model_only=True)
    model = Toy()
    whole = Learner(model, build_optimizer(model.named_parameters(), lr=1e-2), lambda step: 1.0)
    whole.save(tmp_path / "whole", model_only=True)
    with pytest.raises(ValueError, match="holds a whole model, and what is trained here is an adapter"):
        adapted_learner().load(tmp_path / "whole", model_only=True)
    with pytest.raises(FileNotFoundError, match=re.escape("has neither model.safetensors nor")):
        whole.load(tmp_path / "adapter", model_only=True)


def test_groups_have_rates_decays_and_norms_of_their_own() -> None:
    model = Toy()
    groups = [RateGroup("head", r"head\..*", 0.5, 0.0), RateGroup("weights", r".*\.weight", 0.25)]
    optimizer = build_optimizer(model.named_parameters(), lr=1.0, weight_decay=0.1, groups=groups)
    found = [(g["name"], len(g["params"]), g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert found == [("rest", 2, 1.0, 0.1), ("head", 1, 0.5, 0.0), ("weights", 3, 0.25, 0.1)]
    learner = Learner(model, optimizer, lambda step: 0.5, max_grad_norm=1e9)
    learner.forward_backward(samples(), Objective())
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    expected = {
        f"grad_norm/{group['name']}": torch.cat([p.grad.flatten() for p in group["params"]]).norm().item()
        for group in optimizer.param_groups
    }
    assert group_norms(optimizer) == pytest.approx(expected)
    metrics = learner.optim_step()
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics["lr"] == 0.5
    assert metrics["grad_norm"] == pytest.approx(sum(norm**2 for norm in expected.values()) ** 0.5)
    moved = {name: (param - before[name]).abs().max().item() for name, param in model.named_parameters()}
    assert moved["head.weight"] == pytest.approx(0.25, rel=0.2)
    assert moved["layers.0.bias"] == pytest.approx(0.5, rel=0.2)


@pytest.mark.parametrize("names", [("one", "one"), ("one", "rest")])
def test_groups_are_told_apart_by_their_names(names: tuple[str, str]) -> None:
    groups = [RateGroup(name, pattern, 0.5) for name, pattern in zip(names, (r"head\..*", ".*"), strict=True)]
    with pytest.raises(ValueError, match="two parameter groups share a name, or one is called 'rest'"):
        build_optimizer(Toy().named_parameters(), lr=1.0, groups=groups)


def test_without_groups_there_is_one_norm() -> None:
    model = Toy()
    learner = Learner(model, build_optimizer(model.named_parameters(), lr=1.0), lambda step: 1.0)
    learner.forward_backward(samples(), Objective())
    assert learner.optim_step().keys() == {"grad_norm", "lr", "skipped_steps"}


def test_a_group_that_others_have_emptied_is_refused() -> None:
    groups = [RateGroup("all", ".*", 0.5), RateGroup("head", r"head\..*", 0.5)]
    with pytest.raises(ValueError, match="earlier groups have all 1 parameters that"):
        build_optimizer(Toy().named_parameters(), lr=1.0, groups=groups)
    with pytest.raises(ValueError, match=re.escape("'hed.*' matches none of 6 names")):
        build_optimizer(Toy().named_parameters(), lr=1.0, groups=[RateGroup("head", "hed.*", 0.5)])


@pytest.mark.parametrize(
    ("pattern", "found"),
    [(".*", NAMES), (r"layers\.\d+\.weight", [NAMES[0], NAMES[2]]), ("lm_head.weight", [NAMES[4]])],
)
def test_a_pattern_means_whole_names(pattern: str, found: list[str]) -> None:
    assert matching(pattern, NAMES) == found


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r".*visul\..*", "similar names: visual.blocks.0.qkv.weight"),
        ("layers.1", "'layers.1' matches none of 5 names from beginning to end; similar names: layers.0.weight"),
        ("lm_haed.*", "similar names: lm_head.weight"),
        ("(", "'(' is not a regular expression"),
        ("", "'' matches none of 5 names"),
    ],
)
def test_a_pattern_that_matches_nothing_shows_near_names(pattern: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        matching(pattern, NAMES)


def test_a_pattern_for_no_names_says_that_there_are_none() -> None:
    with pytest.raises(ValueError, match="there are none"):
        matching(".*", [])
