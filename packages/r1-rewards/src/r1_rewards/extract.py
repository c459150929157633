r"""Find the final answer in a response, in linear time: `\boxed{}`, `<answer>`, `####`, "Answer:", the last number.

Each function returns the answer without surrounding blanks, or None where the response has no such thing.
"""

import re
from collections import deque

TAIL = 200_000  # characters; a final answer stands at the end, so only the end of a huge response is searched

# A backslash pair that is not the start of \boxed is a line break of LaTeX, so that in `\\{` the brace still counts.
_BRACES = re.compile(r"\\boxed\s?\{|\\\\(?!boxed)|\\[{}]|[{}]")
_HASHED = re.compile(r"####[ \t]{0,8}([^\n]+)")
_STATED = re.compile(r"(?:\banswer[ \t*]{0,8}(?::|is\b[ \t*]{0,8}:?)|^[ \t]{0,8}A:)", re.IGNORECASE | re.MULTILINE)
_SENTENCE_END = re.compile(r"[.;!?](?=\s|$)")
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-−])?\$?(?:(?<![\w.])\.[0-9]+|[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?(?:/[0-9]+)?)%?", re.ASCII
)


def final_answer(response: str) -> str | None:
    r"""Return the answer that a response ends with, or None.

    Tried in this order: the last `\boxed{…}`, the last `<answer>…</answer>`, the last `#### x`, the last "Answer: x"
    or "answer is x", the last number.
    """
    for find in (boxed, tagged, hashed, stated, last_number):
        answer = find(response)
        if answer is not None:
            return answer
    return None


def boxed(response: str) -> str | None:
    r"""Return what stands in the last `\boxed{…}` whose braces balance.

    A box inside another box counts as part of the outer one. Escaped braces (`\{`) do not open or close anything.
    """
    text = response[-TAIL:]
    content = None
    opened: list[int] = []  # start of a box's content, or -1 for an ordinary brace
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            start = opened.pop() if opened else -1
            if start >= 0:
                content = (start, match.start())
        elif token == "{":
            opened.append(-1)
        elif token.startswith("\\boxed"):
            opened.append(match.end())
    return None if content is None else text[slice(*content)].strip()


def tagged(response: str) -> str | None:
    """Return what stands in the last `<answer>…</answer>`."""
    text = response[-TAIL:]
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def hashed(response: str) -> str | None:
    """Return the rest of the line after the last `####`, as GSM8K writes its answers."""
    last = _last_match(_HASHED, response[-TAIL:])
    return None if last is None else last[1].strip()


def stated(response: str) -> str | None:
    """Return what follows the last "Answer:", "answer is" or "A:" at a line's start, up to the end of the sentence."""
    text = response[-TAIL:]
    last = _last_match(_STATED, text)
    if last is None:
        return None
    rest = text[last.end() :].lstrip(" \t\r\n:*")
    line = rest.split("\n", 1)[0]
    end = _SENTENCE_END.search(line)
    answer = (line[: end.start()] if end else line).strip(" \t\r*")
    return answer or None


def last_number(response: str) -> str | None:
    """Return the last number as written, with its sign, `$`, commas, decimals, `/` and `%`."""
    last = _last_match(_NUMBER, response[-TAIL:])
    return None if last is None else last[0]


def first_number(text: str) -> str | None:
    """Return the first number as written, like `last_number`."""
    first = _NUMBER.search(text)
    return None if first is None else first[0]


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    matches = deque(pattern.finditer(text), maxlen=1)
    return matches[0] if matches else None
