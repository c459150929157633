"""Replace the model's answer by the reference, to measure how probable the policy finds it (RLPR).

A tokenizer is any callable that takes a text, `add_special_tokens=False` and `return_offsets_mapping=True` and returns
`input_ids` and `offset_mapping`, as fast Hugging Face tokenizers do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from r1_rewards.verifiers.format import has_box, has_r1, has_r1_nothink, has_think_box

Mode = Literal["r1", "r1_nothink", "think_box", "box"]
Rule = Literal["lenient", "strict"]
Context = Literal["tagged", "plain", "suffix"]

OPEN, CLOSE = "<answer>", "</answer>"


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a form has its answer: between two marks, padded by `blank` if the response has no blanks of its own."""

    opening: str
    closing: str
    blank: str


TAG, BOX = Slot(OPEN, CLOSE, " "), Slot(r"\boxed{", "}", "")
SLOTS: Mapping[str, Slot] = {"r1": TAG, "r1_nothink": TAG, "think_box": BOX, "box": BOX}
FORMS: Mapping[str, Callable[[str], bool]] = {
    "r1": has_r1,
    "r1_nothink": has_r1_nothink,
    "think_box": has_think_box,
    "box": has_box,
}


class Tokenizer(Protocol):
    """A fast tokenizer of transformers."""

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> Mapping[str, Any]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


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

    For modes whose answer stands in a box, `\boxed{reference}` replaces the last box.

    `lenient` is OpenBMB/RLPR's rule: one `<answer>`, and for `r1` one `<think>` and one `</think>` before it; other
    words and the blanks after the tag are kept. `strict` is EasyR1_RLPR's: the form of `format`'s mode, with only
    blanks between thought and answer, and one blank on both sides of the reference. A blank reference cannot be scored;
    surrounding blanks are dropped. A token that covers any character of the reference counts. `response` has no prompt
    and no end token; `eos` is appended.
    """
    reference = reference.strip()
    start = answer_start(response, mode, rule)
    if start is None or not reference:
        return None
    before, after = around(response[start:], mode, rule, eos)
    return encode(response[:start] + before, reference, after, tokenizer, start)


def answer_start(response: str, mode: Mode, rule: Rule) -> int | None:
    return _strict_start(response, mode) if rule == "strict" else _lenient_start(response, mode)


def around(own: str, mode: Mode, rule: Rule, eos: str) -> tuple[str, str]:
    slot = SLOTS[mode]
    blanks = slot.blank
    if rule == "lenient":
        inside = own[len(slot.opening) :]
        blanks = inside[: len(inside) - len(inside.lstrip())] or blanks
    return slot.opening + blanks, slot.blank + slot.closing + eos


def splice_alone(
    reference: str, tokenizer: Tokenizer, *, eos: str = "", context: Context = "tagged", mode: Mode = "r1"
) -> Splice | None:
    """Return the reference directly after the prompt, without reasoning, for the base score that debiasing subtracts.

    `tagged` is `<answer> reference </answer>`, or the mode's box; `plain` is " reference " (OpenBMB/RLPR); `suffix` is
    " Answer: " and the reference, tokenized separately (EasyR1_RLPR). None for a blank reference.
    """
    reference = reference.strip()
    if not reference:
        return None
    if context == "suffix":
        suffix = _ids(tokenizer, " Answer: ")
        scored_ids = _ids(tokenizer, reference)
        scored = list(range(len(suffix), len(suffix) + len(scored_ids)))
        return Splice(f" Answer: {reference}", suffix + scored_ids, scored, len(suffix))
    before, after = around("", mode, "strict", eos) if context == "tagged" else (" ", f" {eos}")
    return encode(before, reference, after, tokenizer, 0)


def _lenient_start(response: str, mode: Mode) -> int | None:
    if SLOTS[mode] is BOX:
        start = response.rfind(BOX.opening)
        thought = response.find("</think>") if mode == "think_box" else 0
        return start if 0 <= thought <= start else None
    start = response.find(OPEN)
    if response.count(OPEN) != 1:
        return None
    if mode == "r1_nothink":
        return start
    think, thought = response.find("<think>"), response.find("</think>")
    once = response.count("<think>") == 1 == response.count("</think>")
    return start if once and think < thought < start else None


def _strict_start(response: str, mode: Mode) -> int | None:
    if not FORMS[mode](response):
        return None
    if SLOTS[mode] is BOX:
        return response.rfind(BOX.opening)
    start = response.find(OPEN)
    between = response[response.find("</think>") + len("</think>") : start] if mode == "r1" else ""
    return None if between.strip() else start


def encode(before: str, reference: str, after: str, tokenizer: Tokenizer, reference_start: int) -> Splice:
    text = before + reference + after
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    first, last = len(before), len(before) + len(reference)
    offsets = encoded["offset_mapping"]
    scored = [place for place, (start, end) in enumerate(offsets) if start < last and end > first]
    begin = next(place for place, (_, end) in enumerate(offsets) if end > reference_start)
    return Splice(text, list(encoded["input_ids"]), scored, begin)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["input_ids"])
