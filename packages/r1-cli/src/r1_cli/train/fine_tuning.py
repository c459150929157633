"""The loop of fine-tuning: render the next rows, descend −log π of their trained tokens, repeat."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from statistics import fmean
from typing import TYPE_CHECKING

from r1_cli.train.demonstrations import (
    DemonstrationBatch,
    DemonstrationReader,
    batch_metrics,
    find_not_finite,
    nll_metrics,
    sum_nll,
    to_table,
    weigh,
)
from r1_cli.train.metrics.step import mean_of, performance, require_updates
from r1_cli.train.metrics.validate import Validation
from r1_cli.train.run import Measured, Taken, TrainingRun, sample_validation
from r1_cli.train.types import Position, PromptStream
from r1_core.objective import Objective
from r1_core.preference import PreferenceLoss
from r1_core.reward_model import BradleyTerry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("r1")


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuning(TrainingRun):
    reader: DemonstrationReader
    stream: PromptStream
    rates: Sequence[float] | None = None  # pass rates that a curriculum read, by row
    steps_per_epoch: int
    objective: Objective
    preference: PreferenceLoss | BradleyTerry | None  # compares answers; None: their likelihood
    tokenizer: "PreTrainedTokenizerBase"
    val_readers: Sequence[DemonstrationReader]
    val_batch_size: int  # rows at once; -1: all of a source
    open_generation: (
        Callable[[], Validation | None] | None
    )  # opens an engine when first called; None: validates by loss only

    def take_step(self, at: Position) -> Taken:
        return take_step(self, at)

    @property
    def validates(self) -> bool:
        return bool(self.val_readers) or self.open_generation is not None

    def validate(self, step: int) -> Measured:
        record = validate_loss(self)
        validation = self.open_generation() if self.open_generation else None
        if validation is None:
            return record, []
        sampled, generations = sample_validation(self, validation, step)
        return record | sampled, generations

    def require_progress(self, at: Position) -> None:
        require_updates(at.skipped, self.schedule.max_skipped_steps)


def take_step(run: FineTuning, at: Position) -> Taken:
    """Take one optimizer step on the next rows."""
    watch = run.stopwatch()
    with watch("step"):
        rows = run.stream.batch(at.step)
        with watch("render"), run.stop.interruptible():
            batch = run.reader.read(rows, run.stream.batch(at.step + 1))
        updates, fault, compared = list[dict[str, float]](), "", dict[str, float]()
        if batch.samples:
            if run.preference:
                with watch("adv"):  # −∂L/∂s of the summed log-probs s of each answer
                    batch, compared = weigh(run.learner, batch, run.preference)
            with watch("update_actor"):  # descend −w · log π, w = 1 on every trained token, or these slopes
                samples, metrics = run.learner.forward_backward_on_policy(batch.samples, run.objective)
                batch, updates = replace(batch, samples=samples), [metrics | run.learner.optim_step()]
            fault = find_fault(batch, updates)
    record = {
        "sft/epoch": (at.step + 1) / run.steps_per_epoch,
        "sft/skipped": float(bool(fault)),
        "sft/left_out": batch.left_out,
    }
    if run.rates:
        record["curriculum/expected"] = fmean(run.rates[row] for row in rows)
    record |= batch_metrics(batch) | mean_of(updates, "actor/") | compared
    if fault:
        log.warning("step %d is skipped: %s", at.step + 1, fault)
    if batch.samples:
        record |= performance(batch.samples, watch.lap(), run.learner.describe(), 1)
        run.recorder.record_table(at.step + 1, "sft", partial(to_table, at.step + 1, batch, run.tokenizer))
    stream = replace(at.stream, cursor=at.step + 1)
    return Taken(replace(at, step=at.step + 1, stream=stream, skipped=at.skipped + 1 if fault else 0), record, [])


def find_fault(batch: DemonstrationBatch, updates: Sequence[Mapping[str, float]]) -> str:
    """Return why the optimizer skipped the batch; "" if it did not."""
    if rows := find_not_finite(batch):
        return f"the loss of {', '.join(rows[:3])} is not finite"
    if all(isfinite(update["grad_norm"]) for update in updates):
        return ""
    return "its gradient is not finite, though the loss of every row is, so that no row can be named"


def validate_loss(run: FineTuning) -> dict[str, float]:
    """Return `val/nll` over the trained tokens of all validation rows, that of each source, and comparisons."""
    sums: dict[str, tuple[float, int]] = {}
    compared, samples = Counter[str](), 0
    for reader in run.val_readers:
        rows = range(len(reader.rows))
        size = run.val_batch_size if run.val_batch_size > 0 else len(rows)
        for first in range(0, len(rows), size):
            batch = reader.read(rows[first : first + size], rows[first + size : first + 2 * size])
            if run.preference and batch.samples:
                batch, metrics = weigh(run.learner, batch, run.preference)
                compared.update({name: len(batch.samples) * value for name, value in metrics.items()})
            else:
                batch = replace(batch, samples=run.learner.add_logprobs(batch.samples, frozenset({"old_logprobs"})))
            samples += len(batch.samples)
            for source, (nll, count) in ({} if batch.rewarded else sum_nll(batch)).items():
                before = sums.get(source, (0.0, 0))
                sums[source] = before[0] + nll, before[1] + count
    found = {f"val/{name}": total / samples for name, total in compared.items()}
    return found if isinstance(run.preference, BradleyTerry) else nll_metrics(sums, "val/") | found
