"""Build the algorithm of a run: schedule, objective, advantages, reward shaping, filter, and the initial position."""

from pathlib import Path
from typing import cast

from r1_cli.build.user_code import build_by_name, load_function
from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.algorithm import bounds
from r1_cli.config.options import ESTIMATOR_OPTIONS, LOSS_OPTIONS, settings_of
from r1_cli.train.groups.advantages import AdvantageComputer, OverlongBuffer, Shaping
from r1_cli.train.groups.stream_position import StreamPosition
from r1_cli.train.types import Position, Schedule, Update
from r1_core import advantages, losses
from r1_core.filtering import EMAStd, GroupFilter, KeepAll, MeanRange, NonzeroVariance
from r1_core.kl import TOP
from r1_core.kl_control import AdaptiveKL, FixedKL, KLController
from r1_core.losses import Correction, PolicyLoss, Rejection
from r1_core.losses.correction import Measure, Span
from r1_core.losses.gradient import PolicyGradient
from r1_core.losses.nll import NLL
from r1_core.needs import OF_POLICY
from r1_core.objective import Objective
from r1_core.own import as_estimator, as_loss, try_own_estimator, try_own_loss
from r1_core.preference import Kind, PreferenceLoss
from r1_core.reward_model import BradleyTerry
from r1_core.reward_shaping import RewardNormalizer

# By `sft.LEARNED`. A reward model's learner has a loss of its own.
FINE_TUNING: dict[str, PolicyLoss] = {
    "nll": NLL(),
    "dft": NLL(dynamic=True),
    "preference": PolicyGradient(),
    "reward": PolicyGradient(),
}


def build_schedule(config: RunConfig, total_steps: int, until: int | None = None) -> Schedule:
    trainer, actor, critic = config.trainer, config.worker.actor, config.worker.critic
    return Schedule(
        total_steps=total_steps,
        rollout_batch_size=config.data.rollout_batch_size,
        global_batch_size=actor.global_batch_size,
        ppo_epochs=actor.ppo_epochs,
        max_idle_steps=trainer.max_idle_steps,
        max_skipped_steps=trainer.max_skipped_steps,
        train_generations_to_log=trainer.train_generations_to_log,
        val_freq=trainer.val_freq,
        val_before_train=trainer.val_before_train,
        save_freq=trainer.save_freq,
        save_model_only=trainer.save_model_only,
        critic_global_batch_size=critic.global_batch_size,
        critic_ppo_epochs=critic.ppo_epochs,
        critic_warmup=trainer.critic_warmup if config.has_critic else 0,
        until=until,
    )


def build_update(config: RunConfig, *, updates_per_step: int) -> Update:
    objective, compute_advantages = build_objective(config), build_advantages(config)
    needs = gather_needs(compute_advantages, objective, updates_per_step)
    if config.worker.teacher.used and objective.divergence is None:  # the teacher is compared with it
        needs |= {"old_logprobs"}
    return Update(compute_advantages, objective, needs)


def try_algorithm(config: RunConfig) -> None:
    """Build estimator and objective; try a user's own on a made-up batch.

    Raises:
        ConfigError: one cannot be loaded or built, or does not return what it should.
    """
    problems = []
    for key, name, build, attempt in (
        ("algorithm.adv_estimator", config.algorithm.adv_estimator, build_advantages, try_own_estimator),
        ("worker.actor.loss_type", config.worker.actor.loss_type, build_objective, try_own_loss),
    ):
        path, colon, function = name.rpartition(":")
        try:
            if colon:
                attempt(load_function(Path(path), function), name)
            build(config)
        except ValueError as error:
            problems.append(Problem(key, str(error)))
    if problems:
        raise ConfigError(problems)


def build_objective(config: RunConfig) -> Objective:
    actor, algorithm = config.worker.actor, config.algorithm
    off_policy, distillation = algorithm.off_policy_mask_threshold, algorithm.distillation
    in_loss = config.worker.teacher.used and distillation.form == "loss"
    if (loss := FINE_TUNING.get(actor.loss_type)) is None:
        settings = settings_of(actor, LOSS_OPTIONS, actor.loss_type)
        loss = build_by_name(losses.POLICY_LOSSES, actor.loss_type, settings, as_loss)
    return Objective(
        loss,
        aggregation=actor.loss_avg_mode or loss.aggregation,
        kl_penalty=algorithm.kl_penalty if algorithm.use_kl_loss and not algorithm.disable_kl else None,
        entropy_coef=actor.entropy_coef,
        length=actor.loss_scale_factor or config.data.max_response_length,
        off_policy_threshold=float("inf") if off_policy is None else off_policy,
        correction=build_correction(config),
        divergence=(TOP if distillation.topk else distillation.divergence) if in_loss else None,
        distillation_coef=distillation.coef if in_loss else 1.0,
    )


