"""Build the tensors of one forward pass: samples packed into one row, or padded to the longest."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from r1_core.learner.pack import NO_PROMPT, Pack, Row, SequenceGroup, SequenceShard, lay_out
from r1_core.types import (
    LOSS_FIELDS,
    TOP_FIELDS,
    LossInputs,
    Sample,
    Totals,
    join_inputs,
    known,
    ranges,
    rows,
    to_rows,
    tokens,
    trained,
)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B samples ready for one forward pass, with T trained tokens among them and at most R in one sample.

    Example: samples of 4 and 3 tokens that train their last 2 and 1, packed: `input_ids` is [1, 7], `predictors` [1, 2,
    5], `targets` the tokens at 2, 3 and 6, and `loss_mask` [[1, 1], [1, 0]].
    """

    forward: dict[str, Tensor]  # arguments of the model
    pack: Pack | None  # None if padded
    predictors: Tensor  # int64 [T], positions in the flattened input whose hidden state predicts each target
    targets: Tensor  # int64 [T], sample after sample
    loss_mask: Tensor  # bool [B, R]
    values: dict[str, Tensor]  # per-token fields of the loss [B, R], those that the samples have
    shard: SequenceShard | None = None  # the T tokens that this rank predicts; None: all
    top: tuple[Tensor, ...] = ()  # `TOP_FIELDS` of the targets, each [T, k], if asked for
    routed: Tensor | None = None  # `routed_experts` of the flattened input [tokens, routers, k], if the samples have it

    def rows(self, flat: Tensor) -> Tensor:
        """Lay out values of trained tokens [T] as one row per sample [B, R], 0 on the right."""
        return to_rows(flat, self.loss_mask)

    def gather(self, own: Tensor) -> Tensor:
        return own if self.shard is None else self.shard.gather(own)

    def loss_inputs(
        self, logprobs: Tensor, entropy: Tensor | None, totals: Totals, **measured: Tensor | None
    ) -> LossInputs:
        """Return the loss inputs, given log-probs, entropy and divergences of the trained tokens, each [T].

        Samples without old log-probs count as sampled by the current policy.
        """
        current = self.rows(logprobs)
        return LossInputs(
            logprobs=current,
            loss_mask=self.loss_mask,
            totals=totals,
            entropy=None if entropy is None else self.rows(entropy),
            **{name: self.rows(flat) for name, flat in measured.items() if flat is not None},
            **{"old_logprobs": current.detach(), **self.values},
        )


def collate(
    samples: Sequence[Sample],
    *,
    padding_free: bool,
    share_prompts: bool = False,
    device: torch.device | str = "cpu",
    fields: Sequence[str] = LOSS_FIELDS,
    sequence: SequenceGroup | None = None,
) -> MicroBatch:
    """Build the tensors of one forward pass on `device`, with those of `fields` that the samples have.

    `share_prompts` puts each shared prompt into a packed row once. With `sequence`, build one rank's part of a shared
    row. Raises ValueError if a first token is trained (nothing predicts it), position ids do not fit the model, some
    samples lack a per-token field that others have, or ranks share a padded batch.
    """
    if sequence is not None and not padding_free:
        raise ValueError("ranks share packed rows only: set padding_free, or one rank to a sequence")
    wholes = [len(sample.token_ids) for sample in samples]
    mask = torch.cat([sample.loss_mask for sample in samples])
    if unpredicted := mask[[0, *accumulate(wholes[:-1])]].nonzero().flatten().tolist():
        group = samples[unpredicted[0]].group_id
        raise ValueError(f"sample of group {group}: its first token is trained, but nothing predicts it")
    if padding_free:
        row = lay_out(samples, share=share_prompts)
        arguments, places, behind = pack(samples, row), row.places, row.behind
        lengths = [end - start for _, start, end in row.segments]
        spans = row.segments
    else:
        arguments, lengths, behind = pad(samples), [], []
        width = arguments["input_ids"].shape[1]
        spans = [(i, 0, width) for i in range(len(samples))]
        places = ranges([i * width for i in range(len(samples))], wholes)
    values, loss_mask = [name for name in fields if name not in TOP_FIELDS], trained(samples)
    # A token is predicted by the one before it: the first of every answer by the end of the prompt.
    predictors, targets, shard = places[:-1][mask[1:]], tokens(samples, "token_ids"), None
    if sequence is not None:
        arguments, lengths, behind = _fill_up(arguments, lengths, behind, sequence.size)
        shard, predictors, targets = _own_part(predictors, targets, sum(lengths), sequence, device)
    return MicroBatch(
        forward={name: value.to(device) for name, value in arguments.items()},
        pack=Pack.of(lengths, device, sequence, behind) if padding_free else None,
        predictors=predictors.to(device),
        targets=targets.to(device, torch.int64),
        loss_mask=loss_mask.to(device),
        values={name: rows(samples, name, loss_mask).to(device) for name in values if known(samples, name)},
        shard=shard,
        top=tuple(_own(tokens(samples, name).to(device), shard) for name in TOP_FIELDS if name in fields),
        routed=_lay_out_routing(samples, spans, sequence, device),
    )


