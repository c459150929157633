"""Put the reference answer in the place of the model's own, to ask the policy how probable it is (RLPR).

The tokenizer is the caller's: anything that, called with a text, `add_special_tokens=False` and
`return_offsets_mapping=True`, returns `input_ids` and `offset_mapping`, as fast Hugging Face tokenizers do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from r1_rewards.verifiers.format import has_r1, has_r1_nothink

Mode = Literal["r1", "r1_nothink"]
Rule = Literal["lenient", "strict"]
Context = Literal["tagged", "plain", "suffix"]

OPEN, CLOSE = "<answer>", "</answer>"


class Tokenizer(Protocol):
    """Encodes text and says which characters each token covers."""

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Splice:
    """A response with the reference in its answer tag.

    Example: `Splice("<think>6*7</think><answer> 42 </answer>", ids=[...], scored=[13, 14], reference_start=9)`
    """

    text: str
    ids: list[int]  # [R] what follows the prompt's tokens
    scored: list[int]  # positions in `ids` of the reference's tokens, ascending
    reference_start: int  # position in `ids` of the token with which `<answer>` begins


def splice(
    response: str, reference: str, tokenizer: Tokenizer, *, eos: str = "", mode: Mode = "r1", rule: Rule = "lenient"
) -> Splice | None:
    r"""Return the response up to its answer, then `<answer> reference </answer>`; None if it cannot be scored.

    `lenient` is OpenBMB/RLPR's rule: one `<answer>` is enough, and for `r1` one `<think>` and one `</think>` before it;
    words elsewhere are kept, and so are the blanks after the tag. `strict` is EasyR1_RLPR's: the form of `format`'s
    mode, with only blanks between thought and answer; one blank on both sides of the reference. A reference of blanks
    only cannot be scored; blanks around it are dropped. `response` is without prompt and without end token; `eos` is
    put at the end.

    A token belongs to the reference if it covers any of its characters, so a blank merged into the first token counts.
    """
    reference = reference.strip()
    start = _strict_start(response, mode) if rule == "strict" else _lenient_start(response, mode)
    if start is None or not reference:
        return None
    blanks = " "
    if rule == "lenient":
        own = response[start + len(OPEN) :]
        blanks = own[: len(own) - len(own.lstrip())] or " "
    return _encode(response[:start] + OPEN + blanks, reference, f" {CLOSE}{eos}", tokenizer, start)


def splice_alone(reference: str, tokenizer: Tokenizer, *, eos: str = "", context: Context = "tagged") -> Splice | None:
    """Return the reference as it follows the prompt without any reasoning, for the base score that debiasing subtracts.

    `tagged` is `<answer> reference </answer>`, tokenized as in `splice`; `plain` is " reference " (OpenBMB/RLPR);
    `suffix` is " Answer: " and the reference, tokenized apart (EasyR1_RLPR). None for a reference of blanks only.
    """
    reference = reference.strip()
    if not reference:
        return None
    if context == "suffix":
        suffix = _ids(tokenizer, " Answer: ")
        scored_ids = _ids(tokenizer, reference)
        scored = list(range(len(suffix), len(suffix) + len(scored_ids)))
        return Splice(f" Answer: {reference}", suffix + scored_ids, scored, len(suffix))
    before, after = (f"{OPEN} ", f" {CLOSE}{eos}") if context == "tagged" else (" ", f" {eos}")
    return _encode(before, reference, after, tokenizer, 0)


def _lenient_start(response: str, mode: Mode) -> int | None:
    start = response.find(OPEN)
    if response.count(OPEN) != 1:
        return None
    if mode == "r1_nothink":
        return start
    think, thought = response.find("<think>"), response.find("</think>")
    once = response.count("<think>") == 1 == response.count("</think>")
    return start if once and think < thought < start else None


def _strict_start(response: str, mode: Mode) -> int | None:
    if not (has_r1(response) if mode == "r1" else has_r1_nothink(response)):
        return None
    start = response.find(OPEN)
    between = response[response.find("</think>") + len("</think>") : start] if mode == "r1" else ""
    return None if between.strip() else start


def _encode(before: str, reference: str, after: str, tokenizer: Tokenizer, reference_start: int) -> Splice:
    text = before + reference + after
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    first, last = len(before), len(before) + len(reference)
    offsets = encoded["offset_mapping"]
    scored = [place for place, (start, end) in enumerate(offsets) if start < last and end > first]
    begin = next(place for place, (_, end) in enumerate(offsets) if end > reference_start)
    return Splice(text, list(encoded["input_ids"]), scored, begin)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["input_ids"])
