"""The running samples as tensors: tokens, log-probs, positions, noise keys."""

from collections.abc import Sequence

import torch
from torch import Tensor

from r1_rollout.embedded.segments import close_gaps


class Rows:
    """A row per sample. Rows stay dense: when one leaves, the last takes its place.

    Properties are int64 [rows]: `ages` tokens decoded, `limits` their maxima, `positions` the rotary position of the
    first decoded token, `slots` the prompt's slot in the cache, `last` the last token.
    """

    def __init__(self, capacity: int, columns: int, device: torch.device) -> None:
        self.owners: list[tuple[int, int]] = []  # (prompt, sample) of each row
        self._tokens = torch.zeros(capacity, columns, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(capacity, columns, device=device)
        self._state = torch.zeros(capacity, 5, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def keys(self) -> Tensor:
        return self._state[: len(self), 0]

    @property
    def ages(self) -> Tensor:
        return self._state[: len(self), 1]

    @property
    def limits(self) -> Tensor:
        return self._state[: len(self), 2]

    @property
    def positions(self) -> Tensor:
        return self._state[: len(self), 3]

    @property
    def slots(self) -> Tensor:
        return self._state[: len(self), 4]

    @property
    def last(self) -> Tensor:
        return self._tokens[torch.arange(len(self), device=self._tokens.device), self.ages - 1]

    def add(self, prompt: int, keys: Sequence[int], limit: int, position: int, slot: int) -> None:
        rows = slice(len(self), len(self) + len(keys))
        self.owners += [(prompt, sample) for sample in range(len(keys))]
        self._state[rows] = torch.tensor([[key, 0, limit, position, slot] for key in keys])

    def extend(self, first: int, tokens: Tensor, logprobs: Tensor) -> None:
        rows, ages = torch.arange(first, len(self), device=tokens.device), self.ages[first:]
        self._tokens[rows, ages] = tokens
        self._logprobs[rows, ages] = logprobs
        ages += 1

    def decoded(self, row: int) -> tuple[Tensor, Tensor]:
        """Return a row's int32 tokens and float32 log-probs, [age] each, copied to main memory."""
        age = int(self.ages[row])
        tokens, logprobs = self._tokens[row, :age], self._logprobs[row, :age]
        return tokens.to("cpu", torch.int32), logprobs.to("cpu", copy=True)

    def tail(self, row: int, count: int) -> list[int]:
        age = int(self.ages[row])
        tokens: list[int] = self._tokens[row, max(age - count, 0) : age].tolist()
        return tokens

    def remove(self, finished: Sequence[int]) -> tuple[list[int], list[int]]:
        """Remove rows; return which rows (sources) have moved to which places (targets)."""
        sources, targets = close_gaps(len(self), finished)
        for tensor in (self._tokens, self._logprobs, self._state):
            tensor[targets] = tensor[sources]
        for source, target in zip(sources, targets, strict=True):
            self.owners[target] = self.owners[source]
        del self.owners[len(self) - len(finished) :]
        return sources, targets
