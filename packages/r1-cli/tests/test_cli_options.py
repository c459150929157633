"""Every setting of every estimator and loss has a key, the key reaches it, and the README lists it."""

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cli_options_table import README, rewrite

from r1_cli.assembly.algorithm import (
    build_correction,
    build_estimate,
    build_objective,
    build_shaping,
    gather_needs,
)
from r1_cli.config import RunConfig, load_config, lookup
from r1_cli.config.options import ESTIMATOR_OPTIONS, LOSS_OPTIONS, Option, settings_of
from r1_core.advantages import ESTIMATORS
from r1_core.losses import POLICY_LOSSES, Correction, Rejection

BASE = [
    "data.train_files=owner/rows@train",
    "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
]
OTHER = {"mean": "leave_one_out", "informative": "nonzero", None: 1e-3}  # another value than the default
PAIRS = [(option, owner) for option in (*ESTIMATOR_OPTIONS, *LOSS_OPTIONS) for owner in option.owners]


def config_of(*words: str) -> RunConfig:
    return load_config([*BASE, *words])[0]


def settings(factory: Any) -> dict[str, Any]:
    """The keyword settings of a registry's entry and their defaults."""
    bound = {*factory.keywords} if isinstance(factory, partial) else set()
    bound.add("by_length")  # its key is loss_type=luspo
    params = inspect.signature(factory).parameters
    return {name: param.default for name, param in params.items() if name not in bound}


NEEDS = {"algorithm.gdpo_reward_weights": ("algorithm.gdpo_reward_keys=[accuracy,format]",)}


def owner_of(option: Option, owner: str) -> tuple[Any, str]:
    if option in ESTIMATOR_OPTIONS:
        return ESTIMATORS.get(owner), f"algorithm.adv_estimator={owner}"
    return POLICY_LOSSES.get(owner), f"worker.actor.loss_type={owner}"


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_setting_of_an_estimator_has_a_key(name: str) -> None:
    assert set(settings(ESTIMATORS.get(name))) == {o.setting for o in ESTIMATOR_OPTIONS if name in o.owners}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_setting_of_a_loss_has_a_key(name: str) -> None:
    assert set(settings(POLICY_LOSSES.get(name))) == {o.setting for o in LOSS_OPTIONS if name in o.owners}


@pytest.mark.parametrize(("option", "owner"), PAIRS, ids=lambda value: getattr(value, "key", value))
def test_a_key_shows_the_default_that_its_owner_has(option: Option, owner: str) -> None:
    shown, default = lookup(RunConfig(), option.key), settings(owner_of(option, owner)[0])[option.setting]
    if option.setting.startswith("clip_") and owner != "default":
        return  # widths that are not set are the loss's own, and differ
    assert shown is None or shown == default


@pytest.mark.parametrize(("option", "owner"), PAIRS, ids=lambda value: getattr(value, "key", value))
def test_a_key_reaches_its_owner(option: Option, owner: str) -> None:
    default = lookup(RunConfig(), option.key)
    if isinstance(default, bool):
        value: Any = not default
    else:
        value = OTHER[default] if default in OTHER else default * 0.7
    if option.setting == "reward_clip":
        value = (-2.0, 3.0)
    if option.setting == "reward_keys":
        value = ("a", "b")
    if option.setting == "reward_weights":
        value = (0.5, 2.0)
    word = f"{option.key}={list(value) if isinstance(value, tuple) else value}"
    factory, choice = owner_of(option, owner)
    options = ESTIMATOR_OPTIONS if option in ESTIMATOR_OPTIONS else LOSS_OPTIONS
    config = config_of(choice, word, *NEEDS.get(option.key, ()))
    assert settings_of(config, options, owner)[option.setting] == value
    built = build_estimate(config).estimator, build_objective(config).policy_loss
    assert getattr(built[option in LOSS_OPTIONS], option.setting) == value
    assert settings(factory)[option.setting] != value


