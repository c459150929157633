"""Forward and backward passes over the samples of a step, one micro-batch at a time on every rank."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor, nn

from r1_core.learner.batching import Batching, MicroLimit, fillers, rounds
from r1_core.learner.microbatch import MicroBatch, collate
from r1_core.learner.parallel import Parallel
from r1_core.types import LOSS_FIELDS, LossOutput, Sample, TokenTable, known, not_finite, tokens, with_tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Passes:
    """Runs a step's samples through a model. All ranks must run the same passes."""

    batching: Batching
    parallel: Parallel
    fillers: Sequence[Sample]
    device: torch.device

    def microbatches(
        self, samples: Sequence[Sample], limit: MicroLimit, fields: Sequence[str] = LOSS_FIELDS
    ) -> Iterator[tuple[list[int], MicroBatch]]:
        """Yield this rank's micro-batches with the indices of their samples; equally many on every rank."""
        padded = not self.batching.padding_free
        rank, world = self.parallel.data_rank, self.parallel.data_world
        limit, share = self.batching.cap(limit), self.batching.share_prompts
        cut = rounds(samples, limit, world, padded=padded, share_prompts=share)
        for parts, own in zip(cut, prefetch([samples[i] for i in parts[rank]] for parts in cut), strict=True):
            if world > 1:
                own = own + fillers(own, [samples[i] for part in parts for i in part], self.fillers)
            yield (
                parts[rank],
                collate(
                    own,
                    padding_free=not padded,
                    share_prompts=share,
                    device=self.device,
                    fields=fields,
                    sequence=self.parallel.sequence,
                ),
            )

    @torch.no_grad()
    def compute(
        self, samples: Sequence[Sample], names: Sequence[str], stats: Callable[[MicroBatch], Tensor]
    ) -> dict[str, Tensor]:
        """Return statistics of the T trained tokens of all samples by name, each flat float32 [T].

        Args:
            stats: computes those of a micro-batch, [its trained tokens, names].
        """
        if not samples:
            return {}
        table = TokenTable(samples, names, self.device)
        for indices, batch in self.microbatches(samples, self.batching.experience):
            table.put(indices, stats(batch))
        return table.columns(self.parallel.sum_data)

    def add_gradients(
        self,
        model: nn.Module,
        samples: Sequence[Sample],
        evaluate: Callable[[list[int], MicroBatch], LossOutput],
        fields: Sequence[str] = LOSS_FIELDS,
    ) -> dict[str, float]:
        """Accumulate the gradient of a loss over the samples; return the metrics over all samples.

        Args:
            evaluate: computes loss and metrics of a micro-batch, given the indices of its samples.
            fields: per-token fields that the loss reads, for `MicroBatch.values`.
        """
        sums: dict[str, Tensor] = {}
        gradients = GradientSums(model)
        for index, (indices, batch) in enumerate(self.microbatches(samples, self.batching.update, fields)):
            if index > 0:
                gradients.collect()
            output = evaluate(indices, batch)
            output.loss.backward()
            for name, value in output.metrics.items():
                sums[name] = sums.get(name, 0.0) + value.detach().double()
        gradients.deliver()
        values = self.parallel.sum_data(torch.stack([*sums.values()])).tolist() if sums else []
        return dict(zip(sums, values, strict=True))


def invalidate_if_not_finite(samples: Sequence[Sample], names: Sequence[str], target: str, step: int) -> list[Sample]:
    """Return the samples; set `target` to NaN in all if any of the fields `names` has a value that is not finite.

    Then `optim_step` skips the step; a clamp in the loss could otherwise hide the value. Logs the first sample.
    """
    spoiled = False
    for name in names:
        if not known(samples, name) or not (wrong := not_finite(samples, name)):
            continue
        spoiled = True
        logger.warning(
            "optimizer step %d: %d of %d samples have %s that are not finite, first sample %d (group %d): the step "
            "will be skipped", step, len(wrong), len(samples), name, wrong[0], samples[wrong[0]].group_id,
        )  # fmt: skip
    if not spoiled:
        return list(samples)
    return with_tokens(samples, **{target: torch.full_like(tokens(samples, target), torch.nan)})


def prefetch(batches: Iterable[list[Sample]]) -> Iterator[list[Sample]]:
    """Yield micro-batches with loaded model inputs; those of the next one load in a thread meanwhile."""
    with ThreadPoolExecutor(1, "r1-model-inputs") as thread:  # starts only if there is something to load
        coming: Future[None] | None = None
        for batch, after in pairwise(chain(batches, [[]])):
            if coming is None:
                load_inputs(batch)
            else:
                coming.result()
            coming = thread.submit(load_inputs, after) if any(map(lazy_inputs, after)) else None
            yield batch


def lazy_inputs(sample: Sample) -> list[Mapping[str, Tensor]]:
    """Return the sample's inputs that load tensors on first access."""
    return [each for each in (sample.model_inputs, sample.later_inputs) if each and not isinstance(each, dict)]


def load_inputs(samples: Sequence[Sample]) -> None:
    for sample in samples:
        for inputs in lazy_inputs(sample):
            for name in inputs:
                inputs[name]


NARROW = (torch.bfloat16, torch.float16)


class GradientSums:
    """Accumulates in float32 the gradients of bfloat16 or float16 weights over micro-batches.

    In a bfloat16 sum of 64 equal gradients the later ones would be rounded off. Costs 4 bytes per trained
    half-precision weight from the second micro-batch of an optimizer step to its last.
    """

    def __init__(self, model: nn.Module) -> None:
        self._params = [param for param in model.parameters() if param.requires_grad and param.dtype in NARROW]
        self._sums: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def collect(self) -> None:
        """Move the gradients into the sums, before each backward pass but the first."""
        for param in self._params:
            if param.grad is None:
                continue
            if param in self._sums:
                self._sums[param].add_(param.grad)
            else:
                self._sums[param] = param.grad.float()
            param.grad = None

    @torch.no_grad()
    def deliver(self) -> None:
        """Write the sums back as gradients, after the last micro-batch."""
        if not self._sums:
            return
        self.collect()
        for param, total in self._sums.items():
            param.grad = total.to(param.dtype)
        self._sums.clear()
