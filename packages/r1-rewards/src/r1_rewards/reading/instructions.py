"""Check the 25 rules of IFEval (arXiv 2311.07911), such as "at least 3 sentences" or "no commas".

The rules and their arguments have the names of the data set google/IFEval. Each check takes linear time.
"""

import json
import re
from collections.abc import Callable, Mapping
from itertools import pairwise

from r1_rewards.reading.sentences import capital_words, count_sentences, is_language

Check = Callable[..., bool]

RELATIONS = {"less than": int.__lt__, "at least": int.__ge__}
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")  # of detectable_format:constrained_response

_WORD = re.compile(r"\w+")
_DIVIDER = re.compile(r"\s?\*\*\*\s?")
_SINGLE_STARS = re.compile(r"\*([^*\n]*)\*")
_DOUBLE_STARS = re.compile(r"\*\*([^*\n]*)\*\*")
_POSTSCRIPTS = {"P.S.": re.compile(r"p\.\s?s\."), "P.P.S": re.compile(r"p\.\s?p\.\s?s")}
_FENCE = re.compile(r"^```(?:json|Json|JSON)?|```$")
_BEHIND_FIRST_WORD = re.compile(r"[.,?!'\"]")


def follows(rule: str, text: str, arguments: Mapping[str, object]) -> bool:
    """Whether `text` follows a rule. An empty text follows none. Raises ValueError as `rule_problem` says."""
    if problem := rule_problem(rule, arguments):
        raise ValueError(problem)
    check, names = RULES[rule]
    return bool(text.strip()) and check(text, **{name: arguments[name] for name in names})


def rule_problem(rule: str, arguments: Mapping[str, object]) -> str | None:
    """Return why a rule cannot be checked, or None."""
    if rule not in RULES:
        return f"there is no rule {rule!r}; IFEval has {', '.join(sorted(RULES))}"
    for name in RULES[rule][1]:
        value = arguments.get(name)
        if value is None or (name in _NUMBERS and not _is_count(value)):
            kind = "a number, 0 or more" if name in _NUMBERS else "a value"
            return f"the rule {rule!r} has {name} = {value!r}; it needs {kind}"
        if name.endswith("relation") and value not in RELATIONS:
            return f"the rule {rule!r} has {name} = {value!r}; it must be one of {', '.join(RELATIONS)}"
    return None


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value == int(value)


def _compare(found: int, relation: str, expected: float) -> bool:
    return RELATIONS[relation](found, int(expected))


def _existence(text: str, keywords: list[str]) -> bool:
    lowered = text.lower()
    return all(keyword.lower() in lowered for keyword in keywords)


def _frequency(text: str, keyword: str, frequency: float, relation: str) -> bool:
    return _compare(text.lower().count(keyword.strip().lower()), relation, frequency)


def _forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def _letter_frequency(text: str, letter: str, let_frequency: float, let_relation: str) -> bool:
    return _compare(text.lower().count(letter.strip().lower() or letter), let_relation, let_frequency)


def _number_sentences(text: str, num_sentences: float, relation: str) -> bool:
    return _compare(count_sentences(text), relation, num_sentences)


def _number_words(text: str, num_words: float, relation: str) -> bool:
    return _compare(len(_WORD.findall(text)), relation, num_words)


def _number_paragraphs(text: str, num_paragraphs: float) -> bool:
    """Count the parts between `***`; an empty one may only be the first or the last."""
    parts = [part.strip() for part in _DIVIDER.split(text)]
    return all(parts[1:-1]) and sum(map(bool, parts)) == num_paragraphs


def _nth_paragraph_first_word(text: str, num_paragraphs: float, nth_paragraph: float, first_word: str) -> bool:
    parts = [part.strip() for part in text.split("\n\n")]
    count, place = sum(map(bool, parts)), int(nth_paragraph) - 1
    if not 0 <= place < count or not parts[place]:
        return False
    word = parts[place].split(None, 1)[0].lstrip("'").lstrip('"')
    return count == num_paragraphs and _BEHIND_FIRST_WORD.split(word)[0].lower() == first_word.lower()


