"""Decoding strategies: sample new tokens, or force given ones to score them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from r1_rollout.embedded.rows import Rows
from r1_rollout.sampling import choose_tokens, noise_key, tempered, uniform
from r1_rollout.types import PromptLike, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from r1_rollout.types import Tokens


@dataclass(frozen=True, slots=True)
class DecodingStrategy:
    samples: int  # rows per prompt
    limit: Callable[[int], int]  # prompt index -> tokens of an answer at most
    longest: int  # the largest limit
    keys: Callable[[int], list[int]]  # prompt index -> an int64 for each of its rows, which `choose` gets back
    choose: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # logits, keys, ages -> tokens, log-probs
    stopped: Callable[[Rows], Tensor]  # bool [rows]: which answers the last token has ended


def sampling_strategy(
    prompts: Sequence[PromptLike],
    params: SamplingParams,
    *,
    banned: Tensor,
    end_token_ids: Collection[int],
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> DecodingStrategy:
    """Return the strategy that samples `params.n` answers. Raises ValueError on stop strings without a tokenizer."""
    if params.stop and tokenizer is None:
        raise ValueError(f"stop={params.stop} needs a tokenizer: give the engine one, or use stop_token_ids")
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else end_token_ids)}
    end_tokens = torch.tensor(sorted(ends), dtype=torch.int64, device=banned.device)

    def keys(prompt: int) -> list[int]:
        return [noise_key(params.seed, prompts[prompt].id, sample) for sample in range(params.n)]

    def choose(logits: Tensor, keys: Tensor, ages: Tensor) -> tuple[Tensor, Tensor]:
        return choose_tokens(logits, banned, uniform(keys, ages), params)

    def stopped(rows: Rows) -> Tensor:
        ended = torch.isin(rows.last, end_tokens)
        if params.stop and tokenizer is not None:
            ended |= torch.tensor(_completed(rows, params.stop, tokenizer), device=ended.device)
        return ended

    return DecodingStrategy(params.n, lambda prompt: params.max_tokens, params.max_tokens, keys, choose, stopped)


def forced_strategy(responses: "Sequence[Tokens]", temperature: float, device: torch.device) -> DecodingStrategy:
    """Return the strategy that decodes given, non-empty responses. Raises ValueError if the temperature is negative."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be at least 0 and finite, got {temperature}")
    longest = max(map(len, responses), default=0)
    padded = [[*response, *[0] * (longest - len(response))] for response in responses]
    given = torch.tensor(padded, dtype=torch.int64, device=device)

    def choose(logits: Tensor, keys: Tensor, ages: Tensor) -> tuple[Tensor, Tensor]:
        tokens, scores = given[keys, ages], tempered(logits, temperature)
        return tokens, scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(dim=-1)

    def stopped(rows: Rows) -> Tensor:
        return torch.zeros_like(rows.ages, dtype=torch.bool)

    return DecodingStrategy(1, lambda prompt: len(responses[prompt]), longest, lambda prompt: [prompt], choose, stopped)


def _completed(rows: Rows, strings: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> list[bool]:
    """Return for each row whether its last token completed a string.

    A token is at least a byte, so as many tokens as the string has bytes contain it; four more keep characters whole.
    """
    window = max(len(string.encode()) for string in strings) + 4
    texts = tokenizer.batch_decode(
        [rows.tail(row, window) for row in range(len(rows))],
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )
    return [any(string in text for string in strings) for text in texts]
