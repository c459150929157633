"""Configuration section `algorithm`: advantages, KL, dynamic sampling, rollout correction."""

from collections.abc import Iterator
from math import inf
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from r1_cli.config.distillation import DistillationConfig
from r1_cli.config.options import ESTIMATOR_OPTIONS, EstimatorName, EstimatorSettings, needs_of, refuse_clashes
from r1_cli.config.problems import Applies, KeyProblem, KeyRemark
from r1_cli.config.section import Count, FileFunction, NonNegative, Positive, Ratio, Section, lookup
from r1_core import registry
from r1_core.kl_control import MAX_ERROR

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


def _by_commas(value: object) -> object:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return value if isinstance(value, list) or value is None else [value]


def _rejections(value: object) -> object:
    names = _by_commas(value)
    if not isinstance(names, list):
        return names
    return [OLDER_REJECTIONS.get(name, name) if isinstance(name, str) else name for name in names]


def bounds(threshold: float | str) -> tuple[float | None, float]:
    """Return the lower and upper bound. Examples: `bounds(2.0) == (None, 2.0)`, `bounds("0.5_5") == (0.5, 5.0)`."""
    if isinstance(threshold, str):
        lower, upper = threshold.split("_")
        return float(lower), float(upper)
    return None, threshold


def _threshold(value: Any) -> Any:
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
    """Corrections for the gap between the engine's and the learner's log-probs, named as in veRL.

    A threshold is an upper bound such as 2.0, or two bounds such as 0.5_5.0.
    """

    # level of importance weights; null: none; auto: token if samples may have older weights, else none
    rollout_is: Literal["auto", "token", "sequence", "geometric"] | None = "auto"
    rollout_is_threshold: Threshold = 2.0  # one bound: truncated (TIS); two: 0 outside (IcePop)
    rollout_is_batch_normalize: bool = False  # weights have mean 1 over an optimizer step
    rollout_rs: Annotated[list[Rejection], BeforeValidator(_rejections)] | None = None  # what to reject by; a,b: both
    rollout_rs_threshold: Annotated[list[Threshold], BeforeValidator(_by_commas)] | None = None  # for each, or for all

    def problems(self) -> Iterator[KeyProblem]:
        key = "algorithm.rollout_correction.rollout_rs_threshold"
        rules, thresholds = self.rollout_rs, self.rollout_rs_threshold
        if not rules:
            return
        if not thresholds:
            yield key, "is missing: the bound of rollout_rs, such as 0.5_2.0 for a k1 and 0.01 for a k3"
        elif len(thresholds) not in (1, len(rules)):
            yield key, f"must be one threshold for all, or one for each of the {len(rules)} in rollout_rs"
        else:
            for rule, threshold in zip(rules, thresholds * (len(rules) // len(thresholds)), strict=True):
                lower, upper = bounds(threshold)
                if not rule.endswith("k1") and lower is not None:
                    yield key, f"must be a single upper bound for {rule}, which is never negative"
                if rule.endswith("k1") and lower is None and upper < 1:
                    yield key, f"must be at least 1 for {rule}: the ratio is kept within [1 / threshold, threshold]"


class AlgorithmConfig(EstimatorSettings):
    """KL is a term of the loss (`use_kl_loss`), part of the reward, or absent (`disable_kl`)."""

    adv_estimator: EstimatorName | FileFunction = "grpo"  # a name, or `file.py:function` from AdvantageInputs to [N, R]
    normalize_reward: bool = False  # by mean and std of the rewards so far
    reward_clip_range: Annotated[tuple[float, float], Field(strict=False)] | None = None
    disable_kl: bool = False
    use_kl_loss: bool = True
    kl_penalty: KLPenalty = "low_var_kl"
    kl_coef: NonNegative = 1e-2  # weight of the KL; with kl_type=adaptive, the initial one
    kl_type: Literal["fixed", "adaptive"] = "fixed"
    kl_horizon: Positive = 10000.0  # adaptive controller
    kl_target: Positive = 0.1  # adaptive controller
    online_filtering: bool = False  # train only on groups with signal
    # default: the mean lies strictly between filter_low and filter_high; zero_variance: answers differ;
    # ema_std: the std is at least std_filter_beta times its moving average
    filter_mode: Literal["default", "zero_variance", "ema_std"] = "default"
    # steps that a group which passed the filter may be carried over; 0: it is discarded
    surplus_max_age: Annotated[int, Field(ge=0)] = 1
    filter_key: str = "overall"  # overall: the reward; else one of the parts that the reward function reports
    filter_low: float = 0.01  # of filter_mode=default
    filter_high: float = 0.99  # of filter_mode=default
    filter_ema_ratio: Ratio = 0.99  # decay of the average per step
    filter_ema_start_step: Count = 6  # first averaged step
    filter_start_step: Count = 11  # first filtered step
    std_filter_beta: NonNegative = 0.5  # of filter_mode=ema_std
    # nats per token: masks answers with a negative advantage beyond this KL
    off_policy_mask_threshold: NonNegative | None = None
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    distillation: DistillationConfig = DistillationConfig()

    def clip_problems(self) -> Iterator[KeyProblem]:
        clip = self.reward_clip_range
        if clip is not None and clip[0] > clip[1]:
            yield "algorithm.reward_clip_range", "must be the lower and then the upper end"

    def problems(self, samples: int) -> Iterator[KeyProblem]:
        if self.kl_type == "adaptive" and self.kl_horizon <= MAX_ERROR * samples:
            least = f"the {samples} samples of a step take more than {MAX_ERROR * samples:g}"
            yield "algorithm.kl_horizon", f"is too short: {least}, or the coefficient would fall to 0"
        keys, weights = lookup(self, "gdpo_reward_keys"), lookup(self, "gdpo_reward_weights")
        if weights is not None and (keys is None or len(keys) != len(weights)):
            yield "algorithm.gdpo_reward_weights", "needs algorithm.gdpo_reward_keys, as many as there are weights"

    def need_problems(self, n: int, loss: str, *, learns_task: bool = True) -> Iterator[KeyProblem]:
        """Yield unmet needs of the estimator, if its advantages are used, and of the loss."""
        name = self.adv_estimator
        needs = needs_of(registry.estimators(), name) if learns_task else ()
        if "groups" in needs and n < 2:
            yield "worker.rollout.n", f"algorithm.adv_estimator={name} compares the answers to one prompt: at least 2"
        if "parts" in needs and not (self.use_kl_loss or self.disable_kl):
            yield "algorithm.use_kl_loss", f"adv_estimator={name} has no place for a KL in the reward, set true"
        for chosen, needed in (
            (f"algorithm.adv_estimator={name}", needs),
            (f"worker.actor.loss_type={loss}", needs_of(registry.losses(), loss)),
        ):
            if {"ref_logprobs", "full_kl"} & set(needed) and self.disable_kl:
                yield "algorithm.disable_kl", f"{chosen} needs the reference: set false"

    def filter_problems(self, n: int) -> Iterator[KeyProblem]:
        if not self.online_filtering:
            return
        if self.filter_mode == "default" and self.filter_low >= self.filter_high:
            yield "algorithm.filter_low", f"must be less than algorithm.filter_high ({self.filter_high})"
        if self.filter_mode == "ema_std" and self.filter_start_step <= self.filter_ema_start_step:
            yield (
                "algorithm.filter_start_step",
                f"must be more than algorithm.filter_ema_start_step ({self.filter_ema_start_step}): "
                "without a step to go by there is no threshold",
            )
        if self.filter_mode != "default" and n < 2:
            message = f"algorithm.filter_mode={self.filter_mode} compares the answers to one prompt: at least 2"
            yield "worker.rollout.n", message


refuse_clashes(AlgorithmConfig, ESTIMATOR_OPTIONS)


def _filters_otherwise(mode: str) -> Applies:
    return lambda v, c: not (c.algorithm.online_filtering and c.algorithm.filter_mode == mode)


REMARKS = (
    *(
        KeyRemark(f"algorithm.{name}", "only kl_type=adaptive uses it", lambda v, c: c.algorithm.kl_type != "adaptive")
        for name in ("kl_horizon", "kl_target")
    ),
    *(
        KeyRemark(
            f"algorithm.{name}",
            "only online_filtering=true uses it",
            lambda v, c: not c.algorithm.online_filtering,
        )
        for name in ("filter_mode", "filter_key", "surplus_max_age")
    ),
    *(
        KeyRemark(
            f"algorithm.{name}",
            f"only online_filtering=true with filter_mode={mode} uses it",
            _filters_otherwise(mode),
        )
        for mode, names in (
            ("default", ("filter_low", "filter_high")),
            ("ema_std", ("filter_ema_ratio", "filter_ema_start_step", "filter_start_step", "std_filter_beta")),
        )
        for name in names
    ),
    KeyRemark(
        "algorithm.rollout_correction.rollout_is_threshold",
        "only rollout_is uses it",
        lambda v, c: c.importance_weights is None,
    ),
    KeyRemark(
        "algorithm.rollout_correction.rollout_rs_threshold",
        "only rollout_rs uses it",
        lambda v, c: not c.algorithm.rollout_correction.rollout_rs,
    ),
)
