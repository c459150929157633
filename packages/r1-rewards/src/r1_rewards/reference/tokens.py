"""Replace the answer in sampled token ids by the reference; the tokens of the reasoning stay as they were sampled.

A model may sample other tokens than its tokenizer would produce for the same text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from r1_rewards.reference.splice import Mode, Rule, Tokenizer, answer_start, around, encode

# Why a sample has no score: no place for an answer, no reference, too long for the model, a log-prob not a number, or
# nobody there to ask.
Cause = Literal["form", "reference", "length", "number", "silence"]
CAUSES: tuple[Cause, ...] = ("form", "reference", "length", "number", "silence")


@dataclass(frozen=True, slots=True)
class Spliced:
    """A tokenized response whose answer is the reference.

    Example: `Spliced(5, [27, 88, 29, 220, 42, 220, 27, 12, 88, 29], [4])`: five sampled tokens, then the answer, in
    which the token at 4 is the reference's.
    """

    kept: int  # tokens of the response that stay
    ids: list[int]  # [R] that follow them
    scored: list[int]  # places in `ids` of the reference's tokens, ascending


def splice_tokens(
    response_ids: Sequence[int],
    reference: str,
    tokenizer: Tokenizer,
    *,
    eos: str = "",
    mode: Mode = "r1",
    rule: Rule = "lenient",
) -> Spliced | Cause:
    """Return the sampled tokens to keep and the reference's answer after them, or why there is none.

    The rules are those of `r1_rewards.reference.splice.splice`. A sampled token that spans the start of the answer's
    mark is tokenized again.
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


def _kept(ids: list[int], text: str, start: int, tokenizer: Tokenizer) -> tuple[int, int]:
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


def _text(ids: list[int], tokenizer: Tokenizer) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)
