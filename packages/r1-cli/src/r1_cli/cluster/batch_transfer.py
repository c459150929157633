"""Batches of samples as numpy arrays, sent from the driver to the ranks once and read there in place."""

import secrets
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from r1_cli.cluster.worker_group import Put, Reference
from r1_core.types import PER_TOKEN, Sample
from r1_data.model_inputs import LazyInputs
from r1_rollout.weights import dtype_named

Array: TypeAlias = NDArray[Any]
# A per-token field, rows of the batch, and their new values in a row, [tokens]; None: the field was removed.
FieldUpdate: TypeAlias = tuple[str, NDArray[np.int32], Array | None]


@dataclass(frozen=True, slots=True)
class SampleColumns:
    """N samples without their per-token fields, 4⅛ bytes a text token.

    Positions are sent up to the last that does not follow the one before it by 1.

    Example: text samples [7, 8, 4] and [7, 8, 5, 2] of one prompt: `token_ids` [7, 8, 4, 7, 8, 5, 2], `lengths` [3, 4],
    `prompt_lengths` [2, 2], `loss_masks` the bits 0010011, `positions` [[[0]]], `position` [0, 0], `group_ids` [0, 0],
    `episode_ids` [-1, -1], `inputs` [], `input` and `later_input` [-1, -1].
    """

    token_ids: NDArray[np.int32]  # [tokens], sample after sample
    lengths: NDArray[np.int32]  # [N]
    prompt_lengths: NDArray[np.int32]  # [N]
    loss_masks: NDArray[np.uint8]  # [tokens / 8], a bit a token
    positions: tuple[NDArray[np.int32], ...]  # unique starts of position ids: [axes, 1 to longest]
    position: NDArray[np.int32]  # [N], index into `positions`
    group_ids: NDArray[np.int64]  # [N]
    episode_ids: NDArray[np.int64]  # [N]
    inputs: tuple[LazyInputs, ...]  # unique model inputs of prompts, and later inputs of samples
    input: NDArray[np.int32]  # [N], index of the prompt's in `inputs`; -1: none
    later_input: NDArray[np.int32]  # [N], index of the later ones


def pack_samples(samples: Sequence[Sample], put: Put, dtype: torch.dtype | None = None) -> SampleColumns:
    """Return the samples as columns.

    `put` stores each mapping of model inputs once, even if samples share it. References (`LazyInputs`) stay references.

    Args:
        dtype: what floating-point model inputs are cast to, such as pixels to the model's dtype.
    """
    lengths = [len(sample.token_ids) for sample in samples]
    token_ids, start = np.empty(sum(lengths), np.int32), 0
    heads: dict[tuple[int, bytes], int] = {}  # index by axes and values of a start
    inputs: dict[int, LazyInputs] = {}
    position = []
    for sample, length in zip(samples, lengths, strict=True):
        token_ids[start : start + length] = sample.token_ids
        start += length
        head = _irregular(sample.position_ids)
        position.append(heads.setdefault((len(head), head.tobytes()), len(heads)))
        for own in (sample.model_inputs, sample.later_inputs):
            if own and id(own) not in inputs:
                inputs[id(own)] = put_inputs(own, put, dtype)
    places = {key: place for place, key in enumerate(inputs)}
    return SampleColumns(
        token_ids,
        np.array(lengths, np.int32),
        np.array([sample.prompt_length for sample in samples], np.int32),
        np.packbits(np.concatenate([sample.loss_mask.numpy() for sample in samples])),
        tuple(np.frombuffer(values, np.int32).reshape(axes, -1) for axes, values in heads),
        np.array(position, np.int32),
        np.array([sample.group_id for sample in samples], np.int64),
        np.array([sample.episode_id for sample in samples], np.int64),
        tuple(inputs.values()),
        np.array([places.get(id(sample.model_inputs), -1) for sample in samples], np.int32),
        np.array([places.get(id(sample.later_inputs), -1) for sample in samples], np.int32),
    )


