"""Split a text into sentences of words, without its case, punctuation, LaTeX spacing and number formats."""

import hashlib
import re
import unicodedata
from functools import lru_cache
from typing import NamedTuple

_LATEX = re.compile(
    r"\\(?:[,;:! ]|(?:left|right|[bB]igg?[lr]?|displaystyle|q?quad|(?:text|math)(?:bf|it|rm|sf)?|operatorname)"
    r"(?![a-zA-Z]))"
)
_FRACTION = re.compile(r"\\[dt]?frac(?:\s*(\d)\s*(\d))?(?![a-zA-Z])")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|\\,)(?=\d{3}(?!\d))")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)]*\s+|(?<=[。！？])|\n+")
# Writing without spaces: each character is a word.
_SPACELESS = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_WORD = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+")
_SIGN = re.compile(_WORD.pattern + r"|[+*/=<>^×÷±≤≥%]|-(?=\s*[\d\\(a-z](?![a-z]))")

_NUMBER = re.compile(
    r"zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|"
    r"seventeen|eighteen|nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|hundred|thousand|"
    r"million|billion"
)
_PRONOUNS = {"he": "he", "she": "he", "his": "his", "her": "his", "him": "his", "hers": "his", "himself": "himself"}
_PRONOUNS["herself"] = "himself"
NUMBER, NAME = 1, 2  # kinds of words whose value `Word.masked` hides


class Word(NamedTuple):
    """A word as 64-bit hashes, equal in all processes."""

    plain: int
    masked: int  # of numbers, names and pronouns: what it stands for
    kind: int  # 0, NUMBER or NAME


def read_sentences(text: str) -> list[list[Word]]:
    """Return the words of each sentence; a word that begins with a capital counts as a name."""
    return [words for part in _SENTENCE_END.split(_normalise(text)) if (words := [*map(_word, _WORD.findall(part))])]


def hash_whole(text: str) -> int:
    """Return a hash of all words and arithmetic signs in order."""
    return _hash(" ".join(_SIGN.findall(_normalise(text).casefold())))


def _normalise(text: str) -> str:
    if not text.isascii():
        text = _SPACELESS.sub(r" \g<0> ", unicodedata.normalize("NFKC", text))
    if "\\" in text:
        text = _LATEX.sub(" ", _FRACTION.sub(r" frac \1 \2 ", _THOUSANDS.sub("", text)))
    return _THOUSANDS.sub("", text)


@lru_cache(2**17)
def _word(text: str) -> Word:
    folded = text.casefold()
    plain = _hash(folded)
    if text[0].isdecimal() or _NUMBER.fullmatch(folded):
        return Word(plain, _hash("0"), NUMBER)
    if folded in _PRONOUNS:
        return Word(plain, _hash(_PRONOUNS[folded]), 0)
    if text[0].isupper():
        return Word(plain, _hash("A"), NAME)
    return Word(plain, plain, 0)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).digest(), "little")
