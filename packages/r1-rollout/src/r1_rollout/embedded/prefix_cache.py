"""Keys and values of a session's finished samples, from which later turns of their conversations go on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from r1_rollout.pool.prefixes import prefix_hashes
from r1_rollout.types import PromptLike


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A prompt and a sample of it."""

    token_ids: tuple[int, ...]
    position_ids: Tensor  # int64 [axes, length], rotary
    inputs: Mapping[str, Tensor]  # of the prompt, further arguments of the model's forward
    states: Tensor  # keys and values [layers, 2, heads, length, size] of all tokens but the last
    routed: Tensor | None = None  # their experts [length, routers, k], if recorded

    @property
    def length(self) -> int:
        """Tokens whose keys and values are known."""
        return self.states.shape[3]

    @property
    def size(self) -> int:
        return self.states.nbytes + (0 if self.routed is None else self.routed.nbytes)

    def begins(self, prompt: PromptLike, position_ids: Tensor, inputs: Mapping[str, Tensor]) -> bool:
        """Whether a prompt begins with these tokens, positions and pictures."""
        return (
            tuple(prompt.token_ids[: len(self.token_ids)]) == self.token_ids
            and torch.equal(position_ids[:, : self.length], self.position_ids)
            and all(name in inputs and _begins(inputs[name], own) for name, own in self.inputs.items())
        )

    def remaining(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of a prompt that begins so, without those that are known."""
        counts = {name: len(tensor) for name, tensor in self.inputs.items()}
        rest = {name: tensor[counts.get(name, 0) :] for name, tensor in inputs.items()}
        return {name: tensor for name, tensor in rest.items() if len(tensor)}


class PrefixCache:
    """Finished samples, each until a prompt goes on from it or later ones take its place."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._keys: dict[Prefix, int] = {}  # the oldest first
        self._prefixes: dict[int, list[Prefix]] = {}  # by the hash of their whole blocks

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, prefix: Prefix) -> None:
        self._keys[prefix] = key = _block_hashes(prefix.token_ids)[-1]
        self._prefixes.setdefault(key, []).append(prefix)
        self._bytes += prefix.size
        while self._bytes > self._max_bytes:
            self._remove(next(iter(self._keys)))

    def take(self, prompt: PromptLike, position_ids: Tensor, inputs: Mapping[str, Tensor]) -> Prefix | None:
        """Remove and return the longest sample with which a prompt begins.

        Args:
            position_ids: of the prompt, int64 [axes, prompt_length], rotary.
            inputs: the prompt's `model_inputs`.
        """
        for key in reversed(_block_hashes(prompt.token_ids) if self._keys else []):
            found = [one for one in self._prefixes.get(key, ()) if one.begins(prompt, position_ids, inputs)]
            if found:
                longest = max(found, key=lambda prefix: prefix.length)
                self._remove(longest)
                return longest
        return None

    def _remove(self, prefix: Prefix) -> None:
        alike = self._prefixes[key := self._keys.pop(prefix)]
        alike.remove(prefix)
        if not alike:
            del self._prefixes[key]
        self._bytes -= prefix.size


def _block_hashes(tokens: Sequence[int]) -> list[int]:
    return [0, *prefix_hashes(tokens)]


def _begins(tensor: Tensor, own: Tensor) -> bool:
    return tensor.shape[1:] == own.shape[1:] and torch.equal(tensor[: len(own)], own)
