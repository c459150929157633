"""The running samples as tensors, and the strategies that choose their next tokens."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from r1_rollout.embedded.segments import close_gaps
from r1_rollout.routing import unrouted
from r1_rollout.sampling import choose_tokens, noise_key, tempered, uniform
from r1_rollout.types import Completion, PromptLike, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from r1_rollout.types import Tokens


STOPPED, BROKEN = 1, 2  # of a row's report: its token ends the sample; its logits are not finite


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

    On the device, views are int64 [rows]: `keys` of the noise, `ages` tokens decoded, `positions` the rotary position
    of the first decoded token, `last` the last token. They keep their addresses. On the host, `counts` are the ages,
    `known` the tokens that have been read back, `limits` the largest ages, `slots` the prompts' slots in the cache.
    """

    def __init__(self, capacity: int, columns: int, device: torch.device) -> None:
        self.owners: list[tuple[SamplingRequest, int]] = []  # (request, number of the sample) of each row
        self._size = (capacity, columns)
        self._tokens, self._logprobs = np.zeros(self._size, np.int32), np.zeros(self._size, np.float32)
        self._state = torch.zeros(capacity, 4, dtype=torch.int64, device=device)
        self._report = torch.zeros(3 * capacity, dtype=torch.int32, device=device)
        self.counts, self.known, self.limits, self.slots = (np.zeros(0, np.int64) for _ in range(4))
        self._routed: Tensor | None = None  # experts of the tokens [capacity, columns, routers, k], if recorded
        self._see()

    def __len__(self) -> int:
        return len(self.owners)

    def _see(self) -> None:
        self.keys, self.ages, self.positions, self.last = self._state[: len(self)].unbind(1)

    def add(self, request: SamplingRequest, position: int, slot: int) -> None:
        samples = len(request.noise)
        rows = slice(len(self), len(self) + samples)
        self.owners += [(request, sample) for sample in range(samples)]
        self._state[rows] = torch.tensor([[key, 0, position, 0] for key in request.noise])
        self.counts, self.known = (np.append(each, np.zeros(samples, np.int64)) for each in (self.counts, self.known))
        self.limits = np.append(self.limits, np.full(samples, request.limit, np.int64))
        self.slots = np.append(self.slots, np.full(samples, slot, np.int64))
        self._see()

    def extend(self, first: int, tokens: Tensor, logprobs: Tensor, stopped: Callable[["DecodingRows"], Tensor]) -> None:
        """Append a token to the rows from `first` on, on the device, and write their report.

        Args:
            stopped: see `DecodingStrategy`.
        """
        self.last[first:] = tokens
        self.ages[first:] += 1
        status = torch.where(logprobs.isfinite(), stopped(self)[first:].int(), BROKEN)
        torch.stack([tokens.int(), logprobs.float().view(torch.int32), status], out=self.report(first))

    def report(self, first: int) -> Tensor:
        """Return int32 [3, rows], what the last step says of the rows from `first` on.

        Their tokens, the bits of their log-probs, and whether the token has ended the sample: 0, `STOPPED` or `BROKEN`.
        """
        return self._report[: 3 * (len(self) - first)].view(3, -1)

    def read(self, first: int, report: NDArray[np.int32]) -> None:
        """Store a report on the host."""
        rows = np.arange(first, first + report.shape[1])
        self._tokens[rows, self.known[rows]] = report[0]
        self._logprobs[rows, self.known[rows]] = report[1].view(np.float32)
        self.known[rows] += 1

    def route(self, experts: Tensor) -> None:
        """Store the experts of every row's last token, [rows, routers, k]."""
        if self._routed is None:
            self._routed = experts.new_full((*self._size, *experts.shape[1:]), unrouted(experts.dtype))
        self._routed[torch.arange(len(self), device=experts.device), self.ages - 1] = experts

    def routed(self, row: int) -> Tensor | None:
        """Return the experts of a row's prompt and answer, [prompt_length + age, routers, k]; None if not recorded."""
        request, age = self.owners[row][0], self.known[row]
        if request.routed is None:
            return None
        answer = request.routed.new_full((age, *request.routed.shape[1:]), unrouted(request.routed.dtype))
        if self._routed is not None:
            answer[: age - 1] = self._routed[row, : age - 1]
        return torch.cat([request.routed, answer]).cpu()

    def decoded(self, row: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return copies of a row's tokens and log-probs that are known."""
        age = self.known[row]
        return self._tokens[row, :age].copy(), self._logprobs[row, :age].copy()

    def tail(self, row: int, count: int) -> list[int]:
        age = self.known[row]
        tokens: list[int] = self._tokens[row, max(age - count, 0) : age].tolist()
        return tokens

    def remove(self, finished: Sequence[int]) -> tuple[list[int], list[int]]:
        """Remove rows; return which rows (sources) have moved to which places (targets)."""
        sources, targets = close_gaps(len(self), finished)
        for tensor in (self._state, self._routed):
            if tensor is not None and sources:
                tensor[targets] = tensor[sources]
        for numbers in (self._tokens, self._logprobs, self.counts, self.known, self.limits, self.slots):
            numbers[targets] = numbers[sources]
        for source, target in zip(sources, targets, strict=True):
            self.owners[target] = self.owners[source]
        del self.owners[len(self) - len(finished) :]
        self.counts, self.known, self.limits, self.slots = (
            each[: len(self)] for each in (self.counts, self.known, self.limits, self.slots)
        )
        self._see()
        return sources, targets


@dataclass(frozen=True, slots=True)
class DecodingStrategy:
    """How the next tokens are chosen, and what ends a sample.

    `choose` and `stopped` run on the device, in a graph if steps are replayed: without a wait, and without shapes that
    depend on numbers.
    """

    choose: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # logits, noise, ages -> tokens, log-probs
    stopped: Callable[[DecodingRows], Tensor]  # bool [rows]: which samples the last token has ended
    completed: Callable[[DecodingRows, int], Collection[int]] = lambda rows, first: ()  # rows whose known text is over


def sampling_strategy(
    params: SamplingParams,
    *,
    banned: Tensor,
    end_token_ids: Collection[int],
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    fixed_shapes: bool = False,
) -> DecodingStrategy:
    """Return the strategy of `params`; see `choose_tokens` for `fixed_shapes`."""
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else end_token_ids)}
    end_tokens = torch.tensor(sorted(ends), dtype=torch.int64, device=banned.device)

    def choose(logits: Tensor, noise: Tensor, ages: Tensor) -> tuple[Tensor, Tensor]:
        return choose_tokens(logits, banned, uniform(noise, ages), params, fixed_shapes=fixed_shapes)

    def stopped(rows: DecodingRows) -> Tensor:
        return (rows.last[:, None] == end_tokens).any(dim=1)

    def completed(rows: DecodingRows, first: int) -> Collection[int]:
        return () if tokenizer is None else _completed(rows, first, tokenizer)

    return DecodingStrategy(choose, stopped, completed)


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


def _completed(rows: DecodingRows, first: int, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the rows from `first` on whose last known token completed a string that ends them.

    A token is at least a byte, so as many tokens as the string has bytes contain it; four more keep characters whole.
    """
    stops = {row: owner.stop for row, (owner, _) in enumerate(rows.owners) if row >= first and owner.stop}
    if not stops:
        return []
    windows = {row: max(len(string.encode()) for string in strings) + 4 for row, strings in stops.items()}
    texts = tokenizer.batch_decode(
        [rows.tail(row, window) for row, window in windows.items()],
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )
    return [row for row, text in zip(stops, texts, strict=True) if any(string in text for string in stops[row])]
