r"""Find the final answer in a response, in linear time: `\boxed{}`, `<answer>`, `####`, "Answer:", `$…$`, a number.

Each function returns the stripped answer, or None if there is none.
"""

import re
from collections import deque
from collections.abc import Mapping

from r1_rewards.reading.hedges import in_context
from r1_rewards.reading.plain_text import plain_characters
from r1_rewards.reading.truths import read_truths
from r1_rewards.reading.units import UNITS

TAIL = 200_000  # characters; a final answer stands at the end, so only the end of a huge response is searched

# The first holds what most verifiers look for.
ANSWER_FORMS: Mapping[str, str] = {
    "<think> <answer> \\boxed{}": "<think>Let me see.</think><answer>\\boxed{{{}}}</answer>",
    "<think> <answer>": "<think>Let me see.</think><answer>{}</answer>",
    "<think> \\boxed{}": "<think>Let me see.</think>\n\\boxed{{{}}}",
    "<think>": "<think>Let me see.</think>\n{}",
    "\\boxed{}": "So it is \\boxed{{{}}}.",
    "nothing around it": "{}",
    "Answer:": "Let me see.\nAnswer: {}",
    "####": "Let me see.\n#### {}",
    "```python": "```python\n{}\n```",
}

# A backslash pair that is not the start of \boxed is a line break of LaTeX, so that in `\\{` the brace still counts.
_BRACES = re.compile(r"\\boxed\s?\{|\\\\(?!boxed)|\\[{}]|[{}]")
_OPENED_BOX = re.compile(r"\\boxed\s?\{")
_BOX_OF_ONE = re.compile(r"\\boxed\s?(?<=[\sd])([0-9A-Za-z])(?![0-9A-Za-z.,])")  # TeX needs no braces
_THOUGHT = re.compile(r"<(/?)think>", re.IGNORECASE)
_ANY_BRACE = re.compile(r"[{}]")
_HASHED = re.compile(r"####[ \t]{0,8}([^\n]+)")
_STATED = re.compile(
    r"(?:\b(?:answers?|correct (?:option|choice))[ \t*]{0,8}(?::|(?:is|are)\b[ \t*]{0,8}:?)|^[ \t]{0,8}A:)",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(r"(?:[.;?]|(?<![0-9a-z)}])!)(?=\s|$)")  # 5! is a factorial
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-−])?\$?(?:(?<![\w.])\.[0-9]+|"
    # Digits inside a word are no number: AZYUK2A, x_1. Currencies may stand directly before one.
    r"(?:(?<!\w)|(?<=Rs)|(?<=USD)|(?<=EUR))[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?(?:/[0-9]+)?)%?",
    re.ASCII,
)
_LATEX_WORD = re.compile(r"[^\s$\\]{0,40}\\(?:[dt]?frac|sqrt|pi|infty)(?![A-Za-z])[^$]{0,200}$")
_ANCHOR = re.compile(r"answer(?:[>:*\s]|is\b){0,9}$", re.IGNORECASE)
_MATH = re.compile(r"(?<!\\)(\$\$?)((?:[^$\\]|\\.)+)\1", re.DOTALL)
# Letters of scripts other than Latin and Greek are words, however few.
_BARE_WORD = re.compile(r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|[^\W\d_A-Za-zͰ-Ͽ]+)")
_CONNECTED = re.compile(  # what may stand between the parts of one answer: "\boxed{1} and \boxed{2}"
    r"(?:[\s,;$&+]|\\[()\[\]]|\\q?quad\b|\\(?:text|mbox)\s?\{\s*(?:and|or)\s*\}|\band\b|\bor\b|"
    r"[A-Za-z]_?\{?[0-9]?\}?\s?=)*"
)
_COMMAND_WITH_TEXT = re.compile(r"\\[a-z]{1,20}\{[^{}]{0,200}\}")
_MAX_CONNECTION = 60  # characters
_MAX_BARE = 200
_MAX_WORDS = 2  # of three letters or more; with more, a stated answer is a sentence
_WORDS_OF_ANSWERS = {"and", "thousand", "million", "billion", "trillion", "sqrt", "sin", "cos", "tan", "log", "exp"}
_WORDS_OF_ANSWERS |= {unit.lower() for unit in UNITS if unit.isalpha()}


def final_answer(response: str) -> str | None:
    r"""Return the response's final answer, or None.

    After the thought it tries the last `\boxed{…}`, or several that form a list; the last `<answer>…</answer>`, `####
    x`, "Answer: x" or "answer is x"; a response that is only an answer; the last `$…$` or number. A response truncated
    within its first box has none. A tag after the last box takes precedence. Adjacent text counts (see `in_context`).
    """
    text = with_braces(plain_characters(after_thought(response)[-TAIL:]))
    if _OPENED_BOX.search(text):
        behind = tagged(text) if text.rfind("<answer>") > text.rfind("\\boxed") else None
        return behind or boxed_list(text) or _box_in_context(text)
    for find in (tagged, hashed, _said, bare, last_formula):
        extracted = find(text)
        if extracted is not None:
            return extracted
    return None


def after_thought(response: str) -> str:
    """Return the text after the last `</think>`, "" for an unclosed thought, all of it without a thought."""
    marks = [(match.start(), match.end(), match[1]) for match in _THOUGHT.finditer(response)]
    ends = [end for _, end, closing in marks if closing]
    rest = ends[-1] if ends else 0
    return "" if any(start >= rest and not closing for start, _, closing in marks) else response[rest:]


def with_braces(text: str) -> str:
    return _BOX_OF_ONE.sub(r"\\boxed{\1}", text)


def _box_in_context(text: str) -> str | None:
    boxes = _boxes(text)
    if not boxes:
        return None
    place, content = boxes[-1]
    start = boxes[-2][0].stop if len(boxes) > 1 else 0
    return in_context(content, text[start : place.start], text[place.stop :])


