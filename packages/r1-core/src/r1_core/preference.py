"""Preference losses (DPO, cDPO, IPO, SimPO, KTO) as advantages.

Let s_i be the sum of the log-probs of sample i's trained tokens. A loss L of these sums has the gradient
Σ_i ∂L/∂s_i · ∇s_i, which is the policy gradient, on policy, with the advantage −∂L/∂s_i on every trained token of
sample i. So both answers of a pair need not be in one micro-batch, they may share their prompt in a pack, and memory is
that of fine-tuning. The price is a forward pass for s_i before the one that computes the gradient.

    samples = learner.add_logprobs(samples, loss.needs)
    samples, metrics = preference.weigh(samples, loss)
    learner.forward_backward(samples, preference.OBJECTIVE)
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from r1_core.losses.gradient import PolicyGradient
from r1_core.losses.policy import choose
from r1_core.objective import Objective
from r1_core.settings import NonNegative, Positive, check_settings
from r1_core.types import Sample, not_finite, rows, trained, with_tokens

logger = logging.getLogger(__name__)

Kind = Literal["dpo", "cdpo", "ipo", "simpo", "kto"]
BETAS = {"dpo": 0.1, "cdpo": 0.1, "ipo": 0.1, "simpo": 2.0, "kto": 0.1}
SATURATED = 30.0  # of a margin: the slope of log-sigmoid is then under 1e-13, or constant

# Differentiates weighed samples: the advantages of `weigh` are scaled for its average.
OBJECTIVE: Final = Objective(PolicyGradient(), "seq-mean-token-sum")


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """A loss of the rewards of chosen and rejected answers, averaged over pairs (`kto`: over samples).

    The reward of an answer is beta · (s − s_ref), where s sums its log-probs, those of the policy and those of the
    reference. With m = reward of the chosen − reward of the rejected answer:

    - `dpo`: −log sigmoid(m) (arXiv 2305.18290),
    - `cdpo`: (1 − e)·(−log sigmoid(m)) + e·(−log sigmoid(−m)), e the `label_smoothing` (Mitchell, "A note on DPO with
      noisy preferences", 2023),
    - `ipo`: (difference of (s − s_ref) / tokens − 1 / (2 · beta))² (arXiv 2310.12036; per token, which the paper does
      not say, but TRL has from its authors),
    - `simpo`: −log sigmoid(m − gamma) with the reward beta · s / tokens, without a reference (arXiv 2405.14734),
    - `kto`: weight · (1 − sigmoid(±(reward − beta · KL))), + and `desirable_weight` for chosen answers, − and
      `undesirable_weight` for rejected ones, which need not be pairs (arXiv 2402.01306).

    Raises ValueError for a setting out of range, or one that the kind does not read.
    """

    kind: Kind = "dpo"
    beta: Positive | None = None  # None: 2 for simpo, else 0.1
    label_smoothing: NonNegative = 0.0  # cdpo: the probability that a pair is the wrong way round, below 0.5
    gamma: NonNegative = 0.5  # simpo: the margin that a pair should have
    desirable_weight: NonNegative = 1.0  # kto
    undesirable_weight: NonNegative = 1.0  # kto

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind is {self.kind!r}; it must be one of {', '.join(get_args(Kind))}")
        check_settings(self)
        smoothing = self.label_smoothing
        if self.kind == "cdpo" and not 0 < smoothing < 0.5:
            raise ValueError(f"label_smoothing is {smoothing}; cdpo needs one between 0 and 0.5 (0 would be dpo)")
        if self.kind != "cdpo" and smoothing:
            raise ValueError(f"label_smoothing is {smoothing}, which {self.kind} does not read; choose cdpo, or 0")

    @property
    def needs(self) -> tuple[str, ...]:
        """The fields that samples must have, for `Learner.add_logprobs`."""
        return ("old_logprobs",) if self.kind == "simpo" else ("old_logprobs", "ref_logprobs")

    @property
    def scale(self) -> float:
        return BETAS[self.kind] if self.beta is None else self.beta

    def __call__(self, rewards: Tensor, lengths: Tensor, chosen: Tensor, kl: Tensor) -> Tensor:
        """Return the loss of each pair [N / 2], or of each sample [N] (`kto`).

        Args:
            rewards, lengths: of the samples, [N]; both answers of a pair stand together.
            chosen: bool [N].
            kl: scalar, nats, of kto.
        """
        if self.kind == "kto":
            gap = rewards - self.scale * kl
            weights = choose(chosen, self.desirable_weight, self.undesirable_weight, rewards.dtype)
            return weights * torch.sigmoid(torch.where(chosen, -gap, gap))
        if self.kind == "ipo":
            per_token = rewards / (self.scale * lengths)
            return (per_token[0::2] - per_token[1::2] - 1 / (2 * self.scale)).square()
        margins = rewards[0::2] - rewards[1::2] - (self.gamma if self.kind == "simpo" else 0.0)
        smoothing = self.label_smoothing
        return -(1 - smoothing) * logsigmoid(margins) - (smoothing * logsigmoid(-margins) if smoothing else 0.0)


def weigh(
    samples: Sequence[Sample],
    loss: PreferenceLoss,
    labels: Sequence[bool] | None = None,
    *,
    mismatched: Sequence[Sample] = (),
) -> tuple[list[Sample], dict[str, float]]:
    """Return the samples of an optimizer step with advantages for `OBJECTIVE`, and metrics.

    Samples 2k and 2k + 1 are the chosen and the rejected answer of a pair, with equal `group_id`. Needs the fields
    `loss.needs`. If one of them is not finite, a warning names the sample, and all advantages and metrics are NaN, so
    that `optim_step` skips the step.

    Metrics, most with TRL's names: `preference_loss`; `rewards/chosen`, `rewards/rejected`, `rewards/margins`;
    `rewards/accuracies`, the share of pairs with a margin above 0; `logps/chosen`, `logps/rejected`, of whole answers
    (`simpo`: per token); `kl` (`kto`); `rewards/saturated`, the share of pairs (`kto`: answers) whose margin is beyond
    ±30, where log-sigmoid is flat or a line: if that is 1, lower beta, or look for answers that are very long.

    Args:
        labels: for kto, which samples are chosen.
        mismatched: for kto, the result of `mismatch` with old and reference log-probs, to estimate the KL; empty: 0.

    Raises:
        ValueError: the samples are no pairs, one has no trained token or lacks a field, or labels are missing.
    """
    chosen = _chosen(samples, loss, labels)
    lengths = trained(samples).sum(-1).double()
    if (lengths == 0).any():
        empty = int((lengths == 0).nonzero()[0])
        raise ValueError(f"sample {empty} (group {samples[empty].group_id}) has no trained token, so nothing to prefer")
    wrong = [name for name in loss.needs if warn_if_not_finite(samples, name)]
    kl = _estimate_kl(mismatched)
    sums = _sums(samples, "old_logprobs").requires_grad_()
    scores = sums / lengths if loss.kind == "simpo" else sums - _sums(samples, "ref_logprobs")
    rewards = loss.scale * scores
    total = loss(rewards, lengths, chosen, kl).mean()
    (slopes,) = torch.autograd.grad(total, sums)
    advantages = -slopes * len(samples)  # `OBJECTIVE` divides by the number of sequences
    metrics = _metrics(loss, rewards.detach(), (sums / lengths if loss.kind == "simpo" else sums).detach(), chosen, kl)
    metrics = {"preference_loss": total.item(), **metrics}
    if wrong:
        advantages = torch.full_like(advantages, torch.nan)
        metrics = dict.fromkeys(metrics, torch.nan)
    flat = advantages.repeat_interleave(lengths.long())
    return with_tokens(samples, advantages=flat.to(rows(samples, "old_logprobs").dtype)), metrics


def mismatch(samples: Sequence[Sample]) -> list[Sample]:
    """Return each prompt with the answer of the next sample that has another prompt, from which kto estimates its KL.

    The prompt is what stands before the first trained token. Without another prompt, it is the next sample's answer.
    """
    starts = [int(sample.loss_mask.long().argmax()) for sample in samples]
    found = []
    for i, sample in enumerate(samples):
        following = [(i + step) % len(samples) for step in range(1, len(samples) + 1)]
        j = next((j for j in following if samples[j].group_id != sample.group_id), following[0])
        other, start, answer = samples[j], starts[i], starts[j]
        count = torch.arange(len(other.token_ids) - answer)
        prompt = sample.position_ids[:, :start]
        # The first of several axes counts tokens; on the others, text continues one behind the largest position.
        begin = torch.full((len(prompt), 1), start)
        if len(prompt) > 1 and start:
            begin[1:] = prompt[1:].max() + 1
        found.append(
            Sample(
                token_ids=torch.cat([sample.token_ids[:start], other.token_ids[answer:]]),
                loss_mask=torch.cat([sample.loss_mask[:start], other.loss_mask[answer:]]),
                position_ids=torch.cat([prompt, begin + count], dim=-1),
                group_id=sample.group_id,
                reward=0.0,
                model_inputs=sample.model_inputs,
                later_inputs=other.later_inputs,
                prompt_length=min(sample.prompt_length, start),
            )
        )
    return found


def _chosen(samples: Sequence[Sample], loss: PreferenceLoss, labels: Sequence[bool] | None) -> Tensor:
    if loss.kind == "kto":
        if not samples or labels is None or len(labels) != len(samples):
            given = "none" if labels is None else len(labels)
            raise ValueError(f"kto needs a label of each of the {len(samples)} samples, and got {given}")
        return torch.tensor(labels, dtype=torch.bool)
    check_pairs(samples, loss.kind)
    return torch.arange(len(samples)) % 2 == 0


def check_pairs(samples: Sequence[Sample], owner: str) -> None:
    """Raise ValueError unless samples 2k and 2k + 1 have equal groups."""
    if not samples or len(samples) % 2:
        raise ValueError(f"{owner} needs pairs, and got {len(samples)} samples")
    for i in range(0, len(samples), 2):
        one, other = samples[i].group_id, samples[i + 1].group_id
        if one != other:
            raise ValueError(f"samples {i} and {i + 1} are no pair: their groups are {one} and {other}")


def warn_if_not_finite(samples: Sequence[Sample], name: str) -> bool:
    wrong = not_finite(samples, name)
    if wrong:
        logger.warning(
            "%d of %d samples have %s that are not finite, first sample %d (group %d): the step will be skipped",
            len(wrong), len(samples), name, wrong[0], samples[wrong[0]].group_id,
        )  # fmt: skip
    return bool(wrong)


def _estimate_kl(mismatched: Sequence[Sample]) -> Tensor:
    """KL(policy, reference) in nats of whole answers, at least 0."""
    if not mismatched:
        return torch.zeros(()).double()
    return (_sums(mismatched, "old_logprobs") - _sums(mismatched, "ref_logprobs")).mean().clamp(min=0)


def _sums(samples: Sequence[Sample], name: str) -> Tensor:
    return rows(samples, name).double().sum(-1)


def _metrics(loss: PreferenceLoss, rewards: Tensor, logps: Tensor, chosen: Tensor, kl: Tensor) -> dict[str, float]:
    found = {}
    for name, which in (("chosen", chosen), ("rejected", ~chosen)):
        if which.any():
            found[f"rewards/{name}"] = rewards[which].mean().item()
            found[f"logps/{name}"] = logps[which].mean().item()
    if loss.kind == "kto":
        far = rewards - loss.scale * kl
        found["kl"] = kl.item()
    else:
        far = rewards[0::2] - rewards[1::2]
        found["rewards/accuracies"] = (far > 0).double().mean().item()
    if chosen.any() and not chosen.all():
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    return {**found, "rewards/saturated": (far.abs() > SATURATED).double().mean().item()}