def build_preference(config: RunConfig) -> PreferenceLoss | BradleyTerry | None:
    """Return the loss of `r1 sft` that compares answers; None if it does not."""
    sft = config.sft
    if not sft.compares:
        return None
    if sft.loss == "reward":
        return BradleyTerry(sft.center)
    settings = {"label_smoothing": sft.label_smoothing} if sft.loss == "cdpo" else {}
    return PreferenceLoss(cast(Kind, sft.loss), sft.beta, gamma=sft.margin, **settings)


def build_correction(config: RunConfig) -> Correction | None:
    """Return how the gap between engine and learner is corrected; None for no correction."""
    settings = config.algorithm.rollout_correction
    if config.importance_weights is None and not settings.rollout_rs:
        return None
    lower, upper = bounds(settings.rollout_is_threshold)
    rules, thresholds = settings.rollout_rs or [], settings.rollout_rs_threshold or []
    if len(thresholds) == 1:
        thresholds = thresholds * len(rules)
    return Correction(
        config.importance_weights,
        upper=upper,
        lower=lower or 0.0,
        outside="clamp" if lower is None else "zero",
        normalize=settings.rollout_is_batch_normalize,
        rejections=tuple(build_rejection(*pair) for pair in zip(rules, thresholds, strict=True)),
    )


def build_rejection(rule: str, threshold: float | str) -> Rejection:
    span, _, measure = rule.removeprefix("seq_").rpartition("_")
    lower, upper = bounds(threshold)
    if lower is None:
        lower = 1 / upper if measure == "k1" else 0.0
    return Rejection(cast(Measure, measure), cast(Span, span), upper, lower)


def build_advantages(config: RunConfig) -> AdvantageComputer:
    name = config.algorithm.adv_estimator
    if not config.learns_task:
        from r1_core.advantages.distillation import NoTask

        return AdvantageComputer(NoTask())
    return AdvantageComputer(
        build_by_name(
            advantages.ESTIMATORS, name, settings_of(config.algorithm, ESTIMATOR_OPTIONS, name), as_estimator
        ),
        kl_in_reward(config),
        build_correction(config),
    )


def kl_in_reward(config: RunConfig) -> str | None:
    """Return the KL penalty in the rewards; None if there is none, or it is in the loss."""
    algorithm = config.algorithm
    return None if algorithm.use_kl_loss or algorithm.disable_kl else algorithm.kl_penalty


def gather_needs(compute_advantages: AdvantageComputer, objective: Objective, updates_per_step: int) -> frozenset[str]:
    """Return the fields that samples need before the update.

    With one update per step, its forward pass gives the old log-probs, unless they are needed earlier.
    """
    needs = compute_advantages.needs | objective.needs
    return needs | {"old_logprobs"} if updates_per_step > 1 or needs & OF_POLICY else needs


def build_shaping(config: RunConfig) -> Shaping:
    """Return the reward shaping. An estimator with its own `reward_clip` clips by itself."""
    algorithm, overlong = config.algorithm, config.worker.reward.overlong_buffer
    buffer = None
    if overlong.enable and overlong.len is not None:
        buffer = OverlongBuffer(config.data.max_response_length, overlong.len, overlong.penalty_factor)
    clips_itself = any(o.setting == "reward_clip" and algorithm.adv_estimator in o.owners for o in ESTIMATOR_OPTIONS)
    return Shaping(buffer, algorithm.normalize_reward, None if clips_itself else algorithm.reward_clip_range)


def build_start(config: RunConfig) -> Position:
    return Position(0, StreamPosition(), build_kl_controller(config), build_filter(config), RewardNormalizer())


def build_kl_controller(config: RunConfig) -> KLController:
    algorithm = config.algorithm
    if algorithm.kl_type == "fixed" or algorithm.disable_kl:
        return FixedKL(algorithm.kl_coef)
    return AdaptiveKL(algorithm.kl_coef, algorithm.kl_target, int(algorithm.kl_horizon))


def build_filter(config: RunConfig) -> GroupFilter:
    algorithm = config.algorithm
    if not algorithm.online_filtering:
        return KeepAll()
    if algorithm.filter_mode == "zero_variance":
        return NonzeroVariance()
    if algorithm.filter_mode == "ema_std":
        return EMAStd(
            beta=algorithm.std_filter_beta,
            ratio=algorithm.filter_ema_ratio,
            ema_start_step=algorithm.filter_ema_start_step,
            filter_start_step=algorithm.filter_start_step,
        )
    return MeanRange(algorithm.filter_low, algorithm.filter_high)
