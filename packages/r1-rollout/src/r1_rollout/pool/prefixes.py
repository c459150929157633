"""Which member of a pool has computed the beginning of a prompt."""

from collections.abc import Sequence
from typing import Generic, TypeVar

M = TypeVar("M")
BLOCK = 16  # tokens, as in vLLM's prefix cache


class PrefixIndex(Generic[M]):
    """Members by the prompts that they got, compared by whole blocks of tokens."""

    def __init__(self) -> None:
        self._members: dict[int, M] = {}  # by the hash of all whole blocks of a prompt

    def add(self, tokens: Sequence[int], member: M) -> None:
        if hashes := prefix_hashes(tokens):
            self._members[hashes[-1]] = member

    def find(self, tokens: Sequence[int]) -> M | None:
        """Return the member that got the longest earlier prompt with which these tokens begin."""
        found = (self._members.get(one) for one in reversed(prefix_hashes(tokens)))
        return next((member for member in found if member is not None), None)


def prefix_hashes(tokens: Sequence[int]) -> list[int]:
    """Return a hash of the tokens up to the end of each whole block."""
    hashes, before = [], 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        before = hash((before, *tokens[end - BLOCK : end]))
        hashes.append(before)
    return hashes
