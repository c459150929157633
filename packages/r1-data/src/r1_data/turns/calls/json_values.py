"""Read JSON that a policy wrote: errors are short texts, and nothing raises or nests without bound."""

import json
import math
import re
from typing import NoReturn

from r1_data.turns.calls.types import WrittenCall


class BrokenJson(ValueError):
    """Not JSON; the message is for the policy."""


def read_value(text: str, start: int = 0) -> tuple[object, int]:
    """Read the JSON value that begins at `start`, behind white space. Returns it and the index behind it.

    Line breaks in strings are accepted; NaN and Infinity are not. Raises BrokenJson.
    """
    space = _SPACE.match(text, start)
    assert space is not None
    start = space.end()
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise BrokenJson(f"not valid JSON: {error.msg} at character {error.pos - start + 1}") from error
    except RecursionError as error:
        raise BrokenJson("not valid JSON: it is nested too deeply") from error
    except ValueError as error:  # NaN, or a number of thousands of digits
        raise BrokenJson(f"not valid JSON: {error}") from error


def read_text(text: str) -> object:
    """Read a text that is one JSON value. Raises BrokenJson."""
    value, end = read_value(text)
    if text[end:].strip():
        raise BrokenJson("not valid JSON: there is text behind it")
    return value


def to_call(value: object) -> WrittenCall:
    """Return the call that an object of name and arguments stands for."""
    if not isinstance(value, dict):
        return WrittenCall(error="a call must be a JSON object with name and arguments")
    name, id_ = value.get("name"), value.get("id")
    if not isinstance(name, str) or not name:
        return WrittenCall(error='the call has no "name"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # as OpenAI writes them
        try:
            arguments = read_text(arguments)
        except BrokenJson as error:
            return WrittenCall(name, error=f"{name}: the arguments are {error}")
    if not isinstance(arguments, dict):
        return WrittenCall(name, error=f"{name}: the arguments must be a JSON object of parameter names and values")
    return WrittenCall(name, arguments, id_ if isinstance(id_, str) else "")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:20]} is too large for a number")
    return value


_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse, parse_float=_finite)
