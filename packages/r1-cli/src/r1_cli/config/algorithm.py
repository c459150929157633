"""Configuration section `algorithm`: advantages, the KL term, and dynamic sampling."""

from typing import Literal

from r1_cli.config.section import FileFunction, NonNegative, Positive, Ratio, Section

Estimator = Literal[
    "grpo",
    "dr_grpo",
    "grpo_passk",
    "gdpo",
    "rloo",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "maxrl",
    "gae",
]
KLPenalty = Literal["kl", "abs", "mse", "low_var_kl", "full", "k1", "k2", "k3", "k1+", "k3+"]


class AlgorithmConfig(Section):
    """KL is a term of the loss (`use_kl_loss`), part of the reward, or absent (`disable_kl`)."""

    adv_estimator: Estimator | FileFunction = "grpo"  # a name, or `file.py:function` from AdvantageInputs to [N, R]
    gamma: Ratio = 1.0
    lam: Ratio = 1.0
    disable_kl: bool = False
    use_kl_loss: bool = True
    kl_penalty: KLPenalty = "low_var_kl"
    kl_coef: NonNegative = 1e-2
    kl_type: Literal["fixed", "adaptive"] = "fixed"
    kl_horizon: Positive = 10000.0  # adaptive controller
    kl_target: Positive = 0.1  # adaptive controller
    online_filtering: bool = False  # keep groups whose mean score lies strictly between filter_low and filter_high
    filter_key: str = "overall"
    filter_low: float = 0.01
    filter_high: float = 0.99
