"""Known problems of a run, each detected by its numbers, with advice."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from r1_cli.runs.diagnose.findings import Diagnosis
from r1_cli.runs.evaluation.logged import read_logged
from r1_cli.runs.history import History, WindowMean

SURE = 3.0  # standard errors by which means must lie apart to count as different
LEAST = 8  # steps of a run below which nothing is said of how numbers went,
SHORTEST = 4  # but that all is lost

Found = tuple[str, str, str]  # what is wrong, the numbers that show it, advice
Signature = Callable[[str, History], Diagnosis | None]  # called with its name
SIGNATURES: dict[str, Signature] = {}


def signature(of: Callable[[History], Found | None]) -> Signature:
    """Register a function that looks for one problem in a run's numbers."""

    def find(name: str, history: History) -> Diagnosis | None:
        found = of(history)
        return None if found is None else Diagnosis(name, *found)

    SIGNATURES[of.__name__] = find
    return find


@dataclass(frozen=True, slots=True)
class Threshold:
    """A problem that one number shows: its mean over the last quarter of the run is above `bound`."""

    metric: str
    bound: float
    form: str  # of the mean, with its unit
    what: str
    advice: str

    def __call__(self, name: str, history: History) -> Diagnosis | None:
        late = history.late(self.metric)
        if late is None or late.mean <= self.bound:
            return None
        evidence = f"{self.metric} is {self.form.format(late.mean)} in {_span(late)}"
        return Diagnosis(name, self.what, evidence, self.advice)


def diagnose(history: History) -> Iterator[Diagnosis]:
    for name, find in SIGNATURES.items():
        if (found := find(name, history)) is not None:
            yield found


def _span(window: WindowMean) -> str:
    return f"steps {window.first} to {window.last}"


def _rises(history: History, name: str) -> bool:
    return _change(history, name) > SURE


def _falls(history: History, name: str) -> bool:
    return _change(history, name) < -SURE


def _change(history: History, name: str) -> float:
    """Return a number's change from the first eighth to the last quarter, in standard errors."""
    early, late = history.early(name), history.late(name)
    if early is None or late is None or len(history.series(name)) < LEAST:
        return 0.0
    return (late.mean - early.mean) / max(math.hypot(early.error, late.error), 1e-9)


def _from_to(history: History, name: str) -> str:
    early, late = history.early(name), history.late(name)
    assert early is not None
    assert late is not None
    return f"{name} went from {early.mean:.3g} ({_span(early)}) to {late.mean:.3g} ({_span(late)})"


# --- rewards ----------------------------------------------------------------------------------------------------------


