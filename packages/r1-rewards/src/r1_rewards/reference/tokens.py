"""Put the reference answer behind the tokens that were sampled, so that a model reads its own reasoning unchanged.

A model may have sampled other tokens than its tokenizer would cut the same text into. Its reasoning stays as it was
sampled; only what stands in the answer's place is tokenized.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from r1_rewards.reference.splice import Mode, Rule, Tokenizer, answer_start, around, encode

# Why a sample has no score: no place for an answer, no reference, too long for the model, a log-prob not a number, or
# nobody there to ask.
Cause = Literal["form", "reference", "length", "number", "silence"]
CAUSES: tuple[Cause, ...] = ("form", "reference", "length", "number", "silence")


class TextTokenizer(Tokenizer, Protocol):
    """A tokenizer that turns tokens back into text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class Spliced:
    """A response whose answer is the reference.

    Example: `Spliced(5, [27, 88, 29, 220, 42, 220, 27, 12, 88, 29], [4])`: five sampled tokens, then the answer, of
    which the token at 4 is the reference's.
    """

    kept: int  # tokens of the response that stay
    ids: list[int]  # [R] that follow them
    scored: list[int]  # places in `ids` of the reference's tokens, ascending


def splice_tokens(
    response_ids: Sequence[int],
    reference: str,
    tokenizer: TextTokenizer,
    *,
    eos: str = "",
    mode: Mode = "r1",
    rule: Rule = "lenient",
) -> Spliced | Cause:
    """Return the sampled tokens that stay and the reference's answer behind them, or why there is none.

    The rules are those of `r1_rewards.reference.splice.splice`. A sampled token that holds the beginning of the
    answer's mark and something before it is cut anew, with the rest.
    """
    reference, ids = reference.strip(), [int(token) for token in response_ids]
    if not reference:
        return "reference"
    text = tokenizer.decode(ids, skip_special_tokens=False)
    start = answer_start(text, mode, rule)
    if start is None:
        return "form"
    kept, end = _kept(ids, text, start, tokenizer)
    before, after = around(text[start:], mode, rule, eos)
    found = encode(text[end:start] + before, reference, after, tokenizer, start - end)
    return Spliced(kept, found.ids, found.scored)


def _kept(ids: list[int], text: str, start: int, tokenizer: TextTokenizer) -> tuple[int, int]:
    """Return how many tokens lie wholly before the character `start`, and the character at which they end."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in encoded["offset_mapping"] if end <= start]
    # A character of several tokens ends with the last of them only.
    while ends and len(ends) < len(encoded["offset_mapping"]) and encoded["offset_mapping"][len(ends)][0] < ends[-1]:
        ends.pop()
    if list(encoded["input_ids"][: len(ends)]) == ids[: len(ends)]:
        return len(ends), ends[-1] if ends else 0
    low, high = 0, len(ids)
    while low < high:  # the most tokens whose text is no longer than what stays
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(_text(ids[:middle], tokenizer)) <= start else (low, middle - 1)
    while not text.startswith(found := _text(ids[:low], tokenizer)):  # within a character
        low -= 1
    return low, len(found)


def _text(ids: list[int], tokenizer: TextTokenizer) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)