def boxed(response: str) -> str | None:
    r"""Return the last `\boxed{…}` whose braces balance. Escaped braces (`\{`) do not count; nested boxes are one."""
    boxes = _boxes(response[-TAIL:])
    return boxes[-1][1] if boxes else None


def last_braced(text: str, command: str) -> str | None:
    """Return the braces after the last `command`, escaped braces counted, as graders do."""
    start = text.rfind(command + "{")
    if start < 0:
        return None
    start += len(command) + 1
    depth = 1
    for match in _ANY_BRACE.finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[start : match.start()]
    return None


def boxed_list(response: str) -> str | None:
    r"""Return the last boxes as one list, as in `\boxed{1} and \boxed{2}`; None unless two different ones are joined.

    Blanks, commas, "and", "or", math delimiters and `x =` join boxes.
    """
    text = response[-TAIL:]
    return _joined(text, _boxes(text))


def _boxes(text: str) -> list[tuple[slice, str]]:
    boxes: list[tuple[slice, str]] = []
    opened: list[tuple[int, int]] = []  # start of a command and of its content; (-1, -1) for an ordinary brace
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            begin, start = opened.pop() if opened else (-1, -1)
            if start >= 0:
                while boxes and boxes[-1][0].start > begin:
                    boxes.pop()
                boxes.append((slice(begin, match.end()), text[start : match.start()].strip()))
        elif token == "{":
            opened.append((-1, -1))
        elif token.startswith("\\boxed"):
            opened.append(match.span())
    return boxes


def _joined(text: str, parts: list[tuple[slice, str]]) -> str | None:
    first = len(parts) - 1
    while first > 0:
        between = text[parts[first - 1][0].stop : parts[first][0].start]
        if len(between) > _MAX_CONNECTION or not _CONNECTED.fullmatch(between.rstrip("\\")):
            break
        first -= 1
    contents = list(dict.fromkeys(content for _, content in parts[first:]))
    return ", ".join(contents) if len(contents) > 1 else None


def tagged(response: str) -> str | None:
    text = response[-TAIL:]
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def hashed(response: str) -> str | None:
    last = _last_match(_HASHED, response[-TAIL:])
    return None if last is None else last[1].strip()


def stated(response: str) -> str | None:
    text = response[-TAIL:]
    last = _last_match(_STATED, text)
    if last is None:
        return None
    rest = text[last.end() :].lstrip(" \t\r\n:*")
    line = rest.split("\n", 1)[0]
    end = _SENTENCE_END.search(line)
    extracted = (line[: end.start()] if end else line).strip(" \t\r*")
    return extracted or None


def _said(response: str) -> str | None:
    """Return the stated answer, or the one in a sentence: 34 in "Answer: the largest n is 34"."""
    extracted = stated(response)
    if extracted is None or (" is " not in extracted and len(_BARE_WORD.findall(extracted)) <= _MAX_WORDS):
        return extracted
    said = extracted.rsplit(" is ", 1)[-1]
    numbers = _NUMBER.findall(said)
    return numbers[0] if len(numbers) == 1 and "$" not in said and said != numbers[0] else said


def bare(response: str) -> str | None:
    text = response.strip()
    if not text or len(text) > _MAX_BARE or "\n" in text or text.count("$") not in (0, 2):
        return None
    words = set(_BARE_WORD.findall(_COMMAND_WITH_TEXT.sub("", text)))
    return text if words <= _WORDS_OF_ANSWERS or text.strip(".") in words else None


def last_formula(response: str) -> str | None:
    text = response[-TAIL:]
    last_word = (text.rsplit(None, 1) or [""])[-1].rstrip(".,;")
    if _LATEX_WORD.match(last_word):
        return last_word
    number = _last_match(_NUMBER, text)
    formulas = _formulas(text)
    if formulas and (number is None or formulas[-1][0].stop >= number.end()):
        place, formula = formulas[-1]
        return in_context(formula, text[: place.start], text[place.stop :])
    return None if number is None else in_context(number[0], text[: number.start()], text[number.end() :])


def formulas(text: str) -> str | None:
    text = text[-TAIL:]
    found = _formulas(text)
    return _joined(text, found) or (found[-1][1] if found else None)


def anchored_formula(text: str) -> str | None:
    text = text[-TAIL:]
    found = [
        match for match in _MATH.finditer(text) if _ANCHOR.search(text[max(0, match.start() - 30) : match.start()])
    ]
    return found[-1][2].strip() if found else None


def _formulas(text: str) -> list[tuple[slice, str]]:
    found = [(slice(*match.span()), match[2].strip()) for match in _MATH.finditer(text)]
    for opening, closing in (("\\(", "\\)"), ("\\[", "\\]")):
        end = text.rfind(closing)
        start = text.rfind(opening, 0, max(end, 0))
        if start >= 0 and (not found or end > found[-1][0].stop):
            found.append((slice(start, end + 2), text[start + 2 : end].strip()))
    return found


def last_number(response: str) -> str | None:
    last = _last_match(_NUMBER, response[-TAIL:])
    return None if last is None else last[0]


def first_number(text: str) -> str | None:
    first = _NUMBER.search(text)
    return None if first is None else first[0]


def write_answer(form: str, ground_truth: str) -> str:
    r"""Return a response that writes the ground truth, the first if it is a JSON list, in one of ANSWER_FORMS.

    Example: `write_answer("####", "18")` is "Let me see.\n#### 18".
    """
    return ANSWER_FORMS[form].format(read_truths(ground_truth, blank=True)[0])


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    matches = deque(pattern.finditer(text), maxlen=1)
    return matches[0] if matches else None