@signature
def failing_rewards(history: History) -> Found | None:
    """Answers that could not be scored."""
    failed = history.series("reward/failures")
    steps = [step for step, value in failed if value > 0]
    if len(steps) <= max(1, len(failed) // 20):
        return None
    causes = [name.rpartition("/")[2] for name in history.names("reward/failures/") if any(history.series(name))]
    return (
        "rewards fail",
        f"{sum(value for _, value in failed):.0f} answers in {len(steps)} of {len(failed)} steps, the first in step "
        f"{steps[0]}" + (f"; by cause: {', '.join(causes)}" if causes else ""),
        "r1 reward test your_reward.py:f; the log and the record's column `failure` name the reason",
    )


@signature
def constant_reward(history: History) -> Found | None:
    """All answers of all steps have the same reward."""
    rewards, idle = history.series("reward/overall"), history.series("reward/groups_without_variance")
    if len(rewards) < 3 or len({value for _, value in rewards}) > 1 or not idle or min(idle, key=_value)[1] < 1:
        return None
    return (
        "no answer earns more than another: is the reward constant?",
        f"reward/overall is {rewards[0][1]:.3g} in each of {len(rewards)} steps, and no group differs",
        "r1 reward test your_reward.py:f shows whether it tells right from wrong; if it does, read the record: the "
        "form that it asks for may never be met, or the task be too hard or too easy",
    )


def _value(entry: tuple[int, float]) -> float:
    return entry[1]


@signature
def no_variance(history: History) -> Found | None:
    """The answers of most groups have the same reward, so their advantages are 0."""
    late = history.late("reward/groups_without_variance")
    reward = history.late("reward/accuracy") or history.late("reward/overall")
    right = reward is not None and reward.mean > 0.9  # then the run is done, rather than ill
    if late is None or late.mean < (0.95 if right else 0.8):
        return None
    tip = "easier rows, a part of the reward for what is nearly right, more answers (worker.rollout.n)"
    if right:
        tip = "harder rows: nearly all answers are right"
    return (
        "groups teach nothing: all answers of a prompt earn the same",
        f"reward/groups_without_variance is {late.mean:.0%} in {_span(late)}",
        f"{tip}; algorithm.online_filtering=true fills steps with groups that differ",
    )


@signature
def format_gamed(history: History) -> Found | None:
    """The format is learned, the answer is not."""
    form, right = history.late("reward/format"), history.late("reward/accuracy")
    if form is None or right is None or not _rises(history, "reward/format") or _rises(history, "reward/accuracy"):
        return None
    if form.mean < 0.8 or right.mean > 0.5:
        return None
    return (
        "the form is learned, the answer is not",
        f"{_from_to(history, 'reward/format')}; {_from_to(history, 'reward/accuracy')}",
        "give the form a smaller weight, or only with a right answer",
    )


@signature
def part_falls(history: History) -> Found | None:
    """A part of the reward falls while the sum rises."""
    if not _rises(history, "reward/overall"):
        return None
    parts = [name for name in history.names("reward/") if name.count("/") == 1 and name not in NOT_PARTS]
    for name in parts:
        early, late = history.early(name), history.late(name)
        if early is None or late is None or not _falls(history, name) or late.mean > early.mean - 0.05:
            continue
        return (
            f"the reward rises at the cost of {name.removeprefix('reward/')}",
            f"{_from_to(history, name)}; {_from_to(history, 'reward/overall')}",
            "is the sign of its weight right? else weigh the parts anew, or give the others only where this one is met",
        )
    return None


NOT_PARTS = {"reward/overall", "reward/failures", "reward/groups_without_variance", "reward/unusable_truths"}


@signature
def slow_rewards(history: History) -> Found | None:
    """Steps wait for scores."""
    reward, step = history.late("timing_s/reward"), history.late("timing_s/step")
    if reward is None or step is None or reward.mean < 0.2 * step.mean or reward.mean < 0.05:
        return None
    return (
        "steps wait for rewards",
        f"timing_s/reward is {reward.mean:.3g} s of {step.mean:.3g} s in {_span(step)}",
        "more reward processes, a shorter deadline, a faster judge; trainer.max_staleness=1 samples meanwhile",
    )


@signature
def validation_below(history: History) -> Found | None:
    """Training improves, validation does not."""
    train, val = history.late("reward/overall"), history.series("val/reward_score")
    if train is None or len(val) < 2 or not _rises(history, "reward/overall"):
        return None
    first, last = val[0][1], val[-1][1]
    if last > train.mean - 0.1 or last - first > 0.5 * (train.mean - first):
        return None
    return (
        "training improves and validation does not",
        f"val/reward_score is {last:.3g} at step {val[-1][0]} ({first:.3g} at step {val[0][0]}); "
        + _from_to(history, "reward/overall"),
        "read the record: is the reward gamed? other or more rows; fewer epochs; r1 data check finds rows in both sets",
    )


# --- answers ----------------------------------------------------------------------------------------------------------


# Answers are truncated.
SIGNATURES["truncation"] = Threshold(
    "response_length/clip_ratio",
    0.1,
    "{:.0%}",
    "answers are cut off",
    "raise data.max_response_length, or punish length softly (worker.reward.overlong_buffer)",
)


@signature
def length_explosion(history: History) -> Found | None:
    """Answers grow longer without a higher reward."""
    early, late = history.early("response_length/mean"), history.late("response_length/mean")
    if early is None or late is None or late.mean < 2 * early.mean or _rises(history, "reward/overall"):
        return None
    return (
        "answers grow longer and earn no more",
        _from_to(history, "response_length/mean"),
        "worker.reward.overlong_buffer, a loss that averages over tokens (worker.actor.loss_avg_mode=token), more KL",
    )


@signature
def entropy_collapse(history: History) -> Found | None:
    """The policy stops exploring before its reward is high."""
    early, late = history.early("actor/entropy_loss"), history.late("actor/entropy_loss")
    reward = history.late("reward/overall")
    if early is None or late is None or late.mean > 0.1 * early.mean or late.mean > 0.1:
        return None
    if reward is not None and reward.mean > 0.9:
        return None
    return (
        "the policy has stopped trying anything new",
        _from_to(history, "actor/entropy_loss"),
        "a wider upper clip (worker.actor.clip_ratio_high), a lower learning rate, worker.actor.entropy_coef",
    )


# --- the update -------------------------------------------------------------------------------------------------------


@signature
def skipped_steps(history: History) -> Found | None:
    """Gradients are not finite."""
    skipped = history.series("actor/skipped_steps")
    if not skipped or skipped[-1][1] == 0:
        return None
    first = next(step for step, value in skipped if value > 0)
    return (
        "optimizer steps are skipped: gradients are not finite",
        f"{skipped[-1][1]:.0f} by step {skipped[-1][0]}, the first in step {first}",
        "a lower learning rate, bf16 in place of fp16, a look at rewards that are not numbers",
    )


@signature
def kl_runaway(history: History) -> Found | None:
    """The policy diverges from the reference."""
    early, late = history.early("actor/kl_loss"), history.late("actor/kl_loss")
    if early is None or late is None or late.mean < 0.5:
        return None
    return (
        "the policy runs away from the reference",
        _from_to(history, "actor/kl_loss") + " nats a token",
        "a lower learning rate, a larger algorithm.kl_coef; is the reward gamed?",
    )


@signature
def rate_too_high(history: History) -> Found | None:
    """Updates destroy what was learned."""
    if not (fall := _collapse(history) or _fall(history)):
        return None
    rates = [value for _, value in history.series("actor/lr")]
    return (
        "the reward falls: updates are too large",
        f"reward/overall {fall}; actor/lr " + (f"went up to {max(rates):.3g}" if rates else "is not known"),
        "a tenth of worker.actor.optim.lr, some lr_warmup_steps, max_grad_norm=1; if the reward falls then as well: is "
        "the sign right, of the reward, or of an estimator or loss of your own?",
    )


def _fall(history: History) -> str:
    """Return how the reward fell to half of its best and stayed there, else ""."""
    rewards = history.series("reward/overall")
    best, late = history.best("reward/overall"), history.late("reward/overall")
    if best is None or late is None or len(rewards) < LEAST or best.last >= late.first:
        return ""
    floor = min(0.0, min(rewards, key=_value)[1])
    if best.mean <= floor or late.mean - floor > 0.5 * (best.mean - floor):
        return ""
    if best.mean - late.mean < SURE * late.error:
        return ""
    return f"was {best.mean:.3g} ({_span(best)}) and is {late.mean:.3g} ({_span(late)})"


def _collapse(history: History) -> str:
    """Return how a short run has lost nearly all reward and all variance, else ""."""
    rewards = history.series("reward/overall")
    idle = dict(history.series("reward/groups_without_variance"))
    if not SHORTEST <= len(rewards) < LEAST:
        return ""
    (best_at, best), floor = max(rewards, key=_value), min(0.0, min(rewards, key=_value)[1])
    last = rewards[-2:]
    gone = all(value - floor <= 0.2 * (best - floor) and idle.get(step, 0.0) >= 0.95 for step, value in last)
    if best <= floor or idle.get(best_at, 1.0) > 0.8 or not gone:
        return ""
    return f"was {best:.3g} in step {best_at} and is {last[-1][1]:.3g} in step {last[-1][0]}, where no group differs"


@signature
def rate_too_low(history: History) -> Found | None:
    """Groups differ, and nothing changes."""
    late, early = history.late("actor/entropy_loss"), history.early("actor/entropy_loss")
    lr, idle = history.late("actor/lr"), history.late("reward/groups_without_variance")
    if late is None or early is None or lr is None or len(history.series("reward/overall")) < 2 * LEAST:
        return None
    if idle is not None and idle.mean > 0.8:
        return None
    still = (
        abs(late.mean - early.mean) < 0.02 * max(abs(early.mean), 1e-6) and abs(_change(history, "reward/overall")) < 2
    )
    kl = history.late("actor/kl_loss")
    if not still or (kl is not None and kl.mean > 1e-4):
        return None
    return (
        "nothing moves, although groups differ",
        f"{_from_to(history, 'actor/entropy_loss')}, and the reward stands still; actor/lr is {lr.mean:.3g}",
        "ten times worker.actor.optim.lr: small models want more than 1e-6",
    )


@signature
def forgetting(history: History) -> Found | None:
    """The last evaluation of a guarded suite is below the start model's."""
    last = {one.set: one for one in read_logged(history) if one.change is not None}
    lost = [one for one in last.values() if one.lost]
    if not lost:
        return None
    return (
        "the model has lost what it could before training",
        "; ".join(f"step {one.step}: {one}" for one in lost),
        "an earlier checkpoint; a lower worker.actor.optim.lr; algorithm.use_kl_loss with a larger algorithm.kl_coef; "
        "rows of that kind in data.train_files",
    )


# The clip range stops most of the update.
SIGNATURES["clipped_often"] = Threshold(
    "actor/pg_clipfrac_higher",
    0.2,
    "{:.0%}",
    "the clip range holds many tokens back",
    "fewer optimizer steps a step (worker.actor.global_batch_size, ppo_epochs), a lower learning rate",
)


# --- engine and time --------------------------------------------------------------------------------------------------


# Engine and learner compute different log-probs.
SIGNATURES["engine_gap"] = Threshold(
    "rollout/logprob_gap_mean",
    0.05,
    "{:.3g} nats",
    "engine and learner do not agree on log-probs",
    "algorithm.rollout_correction.rollout_is=token; a finer worker.rollout.dtype; the canary names stale weights",
)


# Answers are old when they are trained on.
SIGNATURES["stale_samples"] = Threshold(
    "staleness/mean",
    2,
    "{:.2g} weight versions",
    "answers are old when they are learned from",
    "a smaller trainer.max_staleness or algorithm.surplus_max_age; algorithm.rollout_correction.rollout_is=token",
)


@signature
def padding_waste(history: History) -> Found | None:
    """Most of the computation is padding."""
    packed = history.setting("worker.actor.padding_free")
    if packed is True or (packed is None and history.writer != "trl"):
        return None
    means = [history.late(f"{kind}_length/mean") for kind in ("prompt", "response")]
    most = [history.late(f"{kind}_length/max") for kind in ("prompt", "response")]
    if means[1] is None or most[1] is None:
        return None
    filled = sum(one.mean for one in means if one) / max(sum(one.mean for one in most if one), 1e-9)
    if filled > 0.5:
        return None
    return (
        "much of the update is padding",
        f"sequences are {filled:.0%} as long as the longest of their step ({_span(means[1])})",
        "worker.actor.padding_free=true packs them",
    )