def _number_placeholders(text: str, num_placeholders: float) -> bool:
    """Count `[…]` on one line."""
    count = 0
    for line in text.split("\n"):
        end = -1
        while (start := line.find("[", end + 1)) >= 0 and (end := line.find("]", start)) >= 0:
            count += 1
    return count >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    pattern = _POSTSCRIPTS.get(marker)
    return bool(pattern.search(text.lower())) if pattern else marker.lower() in text.lower()


def _number_bullet_lists(text: str, num_bullets: float) -> bool:
    lines = [line.strip() for line in text.split("\n")]
    return sum(line[:1] == "-" or (line[:1] == "*" and line[1:2] not in ("", "*")) for line in lines) == num_bullets


def _constrained_response(text: str) -> bool:
    return any(option in text for option in OPTIONS)


def _highlighted_sections(text: str, num_highlights: float) -> bool:
    """Count `*…*` and, once more, `**…**`."""
    found = [*_SINGLE_STARS.findall(text), *_DOUBLE_STARS.findall(text)]
    return sum(bool(section.strip()) for section in found) >= num_highlights


def _multiple_sections(text: str, section_spliter: str, num_sections: float) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


def _json_format(text: str) -> bool:
    plain = _FENCE.sub("", _FENCE.sub("", text.strip(), count=1)).strip()
    try:
        json.loads(plain)
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    """Whether a line has `<<title>>`."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start:end].strip("<>").strip():
            return True
    return False


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    answers = [part for part in parts if part]
    return all(parts[1:-1]) and len(answers) == 2 and all(one != other for one, other in pairwise(answers))


def _repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quotation(text: str) -> bool:
    plain = text.strip()
    return len(plain) > 1 and plain[0] == plain[-1] == '"'


def _capital_word_frequency(text: str, capital_frequency: float, capital_relation: str) -> bool:
    return _compare(capital_words(text), capital_relation, capital_frequency)


def _english_capital(text: str) -> bool:
    return text.isupper() and is_language(text, "en")


def _english_lowercase(text: str) -> bool:
    return text.islower() and is_language(text, "en")


def _no_comma(text: str) -> bool:
    return "," not in text


RULES: Mapping[str, tuple[Check, tuple[str, ...]]] = {
    "keywords:existence": (_existence, ("keywords",)),
    "keywords:frequency": (_frequency, ("keyword", "frequency", "relation")),
    "keywords:forbidden_words": (_forbidden_words, ("forbidden_words",)),
    "keywords:letter_frequency": (_letter_frequency, ("letter", "let_frequency", "let_relation")),
    "language:response_language": (is_language, ("language",)),
    "length_constraints:number_sentences": (_number_sentences, ("num_sentences", "relation")),
    "length_constraints:number_paragraphs": (_number_paragraphs, ("num_paragraphs",)),
    "length_constraints:number_words": (_number_words, ("num_words", "relation")),
    "length_constraints:nth_paragraph_first_word": (
        _nth_paragraph_first_word,
        ("num_paragraphs", "nth_paragraph", "first_word"),
    ),
    "detectable_content:number_placeholders": (_number_placeholders, ("num_placeholders",)),
    "detectable_content:postscript": (_postscript, ("postscript_marker",)),
    "detectable_format:number_bullet_lists": (_number_bullet_lists, ("num_bullets",)),
    "detectable_format:constrained_response": (_constrained_response, ()),
    "detectable_format:number_highlighted_sections": (_highlighted_sections, ("num_highlights",)),
    "detectable_format:multiple_sections": (_multiple_sections, ("section_spliter", "num_sections")),
    "detectable_format:json_format": (_json_format, ()),
    "detectable_format:title": (_title, ()),
    "combination:two_responses": (_two_responses, ()),
    "combination:repeat_prompt": (_repeat_prompt, ("prompt_to_repeat",)),
    "startend:end_checker": (_end_checker, ("end_phrase",)),
    "startend:quotation": (_quotation, ()),
    "change_case:capital_word_frequency": (_capital_word_frequency, ("capital_frequency", "capital_relation")),
    "change_case:english_capital": (_english_capital, ()),
    "change_case:english_lowercase": (_english_lowercase, ()),
    "punctuation:no_comma": (_no_comma, ()),
}
_NUMBERS = {
    name
    for _, names in RULES.values()
    for name in names
    if name.startswith("num_") or name.endswith("frequency") or name == "nth_paragraph"
}
