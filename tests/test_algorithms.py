"""Every estimator, loss and aggregation can be configured and takes a real step on the quickstart.

Those that ask a run for nothing else take it on the answers that one run has sampled, with its learner as it began.
"""

from pathlib import Path
from typing import Any, get_args

import pytest
from endtoend import QUICKSTART, R1, read_log
from standing import DISTINCT, STEP, Standing, stand

from r1_cli.config.actor import Aggregation
from r1_cli.config.algorithm import KLPenalty
from r1_core import kl
from r1_core.advantages import ESTIMATORS
from r1_core.losses import AGGREGATIONS, POLICY_LOSSES

MINE = """
import torch

def estimator(inputs):
    return torch.where(inputs.loss_mask, inputs.rewards[:, None] - 0.5, 0.0)

def loss(inputs):
    mask = inputs.loss_mask
    losses = -torch.where(mask, inputs.advantages, 0.0) * torch.where(mask, inputs.logprobs, 0.0)
    return losses, {"mine": mask.to(losses.dtype)}
"""


def step(r1: R1, folder: Path, *overrides: str) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    reward = folder / "reward.py"
    reward.write_text(DISTINCT)
    given = f"trainer.save_checkpoint_path={folder}", f"worker.reward.reward_function={reward}:compute_score"
    r1("train", QUICKSTART, *STEP, *given, *overrides)
    return read_log(folder)[-1]


@pytest.fixture(scope="module")
def standing(r1: R1, tmp_path_factory: pytest.TempPathFactory) -> Standing:
    return stand(r1, tmp_path_factory.mktemp("standing"))


WHOLE = {"remax", "gae"}  # which ask a run for greedy answers, and for a critic


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_takes_a_step(r1: R1, standing: Standing, tmp_path: Path, name: str) -> None:
    chosen = f"algorithm.adv_estimator={name}"
    record = step(r1, tmp_path, chosen) if name in WHOLE else standing.step(chosen)
    assert record["actor/grad_norm"] > 0
    assert record["critic/advantages/max"] != record["critic/advantages/min"]


MEANS = get_args(Aggregation)


@pytest.mark.parametrize(("name", "mean"), [(name, MEANS[i % len(MEANS)]) for i, name in enumerate(POLICY_LOSSES)])
def test_a_loss_and_an_aggregation_take_a_step(standing: Standing, name: str, mean: str) -> None:
    """Of two updates, the second off policy."""
    record = standing.step(f"worker.actor.loss_type={name}", f"worker.actor.loss_avg_mode={mean}")
    assert record["actor/grad_norm"] > 0
    assert abs(record["actor/pg_loss"]) < 100  # summed over the tokens of an answer by some


@pytest.mark.parametrize(
    "words",
    [
        "algorithm.norm_adv_by_std=false algorithm.adv_eps=1e-3",
        "algorithm.adv_estimator=grpo_passk algorithm.norm_adv_by_std=false",
        "algorithm.adv_estimator=reinforce_plus_plus algorithm.adv_unbiased_std=false algorithm.gamma=0.9",
        "algorithm.adv_estimator=reinforce_plus_plus algorithm.norm_adv_by_std=false",
        "algorithm.adv_estimator=reinforce_baseline algorithm.adv_baseline=leave_one_out algorithm.adv_whiten=false",
        "algorithm.adv_estimator=reinforce_baseline algorithm.reward_clip_range=[-0.1,0.1]",
        "algorithm.adv_estimator=gpg algorithm.gpg_f_norm=2 algorithm.gpg_counted=nonzero",
        "algorithm.adv_estimator=reinforce",
        "algorithm.adv_estimator=group_norm",
        "worker.actor.loss_type=clip_cov worker.actor.clip_cov_ratio=0.1 worker.actor.clip_cov_lb=0.1",
        "worker.actor.loss_type=kl_cov worker.actor.kl_cov_ratio=0.1 worker.actor.kl_cov_coef=2",
        "worker.actor.loss_type=vespo worker.actor.vespo_k_pos=1 worker.actor.vespo_lambda_neg=3",
        "worker.actor.loss_type=sapo worker.actor.tau_positive=2",
        "worker.actor.loss_avg_mode=seq-mean-token-sum-norm worker.actor.loss_scale_factor=10",
    ],
)
def test_settings_of_single_estimators_and_losses_take_a_step(standing: Standing, words: str) -> None:
    record = standing.step(*words.split())
    assert record["actor/grad_norm"] > 0
    assert record["critic/advantages/max"] > record["critic/advantages/min"]


@pytest.mark.parametrize("name", get_args(KLPenalty))
def test_the_kl_may_stand_in_the_reward(standing: Standing, name: str) -> None:
    inside = ["algorithm.use_kl_loss=false", f"algorithm.kl_penalty={name}"]
    record = standing.step(*inside, "algorithm.adv_estimator=reinforce_plus_plus")
    assert record["actor/grad_norm"] > 0
    assert "actor/kl_loss" not in record