def _lay_out_routing(
    samples: Sequence[Sample],
    spans: Sequence[tuple[int, int, int]],
    sequence: SequenceGroup | None,
    device: torch.device | str,
) -> Tensor | None:
    """Return the recorded experts of spans (sample, first token, last token + 1); a sample's last fill what is behind.

    Any do there: no trained token attends to it.
    """
    if not known(samples, "routed_experts"):
        return None
    parts = []
    for i, start, end in spans:
        own = samples[i].routed_experts
        assert own is not None
        parts += [own[start:end], own[-1:].expand(max(0, end - len(own)), -1, -1)]
    size = 1 if sequence is None else sequence.size
    missing = -sum(map(len, parts)) % size
    whole = torch.cat([*parts, parts[-2][-1:].expand(missing, -1, -1)])
    return (whole if sequence is None else sequence.part(whole, 0)).to(device)


def _fill_up(
    arguments: dict[str, Tensor], lengths: list[int], behind: list[int], size: int
) -> tuple[dict[str, Tensor], list[int], list[int]]:
    missing = -sum(lengths) % size
    if not missing:
        return arguments, lengths, behind
    token_ids, position_ids = arguments["input_ids"], arguments["position_ids"]
    # The last token again, for the reason in `pad`.
    filling = token_ids[:, -1:].expand(-1, missing)
    count = torch.arange(missing).expand(*position_ids.shape[:-1], -1)
    added = {"input_ids": torch.cat([token_ids, filling], -1), "position_ids": torch.cat([position_ids, count], -1)}
    return arguments | added, [*lengths, missing], [*behind, NO_PROMPT]


def _own_part(
    predictors: Tensor, targets: Tensor, width: int, sequence: SequenceGroup, device: torch.device | str
) -> tuple[SequenceShard, Tensor, Tensor]:
    part = width // sequence.size
    start = sequence.rank * part
    own = ((predictors >= start) & (predictors < start + part)).nonzero().squeeze(-1)
    return SequenceShard(sequence, own.to(device), len(targets)), predictors[own] - start, targets[own]


def _own(values: Tensor, shard: SequenceShard | None) -> Tensor:
    return values if shard is None else values[shard.own]


def pack(samples: Sequence[Sample], row: Row | None = None) -> dict[str, Tensor]:
    """Return forward arguments with all samples in a single row [1, T], in the layout of `row`.

    There is no attention mask: position ids that restart at 0 separate the samples, [1, T], or [axes, 1, T] with plain
    text positions first. Raises ValueError without that first axis, as a model would silently attend across samples.
    Only a `Pack` separates the answers to a shared prompt.
    """
    segments = (row or lay_out(samples, share=False)).segments
    starts, lengths = [0, *accumulate(len(sample.token_ids) for sample in samples)], [e - s for _, s, e in segments]
    chosen = ranges([starts[i] + start for i, start, _ in segments], lengths)
    position_ids = torch.cat([sample.position_ids for sample in samples], dim=-1)[:, chosen]
    plain = ranges([start for _, start, _ in segments], lengths)
    if miscounted := (position_ids[0] != plain).nonzero().flatten().tolist():
        i = bisect_right(starts, int(chosen[miscounted[0]])) - 1
        raise ValueError(
            f"sample of group {samples[i].group_id}: position_ids[0] must count 0, 1, 2, … so that samples can be "
            "packed; models with several position axes need the text positions as a first, additional axis"
        )
    inputs = list[Mapping[str, Tensor]]()  # in the order of the row's placeholders
    for i, start, end in segments:
        if start == 0:
            inputs.append(samples[i].model_inputs)
        if end == samples[i].token_ids.shape[0]:
            inputs.append(samples[i].later_inputs)
    return {
        "input_ids": torch.cat([sample.token_ids for sample in samples])[chosen][None].long(),
        "position_ids": position_ids if position_ids.shape[0] == 1 else position_ids[:, None],
        **join_inputs(inputs),
    }


def pad(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Return forward arguments with one sample per row [B, L], padded on the right, and an attention mask.

    Of several position axes, the first serves packed rows only and is left out: [axes − 1, B, L].
    """
    length = max(sample.token_ids.shape[0] for sample in samples)
    rows, positions, attention, inputs = [], [], [], list[Mapping[str, Tensor]]()
    for sample in samples:
        inputs += [sample.model_inputs, sample.later_inputs]
        own = sample.token_ids.shape[0]
        # Padded with the sample's own last token: a fixed id might be a picture's placeholder, which the model counts.
        rows.append(torch.cat([sample.token_ids, sample.token_ids[-1:].expand(length - own)]))
        positions.append(torch.nn.functional.pad(sample.position_ids, (0, length - own)))
        attention.append(torch.arange(length) < own)
    position_ids = torch.stack(positions, dim=1)
    return {
        "input_ids": torch.stack(rows).long(),
        "position_ids": position_ids[0] if position_ids.shape[0] == 1 else position_ids[1:],
        "attention_mask": torch.stack(attention).long(),
        **join_inputs(inputs),
    }
