"""The learner's data types, and the layouts of their per-token fields.

For N samples with T trained tokens among them and at most R in one:

- per sample [L], prompt and response, as `Sample` stores its fields,
- flat [T], the trained tokens sample after sample, as a forward pass computes them,
- rows [N, R], a sample's trained tokens in a row, 0 on the right, as estimators and losses read them.

Example: samples that train their last 2 and 1 tokens, with `advantages` [0, 0, 3, 4] and [0, 5]: flat [3, 4, 5], rows
[[3, 4], [5, 0]].
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import NoReturn

import torch
from torch import Tensor

# The tensors that every policy loss sees.
REQUIRED = ("logprobs", "loss_mask", "advantages", "old_logprobs")


def check_tensors(owner: str, axes: str, sizes: Sequence[int] | None = None, /, **tensors: object) -> None:
    """Raise TypeError if an argument is not a tensor, ValueError if it has another shape: broadcasting would hide it.

    Args:
        owner: the class or function, for the message.
        axes: the expected axes, such as "[N, R]"; "[...]": any.
        sizes: their lengths; None: those of the first tensor.
        tensors: the arguments by name.
    """
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{owner}: {name} is of type {type(value).__name__}, expected a tensor {axes}")
        if sizes is None and (axes == "[...]" or value.ndim == axes.count(",") + 1):
            sizes = value.shape
        fits = sizes is not None and value.shape == tuple(sizes)
        if not fits:
            expected = axes if sizes is None else f"{axes} = {list(sizes)}"
            raise ValueError(f"{owner}: {name} has shape {list(value.shape)}, expected {expected}")


def check_mask(owner: str, mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(f"{owner}: loss_mask has dtype {mask.dtype}, expected torch.bool; convert it with .bool()")


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt with one answer, as the learner trains on it.

    Fields that default to None are per-token tensors. Declare a new one here, and in `LossInputs` or `AdvantageInputs`
    where it is read. Entry t belongs to token t: `old_logprobs[t]` is the log-prob of token t given the tokens before
    it, and 0 where `loss_mask` is false.

    Samples of a prompt share `model_inputs`, which may load tensors on first access. Rewards on tokens add to `reward`,
    which counts on the last trained token.

    An episode of several turns is one sample, with untrained tokens between the turns. A turn that does not continue
    the tokens before it begins another sample. The samples of an episode share `episode_id`, stand together in the
    order of their turns, and have the same `reward`. Each turn is trained in one of them.

    Example: prompt [7, 8], answer [4, 2]: `Sample(token_ids=[7, 8, 4, 2], loss_mask=[0, 0, 1, 1], position_ids=[[0, 1,
    2, 3]], group_id=0, reward=1.0)` with tensors in place of the lists.
    """

    token_ids: Tensor  # int64 or int32 [L]
    loss_mask: Tensor  # bool [L], true on tokens the policy chose
    position_ids: Tensor  # int64 [axes, L]
    group_id: int  # samples of one prompt share it
    reward: float
    model_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    prompt_length: int = 0  # first tokens that other samples may share; 0: unknown
    rollout_logprobs: Tensor | None = None  # float32 [L], as the engine sampled
    old_logprobs: Tensor | None = None  # float32 [L], the policy's before the first update
    entropies: Tensor | None = None  # float32 [L], nats, of the policy before the first update
    ref_logprobs: Tensor | None = None  # float32 [L], the frozen reference's
    teacher_logprobs: Tensor | None = None  # float32 [L], of a teacher to distil from; NaN: it gave none
    teacher_top: Tensor | None = None  # float32 [L, k], log-probs of its most likely tokens; NaN: it gave none
    teacher_top_ids: Tensor | None = None  # int32 [L, k], those tokens; outside the vocabulary: no token
    squared_probs: Tensor | None = None  # float32 [L], Σ p² of the policy before the first update
    full_kl: Tensor | None = None  # float32 [L], nats, KL(policy, reference) over the vocabulary, before it
    values: Tensor | None = None  # float32 [L], the critic's prediction before each token, before its first update
    advantages: Tensor | None = None  # float32 [L]
    returns: Tensor | None = None  # float32 [L], the critic's target
    weights: Tensor | None = None  # float32 [L], multiply the policy loss (`losses.correction`)
    selected: Tensor | None = None  # bool [L], tokens that the policy loss treats differently (`losses.covariance`)
    token_rewards: Tensor | None = None  # float32 [L], such as a turn's reward on its last token
    turn_ids: Tensor | None = None  # int32 [L], number of the turn in its episode, from 0; -1 on untrained tokens
    state_ids: Tensor | None = None  # int64 [L], hash of the state that the turn started from; 0 on untrained tokens
    routed_experts: Tensor | None = None  # uint8 or int16 [L, routers, k], of the engine; the policy uses the same
    episode_id: int = -1  # samples of one episode share it; -1: the sample is its own episode
    later_inputs: Mapping[str, Tensor] = field(default_factory=dict)  # of pictures behind the prompt, never shared

    def __post_init__(self) -> None:
        owner = f"sample of group {self.group_id}"
        check_tensors(owner, "[L]", token_ids=self.token_ids)
        if self.token_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"{owner}: token_ids has dtype {self.token_ids.dtype}, expected torch.int64 or torch.int32"
            )
        length = self.token_ids.shape[0]
        given: dict[str, Tensor] = {name: value for name in PER_TOKEN if (value := getattr(self, name)) is not None}
        for name in TOP_FIELDS:
            if (value := given.pop(name, None)) is not None:
                check_tensors(owner, "[L, k]", (length, *value.shape[1:2]), **{name: value})
        if (routed := given.pop("routed_experts", None)) is not None:
            shape = (length, *routed.shape[1:3])
            check_tensors(owner, "[L, routers, k]", shape, routed_experts=routed)
        check_tensors(owner, "[L]", (length,), loss_mask=self.loss_mask, **given)
        check_mask(owner, self.loss_mask)
        for name, value in (("turn_ids", self.turn_ids), ("state_ids", self.state_ids)):
            if value is not None and value.dtype not in (torch.int64, torch.int32):
                raise ValueError(f"{owner}: {name} has dtype {value.dtype}, expected torch.int64 or torch.int32")
        check_tensors(owner, "[axes, L]", position_ids=self.position_ids)
        check_tensors(owner, "[axes, L]", (len(self.position_ids), length), position_ids=self.position_ids)
        if not 0 <= self.prompt_length <= length:
            raise ValueError(f"{owner}: prompt_length is {self.prompt_length}, and it has {length} tokens")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Sample is not pickled, because its fields share the tensors of a whole step, all of which would go with "
            "each; send the fields of all samples together, as r1_core.types.tokens gives them, and make samples there"
        )

    def get(self, name: str) -> Tensor | None:
        value: Tensor | None = getattr(self, name)
        return value

    @property
    def response_length(self) -> int:
        """The number of trained tokens; those that an environment added do not count."""
        return int(self.loss_mask.numpy(force=True).sum())  # operations of torch take longer to start

    @property
    def input_names(self) -> set[str]:
        return {*self.model_inputs, *self.later_inputs}


