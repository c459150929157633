"""The running samples as tensors, and the strategies that choose their next tokens."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from r1_rollout.embedded.segments import close_gaps
from r1_rollout.routing import unrouted
from r1_rollout.sampling import choose_tokens, noise_key, tempered, uniform
from r1_rollout.types import Completion, PromptLike, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from r1_rollout.types import Tokens


@dataclass(slots=True, eq=False)
class SamplingRequest:
    """A prompt to sample from, and what has been sampled of it."""

    key: Hashable  # names it in its call
    prompt: PromptLike
    noise: Sequence[int]  # an int64 for each of its samples, which `DecodingStrategy.choose` gets back
    limit: int  # tokens of a sample at most
    stop: tuple[str, ...] = ()  # strings that end a sample
    split: bool = False  # its samples are returned one by one
    inputs: Mapping[str, Tensor] = field(default_factory=dict)  # of the prompt, once it is computed
    routed: Tensor | None = None  # its experts [prompt_length, routers, k], likewise, if they are recorded
    completions: dict[int, Completion] = field(default_factory=dict)  # by the number of the sample


class DecodingRows:
    """A row per sample. Rows stay dense: when one leaves, the last takes its place.

    Views are int64 [rows]: `ages` tokens decoded, `positions` the rotary position of the first decoded token, `slots`
    the prompt's slot in the cache, `last` the last token. `counts` are the ages on the host, `limits` their maxima.
    """

    def __init__(self, capacity: int, columns: int, device: torch.device) -> None:
        self.owners: list[tuple[SamplingRequest, int]] = []  # (request, number of the sample) of each row
        self._tokens = torch.zeros(capacity, columns, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(capacity, columns, device=device)
        self._state = torch.zeros(capacity, 4, dtype=torch.int64, device=device)
        self.counts, self.limits = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._routed: Tensor | None = None  # experts of the tokens [capacity, columns, routers, k], if recorded
        self._see()

    def __len__(self) -> int:
        return len(self.owners)

    def _see(self) -> None:
        self.keys, self.ages, self.positions, self.slots = self._state[: len(self)].unbind(1)

    @property
    def last(self) -> Tensor:
        return self._tokens[torch.arange(len(self), device=self._tokens.device), self.ages - 1]

    def add(self, request: SamplingRequest, position: int, slot: int) -> None:
        rows = slice(len(self), len(self) + len(request.noise))
        self.owners += [(request, sample) for sample in range(len(request.noise))]
        self._state[rows] = torch.tensor([[key, 0, position, slot] for key in request.noise])
        self.counts = np.append(self.counts, np.zeros(len(request.noise), np.int64))
        self.limits = np.append(self.limits, np.full(len(request.noise), request.limit, np.int64))
        self._see()

    def extend(self, first: int, tokens: Tensor, logprobs: Tensor) -> None:
        rows, ages = torch.arange(first, len(self), device=tokens.device), self.ages[first:]
        self._tokens[rows, ages] = tokens
        self._logprobs[rows, ages] = logprobs
        ages += 1
        self.counts[first:] += 1

    def route(self, experts: Tensor) -> None:
        """Store the experts of every row's last token, [rows, routers, k]."""
        if self._routed is None:
            self._routed = experts.new_full((*self._tokens.shape, *experts.shape[1:]), unrouted(experts.dtype))
        self._routed[torch.arange(len(self), device=experts.device), self.ages - 1] = experts

    def routed(self, row: int) -> Tensor | None:
        """Return the experts of a row's prompt and answer, [prompt_length + age, routers, k]; None if not recorded."""
        request, age = self.owners[row][0], self.counts[row]
        if request.routed is None:
            return None
        answer = request.routed.new_full((age, *request.routed.shape[1:]), unrouted(request.routed.dtype))
        if self._routed is not None:
            answer[: age - 1] = self._routed[row, : age - 1]
        return torch.cat([request.routed, answer]).cpu()

    def decoded(self, row: int) -> tuple[Tensor, Tensor]:
        """Return a row's int32 tokens and float32 log-probs, [age] each, copied to main memory."""
        age = self.counts[row]
        tokens, logprobs = self._tokens[row, :age], self._logprobs[row, :age]
        return tokens.to("cpu", torch.int32), logprobs.to("cpu", copy=True)

    def tail(self, row: int, count: int) -> list[int]:
        age = self.counts[row]
        tokens: list[int] = self._tokens[row, max(age - count, 0) : age].tolist()
        return tokens

    def remove(self, finished: Sequence[int]) -> tuple[list[int], list[int]]:
        """Remove rows; return which rows (sources) have moved to which places (targets)."""
        sources, targets = close_gaps(len(self), finished)
        for tensor in (self._tokens, self._logprobs, self._state, self._routed):
            if tensor is not None:
                tensor[targets] = tensor[sources]
        for numbers in (self.counts, self.limits):
            numbers[targets] = numbers[sources]
        for source, target in zip(sources, targets, strict=True):
            self.owners[target] = self.owners[source]
        del self.owners[len(self) - len(finished) :]
        self.counts, self.limits = self.counts[: len(self)], self.limits[: len(self)]
        self._see()
        return sources, targets


