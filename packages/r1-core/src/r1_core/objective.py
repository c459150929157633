"""The objective of the policy: a policy loss plus a KL term, with its metrics."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from r1_core import kl
from r1_core.losses import AGGREGATIONS, Aggregation, PolicyLoss, PPOClip, aggregate
from r1_core.types import LossInputs, LossOutput


@dataclass(frozen=True, slots=True)
class Objective:
    """loss = policy loss + kl_coef · KL(policy, reference), both averaged in the same way (arXiv 2402.03300 eq. 3).

    Metrics: `pg_loss`; `kl_loss` and `kl_coef` if there is a KL term; `entropy_loss` (the mean entropy in nats) if
    the entropy was measured; and those of the policy loss, averaged over tokens.
    """

    policy_loss: PolicyLoss = field(default_factory=PPOClip)
    aggregation: Aggregation = "token"
    kl_penalty: str | None = None  # a name of `r1_core.kl`; None: no KL term
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(f"no aggregation is called {self.aggregation!r} (there are: {', '.join(AGGREGATIONS)})")
        if self.kl_penalty is not None:
            kl.get(self.kl_penalty)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return this micro-batch's share of the loss and of every metric. Raises ValueError without `ref_logprobs`."""
        mask, totals = inputs.loss_mask, inputs.totals
        losses, token_metrics = self.policy_loss(inputs)
        loss = aggregate(losses, mask, self.aggregation, totals)
        metrics = {"pg_loss": loss.detach()}
        if self.kl_penalty is not None:
            kl_loss = aggregate(self._divergence(self.kl_penalty, inputs), mask, self.aggregation, totals)
            loss = loss + self.kl_coef * kl_loss
            # Metrics of micro-batches are added up, so a constant is handed out in proportion to their tokens.
            share = mask.sum().double() / max(totals.tokens, 1)
            metrics |= {"kl_loss": kl_loss.detach(), "kl_coef": self.kl_coef * share}
        if inputs.entropy is not None:
            metrics["entropy_loss"] = aggregate(inputs.entropy.detach(), mask, "token", totals)
        metrics |= {name: aggregate(value, mask, "token", totals) for name, value in token_metrics.items()}
        return LossOutput(loss, metrics)

    def _divergence(self, name: str, inputs: LossInputs) -> Tensor:
        if inputs.ref_logprobs is None:
            raise ValueError(
                f"kl_penalty is {name!r} but the samples have no ref_logprobs: give the learner a reference "
                "model and annotate the samples, or set kl_penalty to None"
            )
        logprobs = torch.where(inputs.loss_mask, inputs.logprobs, 0.0)
        ref_logprobs = torch.where(inputs.loss_mask, inputs.ref_logprobs, 0.0)
        return kl.get(name)(logprobs, ref_logprobs)
