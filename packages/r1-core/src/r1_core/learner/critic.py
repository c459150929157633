"""The critic: a language model whose head predicts the return before each token."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from r1_core.learner.batching import MicroLimit, count
from r1_core.learner.microbatch import MicroBatch
from r1_core.learner.parallel import reshard
from r1_core.learner.passes import invalidate_if_not_finite
from r1_core.learner.profiling import PassProfile
from r1_core.learner.token_model import TokenModel
from r1_core.learner.trainable import TrainableModel, TrainingOptions, prepare_update
from r1_core.losses.policy import AGGREGATIONS, aggregate
from r1_core.losses.value import ValueLoss, WeightedValue
from r1_core.types import LossOutput, Sample, Totals, with_tokens

logger = logging.getLogger(__name__)

FIELDS = ("values", "returns")  # of samples, which its loss reads


class Critic(TrainableModel):
    """A value model (arXiv 1506.02438), trained beside the policy.

    Its head has one output; see `give_value_head`. `length` is the divisor of a fixed-length average.
    """

    name = "critic"
    old_names: ClassVar[Mapping[str, str]] = {
        **TrainableModel.old_names,
        "annotate_values": "add_values",
        "measure": "compute_values",
    }

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        learning_rate: Callable[[int], float],
        *,
        loss: ValueLoss | WeightedValue | None = None,
        aggregation: str = "token",
        length: int | None = None,
        **options: Unpack[TrainingOptions],
    ) -> None:
        AGGREGATIONS.get(aggregation)
        super().__init__(model, optimizer, learning_rate, **options)
        self.loss = ValueLoss() if loss is None else loss
        self.aggregation = aggregation
        self.length = length
        self._values_of = ValueScorer(model)

    # --- values ----------------------------------------------------------------------------------------------------

    def add_values(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with `values`, float32 [L]: the critic's predictions before its update."""
        return with_tokens(samples, **self.compute_values(samples))

    def compute_values(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Return `values` flat, float32 [T] for the T trained tokens."""
        self._offloads.load(self.model)
        self.model.eval()
        found = self._passes.compute(samples, ("values",), lambda batch: self._values_of(batch)[:, None])
        reshard(self.model)
        return found

    # --- one optimizer step ----------------------------------------------------------------------------------------

    def forward_backward(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Accumulate the gradient of the value loss; return `vf_loss` and the loss's metrics.

        Pass all samples of an optimizer step, as to `Learner.forward_backward`. Raises ValueError if a sample lacks
        values or returns.
        """
        if not samples:
            raise ValueError("forward_backward was given no samples")
        for name, giver in (("values", "add_values"), ("returns", "advantages.assign")):
            if any(sample.get(name) is None for sample in samples):
                raise ValueError(f"a sample has no {name}; call {giver} first")
        samples = invalidate_if_not_finite(samples, FIELDS, "returns", self.step)
        self._offloads.load(self.model)
        prepare_update(self.model)
        totals = count(samples)
        if self.length is not None:
            totals = replace(totals, length=self.length)
        return self._passes.add_gradients(
            self.model, samples, lambda indices, batch: self._evaluate(batch, totals), fields=FIELDS
        )

    def _evaluate(self, batch: MicroBatch, totals: Totals) -> LossOutput:
        mask = batch.loss_mask
        values = batch.rows(self._values_of(batch))
        losses, token_metrics = self.loss(values, batch.values["values"], batch.values["returns"], mask)
        loss = aggregate(losses, mask, self.aggregation, totals)
        metrics = {name: aggregate(value, mask, "token", totals) for name, value in token_metrics.items()}
        return LossOutput(loss, {"vf_loss": loss.detach(), **metrics})

    def profile_pass(self, samples: Sequence[Sample], limit: MicroLimit, *, gradient: bool) -> PassProfile:
        run: Callable[[], object] = partial(self.forward_backward if gradient else self.compute_values, samples)
        self._offloads.load(self.model)
        return self._profile_pass(run, limit, [self.model], away=self._offloads.manages(self.optimizer))


class ValueScorer:
    """Computes the values of trained tokens."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._tokens = TokenModel(model)

    def __call__(self, batch: MicroBatch) -> Tensor:
        """Return the predicted return before each trained token: [T], float32 or float64.

        Raises ValueError if the head has more than one output.
        """
        outputs = self._tokens.outputs(batch)
        if outputs.shape[-1] != 1:
            raise ValueError(f"the critic's head has {outputs.shape[-1]} outputs, not one; see give_value_head")
        return outputs.squeeze(-1)


def give_value_head(model: Any) -> nn.Linear:
    """Replace a Hugging Face model's head by a Linear(H, 1) of zeros and return it.

    The first values are then 0 and the first advantages the returns. Raises ValueError if the model does not name its
    head.
    """
    old = model.get_output_embeddings()
    if old is None:
        raise ValueError(f"{type(model).__name__} does not name its head (get_output_embeddings)")
    head = nn.Linear(old.weight.shape[1], 1, device=old.weight.device, dtype=old.weight.dtype)
    model.set_output_embeddings(head)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    return head
