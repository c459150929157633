"""Count sentences and capital words as NLTK's English tokenizers do, and tell the language of a text."""

import re
from functools import cache
from typing import Any

MISSING = "rules about a language need py3langid: install it with `pip install 'r1-rewards[ifeval]'`"
MAX_CHARACTERS = 10_000  # of a text; the language is found from so many first ones

# The languages that langdetect knows, with which IFEval was published; langid.py's other 40 would be taken for these.
LANGUAGES = (
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro "
    "ru sk sl so sq sv sw ta te th tl tr uk ur vi zh"
)
_ABBREVIATIONS = (
    " mr mrs ms dr prof st sr jr capt lt col gen rep sen gov rev hon inc ltd co corp vs etc e.g i.e cf fig no vol dept "
    "est approx u.s u.k u.n ph.d m.d b.a m.a d.c a.m p.m jan feb mar apr jun jul aug sept oct nov dec "
)
_NEVER_LAST = " mr mrs ms dr prof st capt lt col gen rep sen gov rev hon vs e.g i.e cf fig "

_END = re.compile(r"[.!?]+[\"')\]”’*_]*(?=\s|$)")
_LAST_WORD = re.compile(r"\S+$")
_TOKEN = re.compile(r"[^\s,;:!?()\[\]{}<>\"“”`#*|=+~^&%$@\\]+")
_CONTRACTION = re.compile(r"(?:N['’]T|['’](?:S|M|D|LL|RE|VE))$")


def count_sentences(text: str) -> int:
    """Count sentences: they end with ".", "!" or "?" before a blank, but not behind "Dr." or an initial.

    A line without such a sign at its end continues in the next one.
    """
    count, start = 0, 0
    for match in _END.finditer(text):
        word = _LAST_WORD.search(text[max(start, match.start() - 40) : match.start()])
        if match[0].startswith(".") and word and _is_abbreviated(word[0], text[match.end() : match.end() + 20]):
            continue
        count, start = count + 1, match.end()
    return count + bool(text[start:].strip())


def _is_abbreviated(word: str, behind: str) -> bool:
    plain, following = word.lstrip("(\"'“[*").lower(), behind.lstrip()[:1]
    if f" {plain} " in _NEVER_LAST or (len(plain) == 1 and plain.isalpha() and word[-1].isupper() and plain != "i"):
        return bool(following)
    return f" {plain} " in _ABBREVIATIONS and not following.isupper() and bool(following)


def capital_words(text: str) -> int:
    """Count words without small letters; a hyphen joins, and the N'T of DON'T is a word of its own."""
    words = [word.strip(".'’‘-–—/_") for word in _TOKEN.findall(text)]
    return sum(1 + bool(_CONTRACTION.search(word)) for word in words if word.isupper())


def is_language(text: str, language: str) -> bool:
    """Whether langid.py finds a text's language to be `language`, an ISO 639-1 code. One without letters is of any.

    Raises ValueError for an unknown language, ImportError without py3langid.
    """
    if language.split("-")[0] not in LANGUAGES.split():
        raise ValueError(f"language is {language!r}; known are {LANGUAGES}")
    if not any(map(str.isalpha, text)):
        return True
    return bool(_identifier().classify(text[:MAX_CHARACTERS])[0] == language.split("-")[0])


@cache
def _identifier() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ModuleNotFoundError as error:
        raise ImportError(MISSING) from error
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    identifier.set_languages(LANGUAGES.split())
    return identifier
