"""A new loss and a new estimator, with settings and a need, are one new file each: nothing else is edited."""

import json
from pathlib import Path

import pytest
from endtoend import SMALL
from one_new_file import Copy, copy_repository

LOSS = '''"""Tempered policy gradient: −A·log pi, weighed by a power of the old probability, as a test may have it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.losses.policy import PolicyLoss, log_ratio, masked_advantages, masked_logprobs
from r1_core.settings import Share
from r1_core.types import LossInputs


@dataclass(frozen=True, slots=True)
class Tempered(PolicyLoss):
    """−A·pi_old^power·log pi."""

    names = ("tempered",)
    token_wise = True

    power: Share = 0.25  # of the old probability

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return losses [B, R] and the metrics `ppo_kl` and `tempered_weight`."""
        old = torch.where(inputs.loss_mask, inputs.old_logprobs, 0.0)
        weight = torch.where(inputs.loss_mask, (self.power * old.clamp(-20.0, 20.0)).exp(), 0.0)
        losses = -masked_advantages(inputs) * weight * masked_logprobs(inputs)
        return losses, {"ppo_kl": -log_ratio(inputs).detach(), "tempered_weight": weight}
'''
ESTIMATOR = '''"""Certain advantages: the group's mean as a baseline, less on tokens that were certain, for a test.

A_t = (r − mean of the group)·(1 − Σ p²)^sharpness.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.advantages.statistics import group_statistics
from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.settings import NonNegative


@dataclass(frozen=True, slots=True)
class Certain(Estimator):
    """Equal rewards give exactly 0."""

    names = ("certain",)
    needs = ("groups", "squared_probs")

    sharpness: NonNegative = 0.5

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """Return advantages [N, R] in the dtype of the rewards."""
        squared = torch.where(inputs.mask, inputs.require("squared_probs", "certain"), 1.0)
        distance = group_statistics(inputs.rewards, inputs.group_ids).distance
        return inputs.spread(distance) * (1 - squared).clamp(0, 1) ** self.sharpness
'''
QUICKSTART = "examples/quickstart/config.yaml"
OURS = ("algorithm.adv_estimator=certain", "worker.actor.loss_type=tempered")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    copied = copy_repository(tmp_path_factory.mktemp("algorithms"))
    copied.add("packages/r1-core/src/r1_core/losses/tempered.py", LOSS)
    copied.add("packages/r1-core/src/r1_core/advantages/certain.py", ESTIMATOR)
    return copied


def test_the_configuration_has_their_keys_with_defaults_ranges_and_needs(copy: Copy) -> None:
    shown = copy.r1("train", QUICKSTART, *OURS, "worker.actor.tempered_power=0.75", "--dry-run", "--full")
    assert "tempered_power: 0.75" in shown
    assert "certain_sharpness: 0.5" in shown
    wrong = ("worker.actor.tempered_power=2", "algorithm.certain_sharpnes=1", "worker.rollout.n=1")
    refused = copy.r1("train", QUICKSTART, *OURS, wrong[0], wrong[2], "--dry-run", ok=False)
    assert "worker.actor.tempered_power=2.0 (command line): must be at most 1" in refused
    assert "algorithm.adv_estimator=certain compares the answers to one prompt: at least 2" in refused
    assert "did you mean algorithm.certain_sharpness?" in copy.r1("train", QUICKSTART, wrong[1], ok=False)
    unread = copy.r1("train", QUICKSTART, "worker.actor.tempered_power=0.5", "--dry-run")
    assert "only tempered uses it" in unread


@pytest.mark.slow
def test_they_take_a_step_with_what_they_need(copy: Copy, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(inputs):\n    return [{'overall': 7 * i % 16 / 15} for i in range(len(inputs))]\n"
    )
    once = ("trainer.max_steps=1", "trainer.val_before_train=false", "trainer.val_freq=-1", "trainer.save_freq=-1")
    given = f"trainer.save_checkpoint_path={tmp_path}", f"worker.reward.reward_function={reward}:compute_score"
    copy.r1("train", QUICKSTART, *SMALL, *once, *given, *OURS)
    record = json.loads((tmp_path / "experiment_log.jsonl").read_text().splitlines()[-1])
    assert record["actor/grad_norm"] > 0
    assert 0 < record["actor/tempered_weight"] < 1
    assert record["critic/advantages/max"] > 0 > record["critic/advantages/min"]


@pytest.mark.slow
def test_the_tests_of_estimators_losses_and_tables_pass_with_them(copy: Copy) -> None:
    words = "certain or tempered or registry or readme or example_file or no_row or every_registered"
    files = [
        f"packages/r1-core/tests/test_core_{name}.py" for name in ("readme", "estimators", "loss_properties", "losses")
    ]
    files += ["packages/r1-core/tests/test_core_gradcheck.py"]
    files += [f"packages/r1-cli/tests/test_{name}.py" for name in ("cli_options", "config_commands")]
    passed = copy.pytest(*files, "-k", words)
    assert "tempered" not in (copy.root / "packages/r1-core/README.md").read_text()
    assert " passed" in passed
    copy.python("tests/write_tables.py")
    assert "`tempered`" in (copy.root / "packages/r1-core/README.md").read_text()
    assert "tempered_power: 0.25" in (copy.root / "examples/config.yaml").read_text()
