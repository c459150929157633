"""Calls as tags (Qwen3-Coder, Qwen3.5 and later): `<function=NAME>` with a `<parameter=NAME>` for each argument.

Values are text. They are read as the types of the tool's schema, so that `3` is a number where the schema has one.
"""

import re
from collections.abc import Iterator

from r1_data.turns.calls.types import ToolFormat, WrittenCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL, _CALL_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^\s<>=]{1,256}>")
_SPACE = re.compile(r"\s*")


class Malformed(ValueError):
    """Tags that do not form a call; the message is for the policy."""


class Qwen3CoderFormat(ToolFormat):
    name = "qwen3_coder"
    stop_strings = (CLOSE,)
    instruction = (
        "To call one, write its name and each argument in tags, the value on lines of its own:\n"
        f"{OPEN}\n{_CALL}NAME>\n{_PARAMETER}PARAMETER>\nVALUE\n{_PARAMETER_END}\n{_CALL_END}\n{CLOSE}\n"
        "Its result follows between <tool_response> and </tool_response>."
    )

    def find(self, text: str) -> Iterator[WrittenCall]:
        position = 0
        while (start := _next(text, position)) is not None:
            opened = text.startswith(OPEN, start)
            place = _skip(text, start + len(OPEN)) if opened else start
            try:
                call, position = _read_call(text, place)
                if opened:
                    position = _skip(text, position)
                    if not text.startswith(CLOSE, position):
                        raise Malformed(f"{call.name}: the call is not closed by {CLOSE}")
                yield call
            except Malformed as error:
                yield WrittenCall(error=str(error))
                position = text.find(CLOSE, start)
                if position < 0:
                    return
                position += len(CLOSE)

    def begin(self, text: str) -> int:
        return _next(text, 0) or 0


def _next(text: str, position: int) -> int | None:
    found = [start for tag in (OPEN, _CALL) if (start := text.find(tag, position)) >= 0]
    return min(found, default=None)


def _skip(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    assert space is not None
    return space.end()


def _read_name(text: str, position: int, tag: str) -> tuple[str, int]:
    found = _NAME.match(text, position + len(tag))
    if found is None:
        raise Malformed(f"a tag must read {tag}NAME>, with a name without spaces")
    return found[0][:-1], found.end()


def _read_call(text: str, position: int) -> tuple[WrittenCall, int]:
    if not text.startswith(_CALL, position):
        raise Malformed(f"a call must begin with {_CALL}NAME>")
    name, position = _read_name(text, position, _CALL)
    arguments: dict[str, str] = {}
    while True:
        position = _skip(text, position)
        if text.startswith(_CALL_END, position):
            return WrittenCall(name, arguments, as_text=True), position + len(_CALL_END)
        if not text.startswith(_PARAMETER, position):
            raise Malformed(f"{name}: the call is not closed by {_CALL_END}, or has text outside of {_PARAMETER}…>")
        parameter, position = _read_name(text, position, _PARAMETER)
        if parameter in arguments:
            raise Malformed(f"{name}: parameter {parameter} is given twice")
        end = _value_end(text, position)
        if end is None:
            raise Malformed(f"{name}: parameter {parameter} is not closed by {_PARAMETER_END}")
        arguments[parameter] = text[position:end].removeprefix("\n").removesuffix("\n")
        position = end + len(_PARAMETER_END)


def _value_end(text: str, position: int) -> int | None:
    """Return where a value ends: at a closing tag that another parameter or the end of the call follows."""
    while (end := text.find(_PARAMETER_END, position)) >= 0:
        position = end + len(_PARAMETER_END)
        behind = _skip(text, position)
        if text.startswith((_PARAMETER, _CALL_END), behind):
            return end
    return None


FORMAT = Qwen3CoderFormat()
