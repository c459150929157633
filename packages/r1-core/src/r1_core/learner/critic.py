"""The critic: values before a step, gradients of its loss, optimizer steps, save and load, as separate verbs."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from r1_core.learner.batching import Batching, MicroLimit, count
from r1_core.learner.microbatch import MicroBatch
from r1_core.learner.offload import Offload
from r1_core.learner.parallel import Parallel, reshard
from r1_core.learner.passes import spoil_if_not_finite
from r1_core.learner.profiling import PassProfile
from r1_core.learner.token_model import TokenModel
from r1_core.learner.trainable import TrainableModel
from r1_core.losses.aggregation import AGGREGATIONS, aggregate
from r1_core.losses.value import ValueLoss
from r1_core.rows import with_tokens
from r1_core.types import LossOutput, Sample, Totals

logger = logging.getLogger(__name__)

FIELDS = ("values", "returns")  # of samples, which its loss reads


class Critic(TrainableModel):
    """A model that learns to forecast the return before each token (arXiv 1506.02438), beside the policy.

    The model is called as a `Learner`'s is, and its head has one output (`value_scorer.give_value_head`). Under several
    ranks every verb must be called by all of them with the same arguments, and the model must have gone through
    `parallel.shard_model` before. `length` is what a fixed-length average divides by; the rest is as in `Learner`.
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
        loss: ValueLoss | None = None,
        aggregation: str = "token",
        length: int | None = None,
        batching: Batching | None = None,
        max_grad_norm: float = 1.0,
        parallel: Parallel | None = None,
        fillers: Sequence[Sample] = (),
        device: torch.device | None = None,
        offload: Offload | None = None,
    ) -> None:
        AGGREGATIONS.get(aggregation)
        super().__init__(
            model, optimizer, learning_rate, batching=batching, max_grad_norm=max_grad_norm,
            parallel=parallel, fillers=fillers, device=device, offload=offload,
        )  # fmt: skip
        self.loss = loss or ValueLoss()
        self.aggregation = aggregation
        self.length = length
        self._values_of = ValueScorer(model)

    # --- values ----------------------------------------------------------------------------------------------------

    def add_values(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples, in order, with `values` float32 [L], the critic's forecasts before it is updated."""
        return with_tokens(samples, **self.compute_values(samples))

    def compute_values(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Return what `add_values` adds to the samples, flat: float32 [T] for their T trained tokens."""
        self._residence.fetch(self.model)
        self.model.eval()
        found = self._passes.compute(samples, ("values",), lambda batch: self._values_of(batch)[:, None])
        reshard(self.model)
        return found

    # --- one optimizer step ----------------------------------------------------------------------------------------

    def forward_backward(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Add the gradient of the loss over `samples` to the parameters'; return `vf_loss` and the loss's metrics.

        The samples are all of one optimizer step's, as with `Learner.forward_backward`. Raises ValueError on samples
        without values or returns.
        """
        if not samples:
            raise ValueError("forward_backward was given no samples")
        for name, giver in (("values", "add_values"), ("returns", "advantages.assign")):
            if any(getattr(sample, name) is None for sample in samples):
                raise ValueError(f"a sample has no {name}; call {giver} first")
        samples = spoil_if_not_finite(samples, FIELDS, "returns", self.step)
        self._residence.fetch(self.model)
        self.model.train()
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
        """Compute the samples in micro-batches of `limit` and forget it; return what it took, as `profile_pass`."""
        run: Callable[[], object] = partial(self.forward_backward if gradient else self.compute_values, samples)
        self._residence.fetch(self.model)
        return self._profile_pass(run, limit, [self.model], away=self._residence.moves(self.optimizer))


class ValueScorer:
    """Calls a model, whose head has one output, for the values of trained tokens."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._tokens = TokenModel(model)

    def __call__(self, batch: MicroBatch) -> Tensor:
        """Return the forecast before each of the batch's trained tokens: [T], float32 or float64.

        Raises ValueError if the head has more than one output.
        """
        outputs = self._tokens.outputs(batch)
        if outputs.shape[-1] != 1:
            raise ValueError(f"the critic's head has {outputs.shape[-1]} outputs, not one; see give_value_head")
        return outputs.squeeze(-1)


def give_value_head(model: Any) -> nn.Linear:
    """Put a Linear(H, 1) in the place of a Hugging Face model's head, and return it.

    Its weights are 0, so that it forecasts 0 until it has learned otherwise: the first advantages are then the returns
    themselves, on every rank and in every run. Raises ValueError if the model does not tell which module its head is.
    """
    old = model.get_output_embeddings()
    if old is None:
        raise ValueError(f"{type(model).__name__} does not tell which module its head is (get_output_embeddings)")
    head = nn.Linear(old.weight.shape[1], 1, device=old.weight.device, dtype=old.weight.dtype)
    model.set_output_embeddings(head)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    return head
