"""Configuration section `algorithm`: advantages, the KL term, dynamic sampling, and the gap to the engine."""

from math import inf
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from r1_cli.config.options import ESTIMATOR_OPTIONS, EstimatorName, EstimatorSettings, refuse_clashes
from r1_cli.config.section import Count, FileFunction, NonNegative, Positive, Ratio, Section

KLPenalty = Literal["kl", "abs", "mse", "low_var_kl", "full", "k1", "k2", "k3", "k1+", "k3+"]
Rejection = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
# veRL's names before there were measures other than the ratio.
OLDER_REJECTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def _by_commas(value: Any) -> Any:
    """`a,b` and a single word or number mean a list."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return value if isinstance(value, list) or value is None else [value]


def _rejections(value: Any) -> Any:
    names = _by_commas(value)
    return names and [OLDER_REJECTIONS.get(name, name) if isinstance(name, str) else name for name in names]


def bounds(threshold: float | str) -> tuple[float | None, float]:
    """Return the lower and upper bound. Examples: `bounds(2.0) == (None, 2.0)`, `bounds("0.5_5") == (0.5, 5.0)`."""
    if isinstance(threshold, str):
        lower, upper = threshold.split("_")
        return float(lower), float(upper)
    return None, threshold


def _threshold(value: Any) -> Any:
    """Turn a number that is written as text into one; refuse what is neither a bound nor two."""
    try:
        if isinstance(value, str) and "_" not in value:
            value = float(value)
        lower, upper = (None, value) if isinstance(value, bool) else bounds(value)
        if 0 < upper < inf and (lower is None or 0 <= lower < upper):
            return value
    except (TypeError, ValueError):
        pass
    raise ValueError("must be an upper bound above 0 such as 2.0, or a lower and an upper one such as 0.5_5.0")


Threshold = Annotated[float | str, BeforeValidator(_threshold)]


class RolloutCorrectionConfig(Section):
    """What is done about the gap between the engine's log-probs and the learner's; the names are veRL's.

    A threshold is an upper bound such as 2.0, or two such as 0.5_5.0.
    """

    # importance weights of what; null: none; auto: token if samples may be of older weights, else none
    rollout_is: Literal["auto", "token", "sequence", "geometric"] | None = "auto"
    rollout_is_threshold: Threshold = 2.0  # one bound: weights are cut to it (TIS); two: 0 outside (IcePop)
    rollout_is_batch_normalize: bool = False  # weights have mean 1 over an optimizer step
    rollout_rs: Annotated[list[Rejection], BeforeValidator(_rejections)] | None = None  # what to reject by; a,b: both
    rollout_rs_threshold: Annotated[list[Threshold], BeforeValidator(_by_commas)] | None = None  # for each, or for all


class AlgorithmConfig(EstimatorSettings):
    """KL is a term of the loss (`use_kl_loss`), part of the reward, or absent (`disable_kl`)."""

    adv_estimator: EstimatorName | FileFunction = "grpo"  # a name, or `file.py:function` from AdvantageInputs to [N, R]
    normalize_reward: bool = False  # by mean and std of the rewards so far
    reward_clip_range: Annotated[tuple[float, float], Field(strict=False)] | None = None
    disable_kl: bool = False
    use_kl_loss: bool = True
    kl_penalty: KLPenalty = "low_var_kl"
    kl_coef: NonNegative = 1e-2  # weight of the KL; at the start, where kl_type is adaptive
    kl_type: Literal["fixed", "adaptive"] = "fixed"
    kl_horizon: Positive = 10000.0  # adaptive controller
    kl_target: Positive = 0.1  # adaptive controller
    online_filtering: bool = False  # keep only groups that can teach something
    # default: the mean lies strictly between filter_low and filter_high; zero_variance: answers differ;
    # ema_std: the std is at least std_filter_beta times its moving average
    filter_mode: Literal["default", "zero_variance", "ema_std"] = "default"
    # steps between the sampling of a group that passed and was not needed, and its use; 0: it is thrown away
    surplus_max_age: Annotated[int, Field(ge=0)] = 1
    filter_key: str = "overall"  # overall: the reward; else one of the parts that the reward function reports
    filter_low: float = 0.01  # of filter_mode=default
    filter_high: float = 0.99  # of filter_mode=default
    filter_ema_ratio: Ratio = 0.99  # what the average keeps of itself in a step
    filter_ema_start_step: Count = 6  # steps from here on are averaged
    filter_start_step: Count = 11  # steps from here on are filtered
    std_filter_beta: NonNegative = 0.5  # of filter_mode=ema_std
    off_policy_mask_threshold: NonNegative | None = None  # nats per token: drops bad answers that the policy has left
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()


refuse_clashes(AlgorithmConfig, ESTIMATOR_OPTIONS)
