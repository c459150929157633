"""Forward and backward passes over the samples of a step, one micro-batch at a time on every rank."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn

from r1_core.learner.batching import Batching, MicroLimit, fillers, rounds, truncate
from r1_core.learner.microbatch import MicroBatch, collate
from r1_core.learner.parallel import Parallel, SkippedCollectives, abandon_pass, reshard
from r1_core.types import LOSS_FIELDS, LossOutput, Sample, TokenTable, known, not_finite, tokens, with_tokens

logger = logging.getLogger(__name__)

Cut: TypeAlias = list[list[list[int]]]  # indices of samples by round and rank
LOSS = "the loss"  # beside the metrics, whose names have no blank


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """Where memory ran out: rounds and data ranks. `error` is this rank's own, if it is one of them."""

    places: list[tuple[int, int]]
    error: torch.OutOfMemoryError


def halve(parts: Sequence[list[int]]) -> list[list[list[int]]]:
    """Return a round of micro-batches as two rounds; a sample stays on its rank."""
    return [[part[: len(part) // 2] for part in parts], [part[len(part) // 2 :] for part in parts]]


@dataclass(frozen=True, slots=True)
class Passes:
    """Runs a step's samples through a model. All ranks must run the same passes.

    `models` are those that a pass may call, of which several ranks share the weights.
    """

    batching: Batching
    parallel: Parallel
    fillers: Sequence[Sample]
    device: torch.device
    models: Sequence[nn.Module] = ()

    def _cut(self, samples: Sequence[Sample], limit: MicroLimit) -> Cut:
        padded, share = not self.batching.padding_free, self.batching.share_prompts
        limit = self.batching.cap(limit)
        return rounds(samples, limit, self.parallel.data_world, padded=padded, share_prompts=share)

    def _microbatches(
        self, samples: Sequence[Sample], cut: Cut, fields: Sequence[str]
    ) -> Iterator[tuple[list[int], MicroBatch]]:
        """Yield this rank's micro-batches with the indices of their samples; equally many on every rank."""
        rank, world = self.parallel.data_rank, self.parallel.data_world
        for parts, own in zip(cut, prefetch([samples[i] for i in parts[rank]] for parts in cut), strict=True):
            if world > 1:
                own = own + fillers(own, [samples[i] for part in parts for i in part], self.fillers)
            yield parts[rank], self._collate(own, fields)

    def _collate(self, samples: Sequence[Sample], fields: Sequence[str]) -> MicroBatch:
        return collate(
            samples,
            padding_free=self.batching.padding_free,
            share_prompts=self.batching.share_prompts,
            device=self.device,
            fields=fields,
            sequence=self.parallel.sequence,
        )

    def _run(
        self,
        samples: Sequence[Sample],
        cut: Cut,
        visit: Callable[[list[int], MicroBatch], None],
        fields: Sequence[str] = LOSS_FIELDS,
        restart: Callable[[], bool] | None = None,
    ) -> int:
        """Visit all micro-batches, and halve the rounds in which memory runs out; return how many were halved.

        Args:
            restart: undoes what was visited, so that all is visited again; False: it cannot. None: the first halved
                round and all after it are visited again.

        Raises:
            torch.OutOfMemoryError: on all ranks, if a sample alone does not fit on one; if ranks share sequences, only
                on the rank whose memory runs out.
        """
        place, halved = 0, 0
        while failed := self._visit(samples, cut[place:], visit, fields):
            places = sorted({place + number for number, _ in failed.places})
            largest = max(len(cut[place + number][rank]) for number, rank in failed.places)
            splits = all(len(cut[place + number][rank]) > 1 for number, rank in failed.places)
            if not (splits and self.batching.splits and (restart is None or restart())):
                raise failed.error
            if self.parallel.rank == 0:
                logger.warning(
                    "out of memory in a micro-batch of %d samples: it is halved on all ranks, with the same "
                    "gradient. Lower the micro-batch size, or set it to auto, if this repeats", largest,
                )  # fmt: skip
            cut = list(chain(*(halve(parts) if i in places else [parts] for i, parts in enumerate(cut))))
            halved, place = halved + len(places), places[0] if restart is None else 0
            if self.device.type == "cuda":  # NOT RUN ON A GPU
                torch.cuda.empty_cache()
        return halved

    def _visit(
        self,
        samples: Sequence[Sample],
        cut: Cut,
        visit: Callable[[list[int], MicroBatch], None],
        fields: Sequence[str],
    ) -> "OutOfMemory | None":
        """Visit micro-batches; return, on all ranks, where memory ran out on some.

        The other ranks wait in the collectives of a micro-batch that fails. So the rank visits all rounds again, each
        with a tiny sample, takes part in the collectives that it has not taken part in yet, and skips the others. The
        results of this round and the following are then worth nothing on any rank.
        """
        ranked = self.parallel.world > 1
        for model in self.models if ranked else ():
            reshard(model)  # which collectives a pass needs depends on what is gathered
        before = self.parallel.count_collectives(self.device)
        done, error = self._visit_until_out_of_memory(samples, cut, visit, fields)
        if error is None and not ranked:
            return None
        failures = torch.zeros(len(cut), self.parallel.data_world, device=self.device)
        if error is not None:
            failures[done, self.parallel.data_rank] = 1
            after = self.parallel.count_collectives(self.device)
            self._abandon()
            if ranked:
                with SkippedCollectives({name: after[name] - before[name] for name in after}):
                    for parts in cut:
                        visit([], self._collate(self._tiny([samples[i] for part in parts for i in part]), fields))
        places = [(number, rank) for number, rank in self.parallel.sum(failures).nonzero().tolist()]
        if not places:
            return None
        self._abandon()
        return OutOfMemory(places, error or torch.OutOfMemoryError(f"out of memory on rank {places[0][1]}"))

    def _visit_until_out_of_memory(
        self,
        samples: Sequence[Sample],
        cut: Cut,
        visit: Callable[[list[int], MicroBatch], None],
        fields: Sequence[str],
    ) -> tuple[int, torch.OutOfMemoryError | None]:
        """Return how many micro-batches were visited, and the error; what it held on the device is free then."""
        done = 0
        try:
            for indices, batch in self._microbatches(samples, cut, fields):
                visit(indices, batch)
                done += 1
        except torch.OutOfMemoryError as error:
            if self.parallel.sequence is not None:  # a tiny sample has other shapes than the parts of its sequence
                raise
            return done, error.with_traceback(None)
        return done, None

    def _abandon(self) -> None:
        for model in self.models:
            abandon_pass(model)

    def _tiny(self, together: Sequence[Sample]) -> list[Sample]:
        """Return untrained samples that run the same model parts as a round of samples, and as few tokens."""
        found = fillers([], together, self.fillers)
        return [sample if sample.input_names else truncate(sample, 2) for sample in found]

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
        cut = self._cut(samples, self.batching.experience)
        self._run(samples, cut, lambda indices, batch: table.put(indices, stats(batch)))
        return table.columns(self.parallel.sum_data)

    def add_gradients(
        self,
        model: nn.Module,
        samples: Sequence[Sample],
        evaluate: Callable[[list[int], MicroBatch], LossOutput],
        fields: Sequence[str] = LOSS_FIELDS,
        restarted: Callable[[], object] = lambda: None,
    ) -> dict[str, float]:
        """Accumulate the gradient of a loss over the samples; return the metrics over all samples.

        If the loss of all samples is not finite, no gradient is, on any rank, so that `optim_step` skips the step.

        Args:
            evaluate: computes loss and metrics of a micro-batch, given the indices of its samples.
            fields: per-token fields that the loss reads, for `MicroBatch.values`.
            restarted: called before all micro-batches are evaluated again, one of them halved.
        """
        sums: dict[str, Tensor] = {}
        gradients = GradientSums(model)
        fresh = all(param.grad is None for param in model.parameters())

        def visit(indices: list[int], batch: MicroBatch) -> None:
            if sums:
                gradients.collect()
            output = evaluate(indices, batch)
            output.loss.backward()
            for name, value in {LOSS: output.loss, **output.metrics}.items():
                sums[name] = sums.get(name, 0.0) + value.detach().double()

        def restart() -> bool:
            if fresh:  # else earlier calls' gradients are among those of this one
                gradients.clear()
                sums.clear()
                restarted()
            return fresh

        halved = self._run(samples, self._cut(samples, self.batching.update), visit, fields, restart)
        gradients.deliver()
        values = dict(zip(sums, self.parallel.sum_data(torch.stack([*sums.values()])).tolist(), strict=True))
        if not math.isfinite(values.pop(LOSS)):
            for param in model.parameters():
                if param.grad is not None:
                    param.grad.fill_(math.nan)
        return values | ({"halved_micro_batches": float(halved)} if halved else {})


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
        self._all = [*model.parameters()]
        self._params = [param for param in self._all if param.requires_grad and param.dtype in NARROW]
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

    def clear(self) -> None:
        """Drop the sums and all gradients."""
        self._sums.clear()
        for param in self._all:
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
