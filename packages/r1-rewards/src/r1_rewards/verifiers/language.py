"""Score the language of a response by the script of its letters."""

import re

from r1_rewards.types import Score

TRUTH_IS_ANSWER = False  # it is not looked at

_RANGES = {
    "latin": "A-Za-zÀ-ÖØ-öø-ɏḀ-ỿ",
    "cyrillic": "Ѐ-ԯ",
    "greek": "Ͱ-Ͽἀ-῿",
    "arabic": "ء-ۿݐ-ݿ",
    "hebrew": "א-ת",
    "devanagari": "ऀ-ॿ",
    "thai": "ก-๛",
    "han": "㐀-䶿一-鿿",
    "kana": "぀-ヿ",
    "hangul": "가-힯ᄀ-ᇿ",
}
_SCRIPTS = {
    **{script: (script,) for script in _RANGES},
    **dict.fromkeys(("en", "de", "fr", "es", "it", "pt", "nl", "pl", "tr", "vi", "id"), ("latin",)),
    **dict.fromkeys(("ru", "uk", "bg"), ("cyrillic",)),
    **dict.fromkeys(("ar", "fa", "ur"), ("arabic",)),
    "el": ("greek",), "he": ("hebrew",), "hi": ("devanagari",), "th": ("thai",), "zh": ("han",),
    "ja": ("kana", "han"), "ko": ("hangul",),
}  # fmt: skip
_NOT_PROSE = re.compile(r"```[^`]{0,20000}```|\$[^$\n]{0,2000}\$|\\[A-Za-z]+|<[^<>\n]{0,100}>|https?://\S+")


def score(response: str, ground_truth: str = "", *, language: str = "en", minimum: float | None = None) -> Score:
    """Return the share of letters in the script of `language`, from 0 to 1.

    `language` is a code such as "en", "zh" or "ja", or a script such as "latin"; languages of one script are not told
    apart. Code blocks, formulas, LaTeX commands and tags are ignored; a response without letters scores 1. With a
    `minimum`, the value is 1 from that share on, else 0. Raises ValueError for an unknown language.

    Example: `score("Die Antwort ist 答", language="de").value` is about 0.93.
    """
    if language not in _SCRIPTS:
        raise ValueError(f"language is {language!r}; known are {', '.join(sorted(_SCRIPTS))}")
    prose = _NOT_PROSE.sub(" ", response)
    counts = {script: len(_LETTERS[script].findall(prose)) for script in _RANGES}
    total = sum(counts.values())
    share = sum(counts[script] for script in _SCRIPTS[language]) / total if total else 1.0
    value = share if minimum is None else float(share >= minimum)
    return Score(value, {"overall": value, "share": share})


_LETTERS = {script: re.compile(f"[{ranges}]") for script, ranges in _RANGES.items()}