@dataclass(frozen=True, slots=True)
class DecodingStrategy:
    choose: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # logits, noise, ages -> tokens, log-probs
    stopped: Callable[[DecodingRows], Tensor]  # bool [rows]: which samples the last token has ended


def sampling_strategy(
    params: SamplingParams,
    *,
    banned: Tensor,
    end_token_ids: Collection[int],
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> DecodingStrategy:
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else end_token_ids)}
    end_tokens = torch.tensor(sorted(ends), dtype=torch.int64, device=banned.device)

    def choose(logits: Tensor, noise: Tensor, ages: Tensor) -> tuple[Tensor, Tensor]:
        return choose_tokens(logits, banned, uniform(noise, ages), params)

    def stopped(rows: DecodingRows) -> Tensor:
        ended = torch.isin(rows.last, end_tokens)
        if tokenizer is not None and any(request.stop for request, _ in rows.owners):
            ended |= torch.tensor(_completed(rows, tokenizer), device=ended.device)
        return ended

    return DecodingStrategy(choose, stopped)


def sampling_request(
    key: Hashable, prompt: PromptLike, params: SamplingParams, tokenizer: "PreTrainedTokenizerBase | None"
) -> SamplingRequest:
    """Return the request for `params.n` samples. Raises ValueError on stop strings without a tokenizer."""
    if params.stop and tokenizer is None:
        raise ValueError(f"stop={params.stop} needs a tokenizer: give the engine one, or use stop_token_ids")
    noise = [noise_key(params.seed, prompt.id, sample) for sample in range(params.n)]
    return SamplingRequest(key, prompt, noise, params.max_tokens, params.stop)


def forced_strategy(responses: "Sequence[Tokens]", temperature: float, device: torch.device) -> DecodingStrategy:
    """Return the strategy that decodes given, non-empty responses. A request's noise is its response's index.

    Raises ValueError if the temperature is negative.
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be at least 0 and finite, got {temperature}")
    longest = max(map(len, responses), default=0)
    padded = [[*response, *[0] * (longest - len(response))] for response in responses]
    given = torch.tensor(padded, dtype=torch.int64, device=device)

    def choose(logits: Tensor, noise: Tensor, ages: Tensor) -> tuple[Tensor, Tensor]:
        tokens, scores = given[noise, ages], tempered(logits, temperature)
        return tokens, scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(dim=-1)

    def stopped(rows: DecodingRows) -> Tensor:
        return torch.zeros_like(rows.ages, dtype=torch.bool)

    return DecodingStrategy(choose, stopped)


def _completed(rows: DecodingRows, tokenizer: "PreTrainedTokenizerBase") -> list[bool]:
    """Return for each row whether its last token completed a string that ends it.

    A token is at least a byte, so as many tokens as the string has bytes contain it; four more keep characters whole.
    """
    stops = [request.stop for request, _ in rows.owners]
    windows = [max((len(string.encode()) for string in strings), default=-4) + 4 for strings in stops]
    texts = tokenizer.batch_decode(
        [rows.tail(row, window) for row, window in enumerate(windows)],
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )
    return [any(string in text for string in strings) for strings, text in zip(stops, texts, strict=True)]
