"""From a step's groups and samples to the rows of the record."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from r1_cli.groups.group import Group
from r1_cli.record.schema import COLUMNS, SCHEMA
from r1_core.rows import tokens
from r1_core.types import Sample
from r1_data.types import Prompt

Phase = Literal["train", "validation"]
OF_THE_LEARNER = ("old_logprobs", "entropies", "ref_logprobs", "advantages")


def to_table(
    step: int, phase: Phase, groups: Sequence[Group], samples: Sequence[Sample], media: Callable[[Prompt], list[str]]
) -> pa.Table:
    """Return a row for each answer, group after group.

    Args:
        samples: what was trained on, one for each answer in the same order; none in a validation.
        media: gives the files of a prompt's pictures and videos.
    """
    answers = [(place, index, group) for place, group in enumerate(groups) for index in range(len(group.responses))]
    files = {place: media(group.prompt) for place, group in enumerate(groups)}
    said = [group.responses[index] for _, index, group in answers]
    prompts = [group.prompt for _, _, group in answers]
    columns: dict[str, Any] = {
        "step": [step] * len(said),
        "phase": [phase] * len(said),
        "group": [place for place, _, _ in answers],
        "sample": [index for _, index, _ in answers],
        "prompt_id": [clean(prompt.id) for prompt in prompts],
        "source": [clean(group.data_source) for _, _, group in answers],
        "prompt": [clean(prompt.text) for prompt in prompts],
        "answer": [clean(one.text) for one in said],
        "ground_truth": [clean(prompt.ground_truth) for prompt in prompts],
        "media": [files[place] for place, _, _ in answers],
        "prompt_tokens": _lists([np.asarray(prompt.token_ids, np.int32) for prompt in prompts], np.int32),
        "tokens": _lists([one.completion.token_ids for one in said], np.int32),
        "rollout_logprobs": _lists([one.completion.logprobs for one in said], np.float32),
        "score": [one.score.value for one in said],
        "reward": [one.reward for one in said],
        "parts": [[(clean(name), float(value)) for name, value in one.score.parts.items()] for one in said],
        "extracted": [None if one.score.extracted is None else clean(one.score.extracted) for one in said],
        "reason": [
            clean(group.responses[index].score.reason or group.truth_problem or "") for _, index, group in answers
        ],
        "failure": [clean(f"{e.cause}: {e.message}") if (e := one.score.error) else None for one in said],
        "finish_reason": [one.completion.finish_reason for one in said],
        "weight_version": [one.completion.weight_version for one in said],
    }
    lengths = [len(one.completion.token_ids) for one in said]
    for name in OF_THE_LEARNER:
        columns[name] = _of_samples(samples, name, lengths)
    arrays = [
        columns[column.name]
        if isinstance(columns[column.name], pa.Array)
        else pa.array(columns[column.name], column.type)
        for column in COLUMNS
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _of_samples(samples: Sequence[Sample], name: str, lengths: Sequence[int]) -> pa.Array:
    """Return a per-token field of the samples' trained tokens, so many of each; null where there is none."""
    if not samples or any(getattr(sample, name) is None for sample in samples):
        return pa.nulls(len(lengths), SCHEMA.field(name).type)
    return _cut(tokens(samples, name).float().cpu().numpy(), lengths)


def _lists(values: Sequence[Any], dtype: Any) -> pa.Array:
    """Return arrays of different lengths as one column, without a Python object for each number."""
    flat = np.concatenate([np.empty(0, dtype), *values]).astype(dtype, copy=False)
    return _cut(flat, [*map(len, values)])


def _cut(flat: Any, lengths: Sequence[int]) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(np.cumsum([0, *lengths], dtype=np.int32)), pa.array(flat))


def clean(text: Any) -> str:
    """Return a text that UTF-8 can hold: halves of surrogate pairs, which broken files bring, as question marks."""
    return str(text).encode("utf-8", "replace").decode()
