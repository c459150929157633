"""Makes vLLM report the log-prob that a learner computes: over the whole vocabulary, at the sampling temperature.

None of vLLM's modes does: `raw_logprobs` are at temperature 1, `processed_logprobs` after bans, top-k, top-p and min-p.
In the mode `processed_logits` it reports logits divided by the temperature. Adding a constant to a row changes no
probability, so this logits processor shifts each row so that its logits are the plain log-probs.

It also bans tokens and forces given answers; both need the unmasked row.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.logits_processor import LogitsProcessor as FirstRunnerProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SecondRunnerProcessor

from r1_rollout.vllm.limits import BANNED, FORCED

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GREEDY = 1e-5  # vLLM's own bound


def plain_logprobs_(logits: Tensor, temperature: Tensor, banned: Tensor, forced: Mapping[int, int]) -> Tensor:
    """Shift each row such that divided by its temperature it is the plain log-softmax; then ban and force.

    Args:
        logits: float32 [rows, vocabulary].
        temperature: float32 [rows], above 0.
        banned: int64 [tokens].
        forced: a row to the one token that is left of it, banned or not.

    Returns:
        float32 [rows, vocabulary], in place.
    """
    scaled = logits / temperature[:, None]
    logits -= temperature[:, None] * scaled.logsumexp(dim=-1, keepdim=True)
    if not forced:
        return logits.index_fill_(1, banned, -torch.inf)
    rows = torch.tensor(list(forced), device=logits.device)
    tokens = torch.tensor(list(forced.values()), device=logits.device)
    values = logits[rows, tokens]
    logits.index_fill_(1, banned, -torch.inf)
    logits[rows] = -torch.inf
    logits[rows, tokens] = values
    return logits


def reported_temperature(params: SamplingParams) -> float:
    return 1.0 if params.temperature < GREEDY else float(params.temperature)


def forced_tokens(params: SamplingParams) -> list[int] | None:
    return (params.extra_args or {}).get(FORCED)


class PlainLogprobs(FirstRunnerProcessor, SecondRunnerProcessor):
    """The processor for both of vLLM's model runners, which have different interfaces.

    The first (V1: CPU) reports added, removed and moved rows; the second (V2: CUDA) requests in slots.
    """

    def __init__(self, vllm_config: "VllmConfig", *runner: Any) -> None:
        self._first = len(runner) == 2
        device = runner[0] if self._first else runner[0].device
        self._device = torch.device(device)
        banned = vllm_config.additional_config.get(BANNED, ())
        self._banned = torch.tensor(list(banned), dtype=torch.int64, device=self._device)
        self._rows: dict[int, tuple[SamplingParams, list[int]]] = {}  # first runner: row to (settings, its answer)
        self._forced: dict[int, list[int]] = {}  # second runner: slot to answer
        self._temperature = torch.ones(0)  # by row or by slot
        if not self._first:
            self._state = runner[0]
            self._staged = torch.ones(self._state.max_num_reqs)
            self._temperature = self._staged.to(self._device, copy=True)
            self._changed = False  # whether a request has been staged since

    def is_argmax_invariant(self) -> bool:
        return False

    # The first runner.

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        rows = self._rows
        for index in batch_update.removed:
            rows.pop(index, None)
        for index, params, _, answer in batch_update.added:
            rows[index] = params, answer
        for source, target, direction in batch_update.moved:
            moved, replaced = rows.pop(source, None), rows.pop(target, None)
            if moved is not None:
                rows[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                rows[source] = replaced
        temperature = torch.ones(batch_update.batch_size)
        for index, (params, _) in rows.items():
            temperature[index] = reported_temperature(params)
        self._temperature = temperature.to(self._device)

    # The second runner.

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self._staged[req_idx] = reported_temperature(sampling_params)
        self._changed = True
        self._forced.pop(req_idx, None)
        if (answer := forced_tokens(sampling_params)) is not None:
            self._forced[req_idx] = answer
        return True

    def apply_staged_writes(self) -> None:
        if self._changed:  # the GPU waits for this copy
            self._temperature.copy_(self._staged)
            self._changed = False

    # Both.

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        if self._first:
            temperature = self._temperature[: len(logits)]
            forced = self._forced_rows()
        else:
            temperature = self._temperature[ctx.expanded_idx_mapping]
            forced = self._forced_slots(ctx) if self._forced else {}
        return plain_logprobs_(logits, temperature, self._banned, forced)

    def _forced_rows(self) -> dict[int, int]:
        answers = {index: (forced_tokens(params), len(answer)) for index, (params, answer) in self._rows.items()}
        return {index: tokens[step] for index, (tokens, step) in answers.items() if tokens and step < len(tokens)}

    def _forced_slots(self, ctx: Any) -> dict[int, int]:
        forced = {}
        for row, (slot, position) in enumerate(zip(ctx.expanded_idx_mapping.tolist(), ctx.pos.tolist(), strict=True)):
            tokens = self._forced.get(slot, ())
            step = position + 1 - int(self._state.prompt_len.np[slot])
            if 0 <= step < len(tokens):
                forced[row] = tokens[step]
        return forced