def unpack_samples(columns: SampleColumns) -> list[Sample]:
    """Return the samples, without per-token fields and rewards.

    Their tensors are views of the columns, token ids in int32, or of positions that samples share: never write to them.
    """
    lengths: list[int] = columns.lengths.tolist()
    if not lengths:
        return []
    masks = torch.from_numpy(np.unpackbits(columns.loss_masks, count=len(columns.token_ids)).view(np.bool_))
    longest = [0] * len(columns.positions)
    for which, length in zip(columns.position.tolist(), lengths, strict=True):
        longest[which] = max(longest[which], length)
    positions = [_continued(head, length) for head, length in zip(columns.positions, longest, strict=True)]
    return [
        Sample(
            token_ids=token_ids,
            loss_mask=mask,
            position_ids=positions[position][:, : len(mask)],
            group_id=group_id,
            reward=0.0,
            episode_id=episode_id,
            model_inputs={} if chosen < 0 else columns.inputs[chosen],
            later_inputs={} if later < 0 else columns.inputs[later],
            prompt_length=prompt_length,
        )
        for token_ids, prompt_length, mask, position, group_id, episode_id, chosen, later in zip(
            view_as_tensor(columns.token_ids).split(lengths),
            columns.prompt_lengths.tolist(),
            masks.split(lengths),
            columns.position.tolist(),
            columns.group_ids.tolist(),
            columns.episode_ids.tolist(),
            columns.input.tolist(),
            columns.later_input.tolist(),
            strict=True,
        )
    ]


def diff_fields(before: Sequence[Sample], after: Sequence[Sample], rows: Sequence[int]) -> list[FieldUpdate]:
    """Return the per-token fields that `after` and `before[rows]` do not share as objects."""
    changes: list[FieldUpdate] = []
    for name in PER_TOKEN:
        pairs = [(row, sample.get(name)) for row, sample in zip(rows, after, strict=True)]
        other = [(row, value) for row, value in pairs if value is not before[row].get(name)]
        new = [row for row, value in other if value is not None]
        gone = [row for row, value in other if value is None]
        if new:
            values = torch.cat([value for _, value in other if value is not None]).detach().cpu()
            changes.append((name, np.array(new, np.int32), values.numpy()))
        if gone:
            changes.append((name, np.array(gone, np.int32), None))
    return changes


def update_fields(samples: list[Sample], changes: Sequence[FieldUpdate]) -> None:
    fields: dict[int, dict[str, Any]] = defaultdict(dict)
    for name, rows, values in changes:
        lengths = [len(samples[row].token_ids) for row in rows]
        parts = [None] * len(rows) if values is None else view_as_tensor(values).split(lengths)
        for row, part in zip(rows.tolist(), parts, strict=True):
            fields[row][name] = part
    for row, own in fields.items():
        samples[row] = replace(samples[row], **own)


# --- tensors and arrays ----------------------------------------------------------------------------------------------


def to_array(tensor: Tensor) -> tuple[Array, str]:
    """Return a tensor as an array and its dtype's name; bfloat16, which numpy lacks, is sent as int16."""
    tensor = tensor.detach().cpu().contiguous()
    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    return bits.numpy(), str(tensor.dtype).removeprefix("torch.")


def to_tensor(array: Array, dtype: str) -> Tensor:
    return view_as_tensor(array).view(dtype_named(dtype))


def view_as_tensor(array: Array) -> Tensor:
    """Return a tensor in the array's memory, which may be read-only: never write to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


# --- positions and model inputs --------------------------------------------------------------------------------------


def _irregular(position_ids: Tensor) -> NDArray[np.int32]:
    """Return positions [axes, L] up to the last that does not follow the one before it by 1."""
    positions = position_ids.numpy()
    jumps = (np.diff(positions) != 1).any(0).nonzero()[0]
    return positions[:, : int(jumps[-1]) + 2 if len(jumps) else 1].astype(np.int32)


def _continued(head: NDArray[np.int32], length: int) -> Tensor:
    start = torch.from_numpy(head.astype(np.int64))
    return torch.cat([start, start[:, -1:] + torch.arange(1, length - start.shape[1] + 1)], dim=1)


def put_inputs(inputs: Mapping[str, Tensor], put: Put, dtype: torch.dtype | None = None) -> LazyInputs:
    """Store model inputs, floating-point ones cast to `dtype`; `LazyInputs` stay as they are."""
    if isinstance(inputs, LazyInputs):
        return inputs
    arrays = {}
    for name, tensor in inputs.items():
        arrays[name] = to_array(tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor)
    return LazyInputs(tuple(inputs), secrets.token_bytes(8), partial(_load_inputs, put(arrays)))


def _load_inputs(reference: Reference) -> dict[str, Tensor]:
    return {name: to_tensor(*packed) for name, packed in reference.load().items()}