@pytest.mark.parametrize("name", ["kl", "abs", "mse", "low_var_kl", "full"])
def test_a_kl_term_starts_at_zero_and_is_logged(standing: Standing, name: str) -> None:
    record = standing.step(f"algorithm.kl_penalty={name}", "algorithm.kl_coef=0.1", "worker.actor.global_batch_size=4")
    assert record["actor/kl_loss"] == pytest.approx(0, abs=1e-4)
    assert record["actor/kl_coef"] == pytest.approx(0.1)


def test_the_full_kl_in_the_loss_keeps_the_policy_near_the_reference(standing: Standing) -> None:
    inside = "algorithm.kl_penalty=full"
    free, held = (standing.steps(3, inside, f"algorithm.kl_coef={coef}")[-1] for coef in (0, 100))
    assert 0 < 2 * held["actor/kl_loss"] < free["actor/kl_loss"]
    assert held["actor/grad_norm"] > 2 * free["actor/grad_norm"]


@pytest.mark.parametrize("name", ["grpo", "reinforce_baseline"])
def test_every_estimator_takes_the_kl_in_the_reward(standing: Standing, name: str) -> None:
    inside = ["algorithm.use_kl_loss=false", "algorithm.kl_penalty=k1", f"algorithm.adv_estimator={name}"]
    spreads = []
    for coef in (0, 1000):
        first, second = standing.steps(2, *inside, f"algorithm.kl_coef={coef}")
        assert "actor/kl_loss" not in second
        spreads.append((first["critic/advantages/max"], second["critic/advantages/max"]))
    # The policy is its own reference at first, and has moved from it by the second step.
    assert spreads[0][0] == pytest.approx(spreads[1][0], rel=0.05, abs=0.05)
    assert spreads[0][1] != pytest.approx(spreads[1][1], rel=1e-3)


def test_off_policy_answers_are_dropped(standing: Standing) -> None:
    epochs = "worker.actor.ppo_epochs=3"
    plain = standing.step(epochs)
    wide = standing.step(epochs, "algorithm.off_policy_mask_threshold=100")
    narrow = standing.step(epochs, "algorithm.off_policy_mask_threshold=0")
    # To rounding: a loss that looks at whole rows computes the head once more, going backward.
    assert wide["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-4)
    assert 0 < narrow["actor/grad_norm"] != pytest.approx(plain["actor/grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_an_adaptive_coefficient_moves_and_is_gone_on_with(r1: R1, tmp_path: Path) -> None:
    steered = [
        "algorithm.disable_kl=false",
        "algorithm.kl_type=adaptive",
        "algorithm.kl_target=5",
        "algorithm.kl_horizon=100",
    ]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder, steps in ((whole, 3), (cut, 2), (cut, 3)):
        step(r1, folder, *steered, f"trainer.max_steps={steps}", "trainer.save_freq=1")
    coefficients = [record["actor/kl_coef"] for record in read_log(whole)]
    # The policy has hardly moved, so the KL lies far below its target: error -0.2, 16 samples a step.
    expected = [0.01 * (1 - 0.2 * 16 / 100) ** i for i in range(3)]
    assert coefficients == pytest.approx(expected)
    assert [record["actor/kl_coef"] for record in read_log(cut)] == coefficients


def test_an_entropy_bonus_changes_the_gradient(standing: Standing) -> None:
    plain, bonus = (standing.step(f"worker.actor.entropy_coef={coef}")["actor/grad_norm"] for coef in (0, 0.1))
    assert plain != bonus


def test_users_bring_their_own_estimator_and_loss(r1: R1, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    own = [f"algorithm.adv_estimator={mine}:estimator", f"worker.actor.loss_type={mine}:loss"]
    record = step(r1, tmp_path / "run", *own)
    assert record["actor/mine"] == pytest.approx(1)
    assert record["critic/advantages/mean"] != 0


def test_an_advantage_that_is_not_finite_costs_its_steps_and_neither_the_run_nor_its_resume(
    r1: R1, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    large = "inputs.spread(inputs.rewards / (len(inputs.rewards) < 10))"  # the made-up batch is smaller
    mine.write_text(f"import torch\ndef estimator(inputs):\n    return {large}\n")
    for steps in (1, 2):
        words = [f"algorithm.adv_estimator={mine}:estimator", f"trainer.max_steps={steps}", "trainer.save_freq=1"]
        record = step(r1, tmp_path / "run", *words)
    assert record["step"] == 2
    assert record["actor/skipped_steps"] > 0
    assert record["actor/grad_norm"] is None


@pytest.mark.parametrize("key", ["algorithm.adv_estimator", "worker.actor.loss_type"])
def test_a_function_that_is_not_there_is_named(r1: R1, tmp_path: Path, key: str) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    own = f"trainer.save_checkpoint_path={tmp_path / 'run'}"
    run = r1("train", QUICKSTART, *STEP, own, f"{key}={mine}:estimater", ok=False)
    assert run.exit_code == 2
    assert key in run.stderr
    assert "did you mean 'estimator'" in run.stderr


def test_the_configuration_names_what_the_registries_hold() -> None:
    assert set(get_args(Aggregation)) == set(AGGREGATIONS)
    assert set(get_args(KLPenalty)) == {*kl.KL_ESTIMATORS, kl.FULL}
