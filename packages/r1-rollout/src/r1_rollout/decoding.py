"""One `generate` call while it runs: prompts waiting, rows decoding, groups finished."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from r1_rollout.kv import RowCache
from r1_rollout.sampling import choose_tokens, noise_key, uniform
from r1_rollout.types import Completion, PromptLike, SamplingParams

_PREFILL_PROMPTS = 16  # per forward; bounds the logits and activations of long prompts


@dataclass(slots=True)
class _Row:
    """A running sample; its last token is sampled but not yet in the cache."""

    prompt: int  # index into the prompts
    sample: int
    noise: bytes
    length: int  # tokens in the cache
    position: int  # rotary position of the next token to enter the cache
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Decoding:
    """Continuous batching: whole groups enter as room allows, finished rows make room at once."""

    def __init__(
        self,
        model: Any,
        prompts: Sequence[PromptLike],
        params: SamplingParams,
        *,
        allowed: Tensor,
        end_token_ids: frozenset[int],
        max_sequences: int,
        version: int,
    ) -> None:
        self._model, self._prompts, self._params, self._version = model, prompts, params, version
        self._allowed = allowed
        self._end_token_ids = frozenset() if params.ignore_eos else end_token_ids
        self._capacity = min(max_sequences, len(prompts) * params.n)
        self._waiting = deque(range(len(prompts)))
        self._rows: list[_Row] = []
        self._groups: dict[int, dict[int, Completion]] = {}
        columns = max((len(prompt.token_ids) for prompt in prompts), default=0) + params.max_tokens
        self._cache: RowCache | None = RowCache(self._capacity, columns)

    @property
    def unfinished(self) -> bool:
        return bool(self._rows or self._waiting)

    def drain(self) -> None:
        """Let no waiting prompt in."""
        self._waiting.clear()

    def close(self) -> None:
        """Free the cache; what is unfinished stays so."""
        self._cache = None

    @torch.inference_mode()
    def advance(self) -> list[tuple[int, list[Completion]]]:
        """Run one forward, prefill or decode, and return the groups that it finished.

        Raises:
            RuntimeError: the call was closed while unfinished.
            FloatingPointError: the model's logits are not finite.
        """
        if self._cache is None:
            raise RuntimeError(
                "this generate() call is over: its awake block ended or a later generate() began before it finished"
            )
        if self._waiting and self._capacity - len(self._rows) >= self._params.n:
            rows, logits = self._prefill(self._cache)
        else:
            rows, logits = self._rows, self._decode(self._cache)
        self._extend(rows, logits)
        return self._retire(self._cache)

    def _prefill(self, cache: RowCache) -> tuple[list[_Row], Tensor]:
        """Let prompts in; return their new rows and the logits [rows, vocabulary] of the first answer tokens."""
        n, first_row = self._params.n, len(self._rows)
        take = min((self._capacity - first_row) // n, len(self._waiting), _PREFILL_PROMPTS)
        indices = [self._waiting.popleft() for _ in range(take)]
        prompts = [self._prompts[index] for index in indices]
        lengths = [len(prompt.token_ids) for prompt in prompts]
        prefilled = DynamicCache()
        logits = self._forward_prompts(prompts, lengths, prefilled)
        cache.insert(prefilled, lengths, first_row, n)
        rows = [
            _Row(
                prompt=index,
                sample=sample,
                noise=noise_key(self._params.seed, prompt.id, sample),
                length=len(prompt.token_ids),
                position=int(_rotary(prompt.position_ids).max()) + 1,
            )
            for index, prompt in zip(indices, prompts, strict=True)
            for sample in range(n)
        ]
        self._rows += rows
        return rows, logits.repeat_interleave(n, dim=0)

    def _forward_prompts(self, prompts: list[PromptLike], lengths: list[int], cache: DynamicCache) -> Tensor:
        """Return the logits [prompts, vocabulary] behind each prompt, leaving keys and values in `cache`.

        Prompts are padded on the right, where causal attention alone keeps the padding out of sight.
        """
        device, longest = self._allowed.device, max(lengths)
        # An allowed token pads, for it is no placeholder: those are counted against the picture features.
        token_ids = self._allowed[:1].repeat(len(prompts), longest)
        rotary = [_rotary(prompt.position_ids) for prompt in prompts]
        position_ids = torch.zeros(len(rotary[0]), len(prompts), longest, dtype=torch.int64)
        for row, (prompt, positions) in enumerate(zip(prompts, rotary, strict=True)):
            token_ids[row, : lengths[row]] = torch.tensor(prompt.token_ids, device=device)
            position_ids[:, row, : lengths[row]] = positions
        media = {
            name: torch.cat([p.model_inputs[name] for p in prompts if name in p.model_inputs]).to(device)
            for name in sorted({name for prompt in prompts for name in prompt.model_inputs})
        }
        ends = sorted({length - 1 for length in lengths})
        logits = self._model(
            input_ids=token_ids,
            position_ids=_without_lone_axis(position_ids).to(device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.tensor(ends, device=device),
            **media,
        ).logits
        return logits[range(len(prompts)), [ends.index(length - 1) for length in lengths]]

    def _decode(self, cache: RowCache) -> Tensor:
        """Feed every row its last token; return the logits [rows, vocabulary] of the next."""
        rows, device = self._rows, self._allowed.device
        width = max(row.length for row in rows) + 1
        state = torch.tensor([[row.token_ids[-1], row.length, row.position] for row in rows]).to(device)
        token_ids, lengths, positions = state.unbind(dim=1)
        axes = len(_rotary(self._prompts[rows[0].prompt].position_ids))
        cache.aim(lengths, width)
        logits = self._model(
            input_ids=token_ids[:, None],
            position_ids=_without_lone_axis(positions[None, :, None].expand(axes, -1, -1)),
            attention_mask=(torch.arange(width, device=device) <= lengths[:, None])[:, None, None],
            past_key_values=cache,
            use_cache=True,
        ).logits
        for row in rows:
            row.length += 1
            row.position += 1
        return logits[:, -1]

    def _extend(self, rows: list[_Row], logits: Tensor) -> None:
        """Sample one token for each row."""
        noise = [uniform(row.noise, len(row.token_ids)) for row in rows]
        tokens, logprobs = choose_tokens(logits, self._allowed, noise, self._params)
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if not math.isfinite(logprob):
                raise FloatingPointError(
                    f"prompt {self._prompts[row.prompt].id}, answer token {len(row.token_ids)}: the model's logits are "
                    f"not finite at weight version {self._version}; the weights or the prompt's inputs hold NaN or inf"
                )
            row.token_ids.append(token)
            row.logprobs.append(logprob)

    def _retire(self, cache: RowCache) -> list[tuple[int, list[Completion]]]:
        """Take finished rows out, fill their places from the end, and return the groups that are now complete."""
        finished = {index: c for index, row in enumerate(self._rows) if (c := self._completion(row)) is not None}
        complete = []
        for index, completion in finished.items():
            row = self._rows[index]
            group = self._groups.setdefault(row.prompt, {})
            group[row.sample] = completion
            if len(group) == self._params.n:
                complete.append((row.prompt, [group[sample] for sample in range(self._params.n)]))
                del self._groups[row.prompt]
        remaining = len(self._rows) - len(finished)
        gaps = [index for index in finished if index < remaining]
        movers = [index for index in range(remaining, len(self._rows)) if index not in finished]
        if gaps:
            cache.move(movers, gaps, max(self._rows[mover].length for mover in movers))
        for gap, mover in zip(gaps, movers, strict=True):
            self._rows[gap] = self._rows[mover]
        del self._rows[remaining:]
        return complete

    def _completion(self, row: _Row) -> Completion | None:
        """Return the answer if the row has ended."""
        if row.token_ids[-1] in self._end_token_ids:
            return Completion(row.token_ids, row.logprobs, "stop", self._version)
        if len(row.token_ids) == self._params.max_tokens:
            return Completion(row.token_ids, row.logprobs, "length", self._version)
        return None


def _rotary(position_ids: Tensor) -> Tensor:
    """Drop M-RoPE's text axis, which only tells packed sequences apart: [axes, length] -> [1 or axes - 1, length]."""
    return position_ids[1:] if len(position_ids) > 1 else position_ids


def _without_lone_axis(position_ids: Tensor) -> Tensor:
    """Models without M-RoPE take [batch, length]: drop the axis if there is but one."""
    return position_ids[0] if len(position_ids) == 1 else position_ids
