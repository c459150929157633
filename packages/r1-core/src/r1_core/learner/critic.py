"""The critic: values before a step, gradients of its loss, optimizer steps, save and load, as separate verbs."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from r1_core.learner import checkpoint
from r1_core.learner.batching import Batching, MicroLimit, count
from r1_core.learner.microbatch import MicroBatch
from r1_core.learner.offload import Offload, Residence
from r1_core.learner.optim import clip_and_step
from r1_core.learner.parallel import Parallel, reshard
from r1_core.learner.passes import Trained, spoil_if_not_finite
from r1_core.learner.rehearsal import Trial
from r1_core.learner.tensor_files import FILE_BYTES
from r1_core.learner.value_scorer import ValueScorer
from r1_core.losses.aggregation import AGGREGATIONS, aggregate
from r1_core.losses.value import ValueLoss
from r1_core.rows import with_tokens
from r1_core.types import LossOutput, Sample, Totals

logger = logging.getLogger(__name__)

FIELDS = ("values", "returns")  # of samples, which its loss reads


class Critic(Trained):
    """A model that learns to forecast the return before each token (arXiv 1506.02438), beside the policy.

    The model is called as a `Learner`'s is, and its head has one output (`value_scorer.give_value_head`). Under several
    ranks every verb must be called by all of them with the same arguments, and the model must have gone through
    `parallel.shard_model` before. `length` is what a fixed-length average divides by; the rest is as in `Learner`.
    """

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
        self.model, self._models = model, [model]
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.loss = loss or ValueLoss()
        self.aggregation = aggregation
        self.length = length
        self.batching = batching or Batching()
        self.max_grad_norm = max_grad_norm
        self.parallel = parallel or Parallel()
        self.fillers = fillers
        self.step = 0  # calls of optim_step, skipped ones too
        self.skipped_steps = 0
        self.device = device or next(model.parameters()).device
        self._values_of = ValueScorer(model)
        self._base_lrs = [group["lr"] for group in optimizer.param_groups]
        self._residence = Residence(offload or Offload(), model, None, optimizer)

    # --- values ----------------------------------------------------------------------------------------------------

    def annotate_values(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples, in order, with `values` float32 [L], the critic's forecasts before it is updated."""
        return with_tokens(samples, **self.measure(samples))

    def measure(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Return what `annotate_values` adds to the samples, flat: float32 [T] for their T trained tokens."""
        self._residence.fetch(self.model)
        self.model.eval()
        found = self._passes.measure(samples, ("values",), lambda batch: self._values_of(batch)[:, None])
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
        for name, giver in (("values", "annotate_values"), ("returns", "advantages.assign")):
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

    def optim_step(self) -> dict[str, float]:
        """Clip the gradient's norm, step, and clear the gradients; returns `grad_norm`, `lr` and `skipped_steps`.

        A gradient that is not finite leaves everything as it is, as with `Learner.optim_step`. Raises RuntimeError
        without a gradient.
        """
        scale = self.learning_rate(self.step)
        self._residence.fetch(self.optimizer)
        grad_norm = clip_and_step(self.optimizer, [base * scale for base in self._base_lrs], self.max_grad_norm)
        if not math.isfinite(grad_norm):
            if self.skipped_steps == 0 and self.parallel.rank == 0:
                logger.warning(
                    "optimizer step %d of the critic skipped: the gradient's norm is %s. Later skips are only counted "
                    "(skipped_steps).", self.step, grad_norm,
                )  # fmt: skip
            self.skipped_steps += 1
        self.step += 1
        return {
            "grad_norm": grad_norm,
            "lr": self.optimizer.param_groups[0]["lr"],
            "skipped_steps": float(self.skipped_steps),
        }

    def rehearse(self, samples: Sequence[Sample], limit: MicroLimit, *, gradient: bool) -> Trial:
        """Compute the samples in micro-batches of `limit` and forget it; return what it took, as `Learner.rehearse`."""
        run: Callable[[], object] = partial(self.forward_backward if gradient else self.measure, samples)
        self._residence.fetch(self.model)
        return self._rehearse(run, limit, [self.model], away=self._residence.moves(self.optimizer))

    def rest(self) -> None:
        """Let all that is offloaded leave the device, until the verb that needs it."""
        self._residence.release(self.model, self.optimizer)

    # --- state -----------------------------------------------------------------------------------------------------

    def save(self, folder: Path, *, model_only: bool = False, file_bytes: int = FILE_BYTES) -> None:
        """Write weights, optimizer and numbers into `folder`, in the files and by the rules of `Learner.save`."""
        checkpoint.save(folder, *self._state(model_only), file_bytes)

    def snapshot(
        self, *, model_only: bool = False, room: int | None = None, file_bytes: int = FILE_BYTES
    ) -> checkpoint.Snapshot | None:
        """Copy what `save` would write, as `Learner.snapshot` does."""
        return checkpoint.take(*self._state(model_only), file_bytes, room=room)

    def _state(self, model_only: bool) -> tuple[nn.Module, Optimizer | None, dict[str, int], Parallel]:
        optimizer = None if model_only else self.optimizer
        self._residence.fetch(self.model, optimizer)
        reshard(self.model)  # what a verb that failed has left whole
        return self.model, optimizer, {"step": self.step, "skipped_steps": self.skipped_steps}, self.parallel

    def load(self, folder: Path, *, model_only: bool = False) -> None:
        """Take up what any number of ranks saved; the next step is then, to the bit, the one that would have come.

        `model_only` reads the weights alone. Raises FileNotFoundError or ValueError, naming file and tensor, if the
        folder does not fit this model.
        """
        self._residence.fetch(self.model, None if model_only else self.optimizer)
        state = {} if model_only else checkpoint.load_numbers(folder)
        checkpoint.load_model(folder, self.model)
        if not model_only:
            checkpoint.load_optimizer(folder, self.model, self.optimizer, state["optimizer"])
            self.step, self.skipped_steps = state["step"], state["skipped_steps"]
