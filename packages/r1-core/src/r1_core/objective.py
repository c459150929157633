"""The policy's objective: policy loss, KL term and entropy bonus, with metrics."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from r1_core import kl
from r1_core.losses import AGGREGATIONS, Correction, PolicyLoss, PPOClip, aggregate
from r1_core.losses.correction import correct
from r1_core.losses.policy import SelectingLoss, check_not_negative, off_policy_weights
from r1_core.types import LossInputs, LossOutput, Sample, check_tensors, known, tokens, with_tokens


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of a policy: terms that are all averaged in the same way.

    loss = policy loss + kl_coef · KL(policy, reference) − entropy_coef · entropy
    + distillation_coef · divergence(policy, teacher)

    arXiv 2402.03300 (with the KL term); arXiv 1602.01783 (the entropy bonus); arXiv 2306.13649 (distillation).

    Metrics: `pg_loss`; `kl_loss` and `kl_coef` with a KL term; `distillation_loss` with a divergence; `entropy_loss`
    (the mean entropy in nats) if the entropy was computed; those of the policy loss, averaged over tokens; and those of
    the correction.
    """

    policy_loss: PolicyLoss = field(default_factory=PPOClip)
    aggregation: str = "token"  # a name of `losses.AGGREGATIONS`
    kl_penalty: str | None = None  # a name of `r1_core.kl`, `kl.FULL` included; None: no KL term
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    length: int | None = None  # what a fixed-length average divides by; None: `totals.length`
    off_policy_threshold: float = math.inf  # see `off_policy_weights`
    correction: Correction | None = None  # of the gap between rollout and learner
    divergence: str | None = None  # of policy and teacher, a name of `kl.DIVERGENCES` or `kl.TOP`; None: no such term
    distillation_coef: float = 1.0

    def __post_init__(self) -> None:
        if not hasattr(self.policy_loss, "token_wise"):
            raise TypeError(f"policy_loss is {self.policy_loss!r}; make a loss of a function by r1_core.own.as_loss")
        AGGREGATIONS.get(self.aggregation)
        check_not_negative(
            kl_coef=self.kl_coef,
            entropy_coef=self.entropy_coef,
            off_policy_threshold=self.off_policy_threshold,
            distillation_coef=self.distillation_coef,
        )
        if self.divergence is not None:
            if self.divergence != kl.TOP:
                kl.DIVERGENCES.get(self.divergence)
            if self.full_kl:
                raise ValueError(
                    "the loss compares the policy over the vocabulary with its teacher, so it cannot have the full KL "
                    "from a reference, too; choose another kl_penalty and a policy loss that needs no full_kl"
                )
        if self.length is not None and self.length < 1:
            raise ValueError(f"length is {self.length}; a fixed-length average needs at least 1")
        if self.kl_penalty is not None and self.kl_penalty != kl.FULL:
            kl.get(self.kl_penalty)

    @property
    def needs(self) -> frozenset[str]:
        """The fields that samples must have before any gradient: for `prepare`, the policy loss and the KL estimate."""
        needs = {*self.policy_loss.needs} - {"full_kl"}  # computed with the gradient
        if self.correction is not None:
            needs.add("old_logprobs")
        if self.kl_penalty is not None and self.kl_penalty != kl.FULL:
            needs.add("ref_logprobs")
        return frozenset(needs)

    @property
    def token_wise(self) -> bool:
        """KL estimates and the entropy bonus are token-wise, and averaging is linear; off-policy masking is not."""
        return self.policy_loss.token_wise and self.off_policy_threshold == math.inf

    @property
    def entropy_gradient(self) -> bool:
        return self.entropy_coef != 0.0

    @property
    def full_kl(self) -> bool:
        return self.kl_penalty == kl.FULL or "full_kl" in self.policy_loss.needs

    def prepare(self, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, float]]:
        """Correct samples and select tokens. Raises ValueError if a sample lacks required old or rollout log-probs."""
        samples = list(samples)
        if "old_logprobs" in self.needs and any(sample.old_logprobs is None for sample in samples):
            raise ValueError("a sample has no old_logprobs, which this objective needs in advance; call add_logprobs")
        metrics: dict[str, float] = {}
        if self.correction is not None:
            samples, metrics = correct(samples, self.correction)
        if isinstance(self.policy_loss, SelectingLoss):
            samples = _select(samples, self.policy_loss)
        if "rollout_logprobs" not in self.needs:  # then do not send them to micro-batches
            return [replace(sample, rollout_logprobs=None) for sample in samples], metrics
        if not known(samples, "rollout_logprobs"):
            raise ValueError("the samples have no rollout_logprobs, which this loss needs: their engine gave none")
        return samples, metrics

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return a micro-batch's part of loss and metrics.

        Raises ValueError if `ref_logprobs`, `full_kl` or `entropy` is missing and needed.
        """
        mask = inputs.loss_mask
        totals = inputs.totals if self.length is None else replace(inputs.totals, length=self.length)
        losses, token_metrics = self.policy_loss(inputs)
        check_tensors(f"result of {type(self.policy_loss).__name__}", "[B, R]", mask.shape, losses=losses)
        if inputs.weights is not None:
            losses = losses * torch.where(mask, inputs.weights, 0.0)
        if self.off_policy_threshold < math.inf:
            losses = losses * off_policy_weights(inputs, self.off_policy_threshold)
        loss = aggregate(losses, mask, self.aggregation, totals)
        metrics = {"pg_loss": loss.detach()}
        if self.kl_penalty is not None:
            kl_loss = aggregate(self._divergence(self.kl_penalty, inputs), mask, self.aggregation, totals)
            loss = loss + self.kl_coef * kl_loss
            # Metrics of micro-batches are added up, so a constant is split in proportion to their tokens.
            share = mask.sum().double() / max(totals.tokens, 1)
            metrics |= {"kl_loss": kl_loss.detach(), "kl_coef": self.kl_coef * share}
        if self.divergence is not None:
            if inputs.teacher_divergence is None:
                raise ValueError("the objective has a divergence from a teacher: give the learner a teacher model")
            distance = aggregate(inputs.teacher_divergence, mask, self.aggregation, totals)
            loss, metrics["distillation_loss"] = loss + self.distillation_coef * distance, distance.detach()
        if self.entropy_coef:
            if inputs.entropy is None:
                raise ValueError(f"entropy_coef is {self.entropy_coef} but no entropy was measured")
            loss = loss - self.entropy_coef * aggregate(inputs.entropy, mask, self.aggregation, totals)
        if inputs.entropy is not None:
            metrics["entropy_loss"] = aggregate(inputs.entropy.detach(), mask, "token", totals)
        metrics |= {name: aggregate(value, mask, "token", totals) for name, value in token_metrics.items()}
        return LossOutput(loss, metrics)

    def _divergence(self, name: str, inputs: LossInputs) -> Tensor:
        if name == kl.FULL:
            if inputs.full_kl is None:
                raise ValueError(
                    f"kl_penalty is {name!r} but no KL over the vocabulary was measured: give the learner a reference "
                    "model, or set kl_penalty to another name or to None"
                )
            return inputs.full_kl
        if inputs.ref_logprobs is None:
            raise ValueError(
                f"kl_penalty is {name!r} but the samples have no ref_logprobs: give the learner a reference "
                "model and call its add_logprobs, or set kl_penalty to None"
            )
        logprobs = torch.where(inputs.loss_mask, inputs.logprobs, 0.0)
        ref_logprobs = torch.where(inputs.loss_mask, inputs.ref_logprobs, 0.0)
        return kl.get(name)(logprobs, ref_logprobs)


def _select(samples: list[Sample], loss: SelectingLoss) -> list[Sample]:
    if not samples:
        return samples
    chosen = loss.select(tokens(samples, "advantages"), tokens(samples, "old_logprobs"))
    return with_tokens(samples, selected=chosen)
