"""Batches of fine-tuning: demonstrations as samples of the learner, their metrics and their record."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from r1_cli.runs.schema import COLUMNS, SCHEMA
from r1_cli.train.recorder import clean, list_column, token_column
from r1_cli.train.types import Policy, RenderedRows
from r1_core import preference
from r1_core.preference import PreferenceLoss, mismatch
from r1_core.reward_model import BradleyTerry, at_end, weigh_values
from r1_core.types import Sample, not_finite, tokens
from r1_data.types import DataError, Demonstration

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("r1")

MOST_LEFT_OUT = 0.05  # share of the rows that may turn out to be unreadable


Demonstrations: TypeAlias = RenderedRows[Sequence[Demonstration]]


@dataclass(frozen=True, slots=True)
class DemonstrationBatch:
    """The samples of a step. Those of a row stand together and share `group_id`."""

    demonstrations: list[Demonstration]
    samples: list[Sample]
    left_out: int = 0  # rows that could not be rendered

    @property
    def rewarded(self) -> bool:
        """Whether a reward model read the samples, which then have a value in place of log-probs."""
        return any(sample.values is not None for sample in self.samples)


@dataclass(frozen=True, slots=True)
class DemonstrationReader:
    """Renders the rows of a data set, and leaves out those that cannot be rendered."""

    rows: Demonstrations
    unreadable: set[int] = field(default_factory=set)

    def read(self, indices: Sequence[int], then: Sequence[int] = ()) -> DemonstrationBatch:
        """Render rows, and begin to render those that are read next.

        Raises DataError if more than 5 % of all rows could not be rendered so far.
        """
        self.rows.prefetch(indices)
        rendered, left_out = list[Sequence[Demonstration]](), 0
        for index in indices:
            try:
                rendered.append(self.rows[index])
            except DataError as error:
                left_out += 1
                self.unreadable.add(index)
                log.warning("left out of this step: %s", error)
                if len(self.unreadable) > MOST_LEFT_OUT * len(self.rows):
                    count = f"{len(self.unreadable)} of {len(self.rows)} rows cannot be read"
                    raise DataError(
                        f"{count}, more than {MOST_LEFT_OUT:.0%}: run r1 data check; the latest: {error}"
                    ) from error
        self.rows.prefetch(then)
        return DemonstrationBatch(
            [one for row in rendered for one in row],
            [to_sample(one, group) for group, row in enumerate(rendered) for one in row],
            left_out,
        )


def to_sample(one: Demonstration, group_id: int) -> Sample:
    loss_mask = torch.tensor(one.loss_mask)
    return Sample(
        token_ids=torch.tensor(one.token_ids),
        loss_mask=loss_mask,
        position_ids=one.position_ids,
        group_id=group_id,
        reward=0.0,
        model_inputs=one.model_inputs,
        prompt_length=one.prompt_length,
        advantages=loss_mask.float(),  # weights of the tokens
    )


# --- metrics ----------------------------------------------------------------------------------------------------------


def sum_nll(batch: DemonstrationBatch) -> dict[str, tuple[float, int]]:
    """Return for each source the sum of −log π over trained tokens, in nats, and their number; not of rejected ones."""
    sums: dict[str, tuple[float, int]] = {}
    for one, sample in zip(batch.demonstrations, batch.samples, strict=True):
        if one.label is False:
            continue
        nll, count = sums.get(one.source, (0.0, 0))
        own = tokens([sample], "old_logprobs")
        sums[one.source] = nll - float(own.sum(dtype=torch.float64)), count + len(own)
    return sums


def nll_metrics(sums: Mapping[str, tuple[float, int]], prefix: str) -> dict[str, float]:
    """Return mean NLL, perplexity and number of tokens, and the mean NLL of each source if there are several."""
    total, count = (sum(column) for column in zip(*sums.values(), strict=True)) if sums else (0.0, 0)
    nll = total / max(count, 1)
    means = {f"{prefix}{source}/nll": part / max(own, 1) for source, (part, own) in sorted(sums.items())}
    return {
        f"{prefix}nll": nll,
        f"{prefix}perplexity": math.exp(min(nll, 700.0)),
        f"{prefix}tokens": float(count),
        **(means if len(means) > 1 else {}),
    }


def batch_metrics(batch: DemonstrationBatch) -> dict[str, float]:
    lengths = [len(sample.token_ids) for sample in batch.samples]
    return {
        **({} if batch.rewarded else nll_metrics(sum_nll(batch), "sft/")),
        "sft/samples": float(len(lengths)),
        "sft/length/mean": sum(lengths) / max(len(lengths), 1),
        "sft/length/max": float(max(lengths, default=0)),
    }


def weigh(
    learner: Policy, batch: DemonstrationBatch, loss: PreferenceLoss | BradleyTerry
) -> tuple[DemonstrationBatch, dict[str, float]]:
    """Return the batch with log-probs and the advantages of a preference loss, or rewards and returns; and metrics.

    Raises DataError if a conversation ends with padding, behind which a reward model reads no token.
    """
    if isinstance(loss, BradleyTerry):
        samples, metrics = weigh_values(
            learner.add_logprobs([at_end(sample) for sample in batch.samples], loss.needs), center=loss.center
        )
        return replace(batch, samples=samples), metrics
    samples, needs = learner.add_logprobs(batch.samples, loss.needs), loss.needs
    other = learner.add_logprobs(mismatch(samples), needs) if loss.kind == "kto" else []
    labels = [one.label is not False for one in batch.demonstrations]
    samples, metrics = preference.weigh(samples, loss, labels, mismatched=other)
    return replace(batch, samples=samples), metrics


def find_not_finite(batch: DemonstrationBatch) -> list[str]:
    """Return the ids of rows with a log-prob, or a reward, that is NaN or infinite."""
    name = "values" if batch.rewarded else "old_logprobs"
    return [batch.demonstrations[place].id for place in not_finite(batch.samples, name)]


# --- record -----------------------------------------------------------------------------------------------------------


def to_table(
    step: int,
    batch: DemonstrationBatch,
    tokenizer: "PreTrainedTokenizerBase",
    media: Callable[[Demonstration], list[str]],
) -> pa.Table:
    """Return one row per sample: its prompt, and everything from its first trained token on as its answer.

    `old_logprobs` are minus the NLL of each token, `score` is their mean; of a reward model `score` is the reward.
    """
    ones, samples = batch.demonstrations, batch.samples
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    answers = [one.token_ids[one.prompt_length :] for one in ones]
    masks = [np.array(one.loss_mask[one.prompt_length :]) for one in ones]
    marks = [None if mask.all() else mask for mask in masks]
    read = "values" if batch.rewarded else "old_logprobs"
    first = [sample.group_id for sample in samples]
    columns: dict[str, object] = {
        "step": [step] * len(ones),
        "phase": ["sft"] * len(ones),
        "group": first,
        "sample": [place - first.index(group) for place, group in enumerate(first)],
        "prompt_id": [clean(one.id) for one in ones],
        "source": [clean(one.source) for one in ones],
        "prompt": [clean(tokenizer.decode(_shorten(one.token_ids[: one.prompt_length], special))) for one in ones],
        "answer": [clean(tokenizer.decode(answer)) for answer in answers],
        "ground_truth": [""] * len(ones),
        "media": [media(one) for one in ones],
        "prompt_tokens": list_column(
            [np.asarray(one.token_ids[: one.prompt_length], np.int32) for one in ones], np.int32
        ),
        "tokens": list_column([np.asarray(answer, np.int32) for answer in answers], np.int32),
        "score": [float(tokens([sample], read).mean()) for sample in samples],
        "reward": [0.0] * len(ones),
        "finish_reason": ["stop"] * len(ones),
        "weight_version": [step - 1] * len(ones),
        "sampled": [None if mark is None else mark.tolist() for mark in marks],
    }
    lengths = [len(answer) for answer in answers]
    for name in ("old_logprobs", "ref_logprobs", "entropies", "advantages"):
        columns[name] = token_column(samples, name, lengths, marks)
    return pa.Table.from_arrays(
        [_as_array(columns.get(column.name), column.type, len(ones)) for column in COLUMNS], schema=SCHEMA
    )


def _shorten(token_ids: Sequence[int], special: set[int]) -> list[int]:
    """Return the tokens with one of each run of an equal special token, such as a picture's placeholders."""
    return [token for before, token in pairwise([-1, *token_ids]) if token != before or token not in special]


def _as_array(values: object, kind: pa.DataType, rows: int) -> pa.Array:
    if values is None:
        return pa.nulls(rows, kind)
    return values if isinstance(values, pa.Array) else pa.array(values, kind)