def join_inputs(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate forward arguments of the same name along their first axis, in the order given.

    Where other axes differ (pictures of several sizes), they are filled with zeros at their end, as processors do.
    """
    found: dict[str, list[Tensor]] = {}
    for inputs in parts:
        for name, value in inputs.items():
            found.setdefault(name, []).append(value)
    return {name: _join(found[name]) for name in sorted(found)}


def _join(tensors: list[Tensor]) -> Tensor:
    if len({tensor.shape[1:] for tensor in tensors}) == 1:
        return torch.cat(tensors)
    widest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    whole = tensors[0].new_zeros(sum(map(len, tensors)), *widest)
    start = 0
    for tensor in tensors:
        whole[(slice(start, start := start + len(tensor)), *map(slice, tensor.shape[1:]))] = tensor
    return whole


# Of the per-token fields, those with k values a token.
TOP_FIELDS = ("teacher_top", "teacher_top_ids")
# The names of the optional per-token tensors of a sample.
PER_TOKEN = tuple(each.name for each in fields(Sample) if each.default is None)


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the whole optimizer step (all micro-batches and ranks) that divide losses (arXiv 2503.14476).

    A micro-batch's own count instead would make the gradient depend on how the step is split.
    """

    tokens: int
    sequences: int  # those that have a trained token
    length: int = 1  # divisor of a fixed-length average: tokens of the longest, unless the objective sets it


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The trained tokens of one micro-batch, one row per sample, padded on the right to R tokens.

    Values may be NaN where `loss_mask` is false: mask with `torch.where` before arithmetic.
    """

    logprobs: Tensor  # [B, R], requires grad
    loss_mask: Tensor  # bool [B, R]
    advantages: Tensor  # [B, R]
    old_logprobs: Tensor  # [B, R]
    totals: Totals
    ref_logprobs: Tensor | None = None  # [B, R]
    rollout_logprobs: Tensor | None = None  # [B, R], as the engine sampled, for losses that need them
    entropy: Tensor | None = None  # [B, R], nats, of the policy's distribution
    full_kl: Tensor | None = None  # [B, R], nats, KL(policy, reference) over the vocabulary
    teacher_divergence: Tensor | None = None  # [B, R], nats, of policy and teacher over the vocabulary
    weights: Tensor | None = None  # [B, R], multiply the policy loss
    selected: Tensor | None = None  # bool [B, R], tokens that the policy loss treats differently

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in self.__slots__ if name != "totals"}
        given = {name: value for name, value in given.items() if value is not None or name in REQUIRED}
        check_tensors("LossInputs", "[B, R]", **given)
        check_mask("LossInputs", self.loss_mask)


# The per-token tensors of a sample that a policy loss sees. The pass that takes the gradient computes the full KL anew.
LOSS_FIELDS = tuple(each.name for each in fields(LossInputs) if each.name in PER_TOKEN and each.name != "full_kl")


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A loss and its metrics, both already divided by the step's totals, so that micro-batches add up."""

    loss: Tensor  # scalar
    metrics: dict[str, Tensor] = field(default_factory=dict)  # scalars, detached


def ranges(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return whole numbers range after range, int64 [sum of `lengths`]. Example: starts 5, 0 of 2, 3 give 5 6 0 1 2."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    shifts = torch.tensor(starts, dtype=torch.int64) - counts.cumsum(0) + counts
    return torch.arange(sum(lengths)) + shifts.repeat_interleave(counts)


def trained(samples: Sequence[Sample]) -> Tensor:
    """Return where rows have tokens, bool [N, R]. R is at least 1."""
    return row_mask(torch.tensor([sample.response_length for sample in samples]))


def row_mask(lengths: Tensor) -> Tensor:
    """Return where rows of these lengths [N] have tokens, bool [N, R]. R is at least 1."""
    return torch.arange(max(1, int(lengths.max()))) < lengths[:, None]


def to_rows(flat: Tensor, trained: Tensor) -> Tensor:
    """Lay out flat values [T, …] in rows [N, R, …], 0 where `trained` is false; of [T] differentiable."""
    if flat.ndim == 1:
        return flat.new_zeros(trained.shape).masked_scatter(trained, flat)
    found = flat.new_zeros(*trained.shape, *flat.shape[1:])
    found[trained] = flat
    return found


def known(samples: Sequence[Sample], name: str) -> bool:
    """Whether samples have a per-token field.

    Raises ValueError if only some do: results for a part of a step would depend on how it is split.
    """
    lacking = [i for i, sample in enumerate(samples) if sample.get(name) is None]
    if lacking and len(lacking) < len(samples):
        raise ValueError(
            f"sample {lacking[0]} (group {samples[lacking[0]].group_id}) has no {name}, which "
            f"{len(samples) - len(lacking)} of {len(samples)} samples have; give it to all samples of a step or to none"
        )
    return not lacking


def rows(samples: Sequence[Sample], name: str, mask: Tensor | None = None) -> Tensor:
    """Return a per-token field in rows [N, R], in its own dtype. Raises ValueError if a sample lacks it.

    Args:
        mask: where rows have tokens, if a row is not a sample.
    """
    return to_rows(tokens(samples, name), trained(samples) if mask is None else mask)


def tokens(samples: Sequence[Sample], name: str) -> Tensor:
    """Return a per-token field flat, [T] or [T, k], in its own dtype. Raises ValueError if a sample lacks it."""
    columns, masks = list[Tensor](), list[Tensor]()
    for i, sample in enumerate(samples):
        column = sample.get(name)
        if column is None:
            raise ValueError(f"sample {i} (group {sample.group_id}) has no {name}, which is needed of all samples")
        columns.append(column)
        masks.append(sample.loss_mask)
    whole, mask = torch.cat(columns), torch.cat(masks)
    return whole.masked_select(mask) if whole.ndim == 1 else whole[mask]


def not_finite(samples: Sequence[Sample], name: str) -> list[int]:
    """Return the indices of samples with a NaN or infinite value of a field on a trained token."""
    wrong = ~rows(samples, name).isfinite()
    places: list[int] = wrong.any(-1).nonzero().flatten().tolist()
    return places


def with_tokens(samples: Sequence[Sample], **flat: Tensor) -> list[Sample]:
    """Return the samples with per-token fields set from flat values, [T] or [T, k]; 0 or false on untrained tokens."""
    if not samples or not flat:
        return list(samples)
    mask = torch.cat([sample.loss_mask for sample in samples])
    for name, values in flat.items():
        top = name in TOP_FIELDS and isinstance(values, Tensor)
        shape = (int(mask.sum()), *(values.shape[1:2] if top else ()))
        check_tensors("with_tokens", "[T, k]" if top else "[T]", shape, **{name: values})
    lengths = [len(sample.token_ids) for sample in samples]
    columns = [to_rows(values, mask).split(lengths) for values in flat.values()]
    fields_of_samples = zip(samples, zip(*columns, strict=True), strict=True)
    return [replace(sample, **dict(zip(flat, own, strict=True))) for sample, own in fields_of_samples]


class TokenTable:
    """Collects per-token fields of micro-batches: one row [T] for each field."""

    def __init__(self, samples: Sequence[Sample], fields: Sequence[str], device: torch.device) -> None:
        """Allocate the table; every trained token must be put once, on one rank."""
        self._fields = fields
        self._lengths = [sample.response_length for sample in samples]
        self._starts = [0, *accumulate(self._lengths)]
        self._values = torch.zeros(len(fields), sum(self._lengths), dtype=torch.float32, device=device)

    def put(self, indices: Sequence[int], values: Tensor) -> None:
        """Store a micro-batch's values [its trained tokens, fields].

        `indices` are its samples'; fillers come last, without trained tokens.
        """
        places = ranges([self._starts[i] for i in indices], [self._lengths[i] for i in indices])
        self._values.index_copy_(1, places.to(self._values.device), values.T.to(self._values))

    def columns(self, total: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the fields flat, each float32 [T] on the CPU.

        `total` sums the tables of all ranks, all of which must call this.
        """
        return dict(zip(self._fields, total(self._values).cpu(), strict=True))