def test_what_the_user_does_not_set_is_the_owners_own() -> None:
    assert build_objective(config_of("worker.actor.loss_type=gspo")).policy_loss == POLICY_LOSSES.get("gspo")()
    assert settings_of(config_of("algorithm.adv_eps=null"), ESTIMATOR_OPTIONS, "grpo") == {}


CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", None),
        ("rollout_is=token", Correction("token", upper=2.0)),
        ("rollout_is=sequence rollout_is_threshold=5", Correction("sequence", upper=5.0)),
        ("rollout_is=geometric rollout_is_threshold=0.5_3", Correction("geometric", 3.0, 0.5, "zero")),
        ("rollout_is=token rollout_is_batch_normalize=true", Correction("token", upper=2.0, normalize=True)),
        (
            "rollout_rs=token_k1 rollout_rs_threshold=2",
            Correction(None, rejections=(Rejection("k1", "token", 2.0, 0.5),)),
        ),
        (
            "rollout_rs=geometric,seq_sum_k1,seq_max_k3 rollout_rs_threshold=0.9_1.1,4,0.1",
            Correction(
                None,
                rejections=(
                    Rejection("k1", "mean", 1.1, 0.9),
                    Rejection("k1", "sum", 4.0, 0.25),
                    Rejection("k3", "max", 0.1),
                ),
            ),
        ),
        (
            "rollout_rs=token_k2,seq_mean_k2 rollout_rs_threshold=0.3",
            Correction(None, rejections=(Rejection("k2", "token", 0.3), Rejection("k2", "mean", 0.3))),
        ),
    ],
)
def test_a_correction_is_what_its_keys_say(words: str, expected: Correction | None) -> None:
    assert build_correction(config_of(*(f"{CORRECTION}.{word}" for word in words.split()))) == expected


def test_an_objective_takes_the_length_and_the_threshold() -> None:
    objective = build_objective(config_of())
    assert (objective.length, objective.off_policy_threshold) == (2048, float("inf"))
    objective = build_objective(
        config_of("worker.actor.loss_scale_factor=9", "algorithm.off_policy_mask_threshold=0.5")
    )
    assert (objective.length, objective.off_policy_threshold) == (9, 0.5)


@pytest.mark.parametrize(
    ("words", "later"),
    [
        ("algorithm.disable_kl=true", True),
        ("algorithm.disable_kl=false algorithm.use_kl_loss=true", True),
        ("algorithm.disable_kl=false algorithm.use_kl_loss=false", False),
        ("algorithm.disable_kl=true algorithm.adv_estimator=optimal_token_baseline", False),
        ("algorithm.disable_kl=true algorithm.adv_estimator=mine.py:estimate", False),
        ("algorithm.disable_kl=true algorithm.rollout_correction.rollout_is=token", False),
        ("algorithm.disable_kl=true worker.actor.loss_type=clip_cov", False),
        ("algorithm.disable_kl=true worker.actor.loss_type=gspo", True),
        ("algorithm.disable_kl=true algorithm.off_policy_mask_threshold=0.5", True),
    ],
)
def test_old_log_probs_are_taken_early_only_where_something_asks_for_them(
    words: str, later: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def estimate(inputs): ...\n")
    config = config_of(*words.split())
    estimate, objective = build_estimate(config), build_objective(config)
    assert ("old_logprobs" not in gather_needs(estimate, objective, updates_per_step=1)) is later
    assert "old_logprobs" in gather_needs(estimate, objective, updates_per_step=2)


def test_the_one_estimator_that_clips_after_its_baseline_is_given_unclipped_rewards() -> None:
    words = "algorithm.reward_clip_range=[-1,1]", "algorithm.adv_estimator="
    assert build_shaping(config_of(words[0])).clip == (-1.0, 1.0)
    assert build_shaping(config_of(words[0], words[1] + "reinforce_baseline")).clip is None


def test_the_readme_is_up_to_date() -> None:
    readme = README.read_text(encoding="utf-8")
    assert rewrite(readme) == readme, "run python packages/r1-cli/tests/cli_options_table.py"
