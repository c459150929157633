"""Settings that only some estimators or losses have: which key, what the math calls it, and who has it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from r1_cli.config.root import RunConfig, lookup


@dataclass(frozen=True, slots=True)
class Option:
    """One key. Its default in the configuration is shown only: what a user does not set is the owner's own."""

    key: str
    setting: str  # the owner's name for it
    owners: tuple[str, ...]  # values of `adv_estimator`, `loss_type` or `loss_avg_mode`


WITH_EPS = ("grpo", "grpo_passk", "reinforce_baseline", "optimal_token_baseline", "lite_ppo", "gdpo")
ESTIMATOR_OPTIONS = (
    Option("algorithm.gamma", "gamma", ("gae", "reinforce_plus_plus")),
    Option("algorithm.lam", "lam", ("gae",)),
    Option(
        "algorithm.norm_adv_by_std",
        "norm_by_std",
        ("grpo", "grpo_passk", "reinforce_baseline", "reinforce_plus_plus", "gae"),
    ),
    Option("algorithm.adv_unbiased_std", "unbiased", ("gae", "reinforce_plus_plus")),
    Option("algorithm.adv_eps", "eps", WITH_EPS),
    Option("algorithm.adv_baseline", "baseline", ("reinforce_baseline",)),
    Option("algorithm.adv_whiten", "whiten", ("reinforce_baseline",)),
    Option("algorithm.reward_clip_range", "reward_clip", ("reinforce_baseline", "reinforce_plus_plus", "gae")),
    Option("algorithm.gpg_f_norm", "f_norm", ("gpg",)),
    Option("algorithm.gpg_counted", "counted", ("gpg",)),
    Option("algorithm.gdpo_reward_keys", "reward_keys", ("gdpo",)),
    Option("algorithm.gdpo_reward_weights", "reward_weights", ("gdpo",)),
    Option("algorithm.otb_free_tail", "free_tail", ("optimal_token_baseline",)),
    Option("algorithm.otb_by_column", "by_column", ("optimal_token_baseline",)),
)
DUAL_CLIPPED = ("default", "gspo", "gspo_token", "luspo", "dppo_tv", "dppo_kl")
CLIPPED = (*DUAL_CLIPPED, "cispo", "gmpo", "geo_mean", "clip_cov")
LOSS_OPTIONS = (
    Option("worker.actor.clip_ratio_low", "clip_low", CLIPPED),
    Option("worker.actor.clip_ratio_high", "clip_high", CLIPPED),
    Option("worker.actor.clip_ratio_dual", "clip_dual", DUAL_CLIPPED),
    Option("worker.actor.tau_positive", "tau_pos", ("sapo",)),
    Option("worker.actor.tau_negative", "tau_neg", ("sapo",)),
    Option("worker.actor.clip_cov_ratio", "ratio", ("clip_cov",)),
    Option("worker.actor.clip_cov_lb", "cov_low", ("clip_cov",)),
    Option("worker.actor.clip_cov_ub", "cov_high", ("clip_cov",)),
    Option("worker.actor.kl_cov_ratio", "ratio", ("kl_cov",)),
    Option("worker.actor.kl_cov_coef", "kl_coef", ("kl_cov",)),
    Option("worker.actor.vespo_k_pos", "k_pos", ("vespo",)),
    Option("worker.actor.vespo_lambda_pos", "lam_pos", ("vespo",)),
    Option("worker.actor.vespo_k_neg", "k_neg", ("vespo",)),
    Option("worker.actor.vespo_lambda_neg", "lam_neg", ("vespo",)),
)


def settings_of(config: RunConfig, options: Iterable[Option], name: str) -> dict[str, Any]:
    """Return the settings of the estimator or loss called `name` that the user gave."""
    return {
        option.setting: lookup(config, option.key)
        for option in options
        if name in option.owners and is_given(config, option.key)
    }


def is_given(config: RunConfig, key: str) -> bool:
    """Whether a user set the key, and not to null."""
    section, _, name = key.rpartition(".")
    return name in lookup(config, section).model_fields_set and lookup(config, key) is not None
