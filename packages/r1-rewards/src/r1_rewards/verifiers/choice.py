"""Score a multiple-choice response: one letter, a letter with its text, or several letters."""

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase

from r1_rewards.reading import extract
from r1_rewards.reading.plain_text import plain_characters
from r1_rewards.types import Score
from r1_rewards.verifiers import text

TAKES = ("choices",)  # columns of the data row that fill parameters of `score`

_LATEX = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\s?\{|[${}*\[\]]|\\[()\[\]]")
_LETTERS = re.compile(r"\(?([A-Z])\)?(?:\s{0,4}(?:,|;|&|/|and\b|or\b)\s{0,4}(?:and\s{1,4})?\(?([A-Z])\)?)*[.)]?")
_LETTER = re.compile(r"[A-Z]")
_RUN = re.compile(r"[A-Z]{2,10}")
_LETTER_WITH_TEXT = re.compile(r"\(?([A-Z])(?:\)|[.:])\s{0,8}(\S.*)?", re.DOTALL)
_NAMED = re.compile(r"\b(?:option|choice|answer)s?\s{1,4}(?:is\s{1,4})?\(?([A-Z])\b\)?", re.IGNORECASE)
_DENIED = re.compile(r"\b(?:not|isn't|isnt|never|neither|nor|except|wrong|incorrect|cannot|can't)\b", re.IGNORECASE)
_THOUGHT = re.compile(  # "I think D is correct", not "I think A cat sat"
    r"\bI(?:\s(?:think|believe|choose|pick|guess|would\ssay)|['’]d\ssay)(?:\s(?:it\sis|it['’]s|that|option)){0,2}"
    r"\s\(?([A-Z])\b\)?(?=\s{0,4}(?:[.,;:!\n]|$|is\b|because\b|since\b))"
)
_SENTENCE_END = re.compile(r"[.;!?\n]|,?\s(?:so|but|hence|thus|therefore)\s|,\s(?:it|then)\s", re.IGNORECASE)
# A word that takes back what was said, and the letter that replaces it: "Wait, B.", "no, it should be (C)".
_RETRACTION = re.compile(
    r"(?i:\b(?:wait|(?:no|nope)(?=\s?[,.:;!?–—-])|actually|sorry|correction|oops|rather|scratch\s+that|on\s+second\s+thoughts?|i\s+meant?"
    r"|my\s+mistake|let\s+me\s+correct\s+(?:that|myself|it))\b[\s,.:;!?–—-]{1,6}|(?:不对|等等|更正|而是)[\s,，。：:;；]{0,4})"
    r"(?i:(?:no|actually|it|it's|is|that's|that|the|correct|right|final|best|my|answer|option|choice|should|must|be|i|mean"
    r"|choose|pick|go|with)[\s,:]{1,4}|应该|是|选|答案){0,8}"
    r"[(*\[{]{0,3}([A-Z])[)*\]}]{0,3}"
    r"(?=\s{0,4}(?:[.,;:!?，。；\n]|$|(?:is|was|it|because|since|as|instead|seems|must|should|fits|works)\b))"
)
_STANDING = re.compile(r"(?<![\w'’])[A-Z](?![\w'’])")
_ALONE = re.compile(r"(?<![0-9A-Za-zÀ-ɏ_'])\(?([A-Z])(?:\)|[.:]|(?=\s*$))")


def score(
    response: str, ground_truth: str, *, choices: Sequence[str] | Mapping[str, str] | None = None, partial: bool = False
) -> Score:
    r"""Return 1 if the response chooses exactly the options of the ground truth, else 0.

    The ground truth is "B", "(B)", "B. Paris", "A, C" or "AC", or the text of one of the `choices` (a list, A first, or
    a mapping from letters). The choice is read from the last `\boxed{…}`, `<answer>…</answer>` or "Answer: x", also as
    a choice's text; else from "option B" or the last capital letter that stands alone (not the "A" in "A cat sat"). A
    letter after a retraction ("(A). Wait, B.") replaces earlier ones. With `partial`, some right letters and no wrong
    one score their share.

    Example: `score("The answer is (B) Paris.", "B").value` is 1.0.
    """
    options = _options(choices)
    right = read_letters(ground_truth, options)
    if not right:
        raise ValueError(truth_problem(ground_truth, choices=choices))
    if said := _LETTER_WITH_TEXT.fullmatch(ground_truth.strip()):
        options.setdefault(said[1], said[2] or said[1])  # "Paris" is right for "B. Paris"
    chosen = chosen_letters(response, options)
    accuracy = float(chosen == right)
    value = len(chosen) / len(right) if partial and chosen <= right else accuracy
    reason = "there is no choice" if not chosen else "the right choice" if accuracy else "another choice"
    extracted = ", ".join(sorted(chosen)) or None
    return Score(value, {"overall": value, "accuracy": accuracy}, extracted=extracted, reason=reason)


def truth_problem(ground_truth: str, *, choices: Sequence[str] | Mapping[str, str] | None = None) -> str | None:
    if read_letters(ground_truth, _options(choices)):
        return None
    return f"the truth {ground_truth[:80]!r} is no letter, no list of letters and no text of a choice"


def _options(choices: Sequence[str] | Mapping[str, str] | None) -> dict[str, str]:
    return dict(choices) if isinstance(choices, Mapping) else dict(zip(ascii_uppercase, choices or (), strict=False))


def chosen_letters(response: str, options: Mapping[str, str]) -> set[str]:
    response = plain_characters(extract.after_thought(response)[-extract.TAIL :])
    retractions = [match for match in _RETRACTION.finditer(response) if not _denies(response[match.end() :])]
    if retractions:
        last = retractions[-1]
        return _read_response(response[last.end() :], options) or {last[1]}
    return _read_response(response, options)


def _read_response(response: str, options: Mapping[str, str]) -> set[str]:
    for find in (extract.boxed_list, extract.boxed, extract.tagged, extract.stated):
        extracted = find(response)
        if extracted is None:
            continue
        if _DENIED.search(extracted[:200]):
            return _stated_before_denials(extracted[:200])
        if letters := read_letters(extracted, options):
            return letters
    whole = read_letters(response, options) if len(response) < 200 else set()
    named = [
        match[1]
        for pattern in (_THOUGHT, _NAMED)
        for match in pattern.finditer(response)
        if not _is_denied(response, match.start())
    ]
    standing = [match[1] for match in _ALONE.finditer(response) if not _is_denied(response, match.start())]
    return whole or set(named[-1:]) & set(ascii_uppercase) or set(standing[-1:])


def _stated_before_denials(stated: str) -> set[str]:
    """Return the letter of "surely D, it can't be A or B": what is denied must be other letters."""
    first, *others = _SENTENCE_END.split(stated)
    letters = _ALONE.findall(first)
    denied = [set(_STANDING.findall(part)) for part in others if _DENIED.search(part)]
    if _DENIED.search(first) or len(letters) != 1 or not all(denied) or letters[0] in set().union(*denied):
        return set()
    return set(letters)


def _denies(following: str) -> bool:
    return _DENIED.search(_SENTENCE_END.split(following[:40])[0]) is not None


def _is_denied(text: str, place: int) -> bool:
    sentence = _SENTENCE_END.split(text[max(0, place - 40) : place])[-1]
    return _DENIED.search(sentence) is not None


def read_letters(extracted: str, options: Mapping[str, str]) -> set[str]:
    plain = _LATEX.sub("", extracted[:1000]).strip().rstrip(".").strip()
    if _LETTERS.fullmatch(plain):
        return set(_LETTER.findall(re.sub(r"\band\b|\bor\b", "", plain)))
    same = {letter for letter, choice in options.items() if text.normalise(choice) == text.normalise(plain)}
    if same:
        return same
    if _RUN.fullmatch(plain) and (list(plain) == sorted(set(plain)) or _is_run_of_options(plain)):
        return set(plain)
    if match := _LETTER_WITH_TEXT.fullmatch(plain):
        return {match[1]}
    bare = plain.strip("()")
    return {bare.upper()} if len(bare) == 1 and bare.isascii() and bare.isalpha() else set()


def _is_run_of_options(run: str) -> bool:
    return len(set(run)) == len(run) and set(run) <= set(ascii_uppercase[:10])
