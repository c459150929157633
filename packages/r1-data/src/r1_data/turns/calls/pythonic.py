"""Calls as a Python list (Llama 3.2, Llama 4, LFM2): `[look(x=3), search(query="cats")]`.

The list is the whole turn, or stands between `<|tool_call_start|>` and `<|tool_call_end|>`. Only literals are read;
nothing is evaluated.
"""

import ast
import math
import re
import warnings
from collections.abc import Iterator

from r1_data.turns.calls.types import ToolFormat, WrittenCall

_TAGGED = re.compile(r"<\|(?:tool_call_start|python_start)\|>(.*?)(?:<\|(?:tool_call_end|python_end)\|>|\Z)", re.DOTALL)
_BEGUN = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\s*\(")
_LONGEST = 2**16  # characters that are parsed
_JSON_NAMES = {"true": True, "false": False, "null": None}


class NotLiteral(ValueError):
    """An argument that is no literal; the message is for the policy."""


class PythonicFormat(ToolFormat):
    name = "pythonic"
    instruction = (
        "To call one or more, answer with nothing but a Python list of calls with literal keyword arguments:\n"
        "[NAME(PARAMETER=VALUE), NAME(PARAMETER=VALUE)]"
    )

    def find(self, text: str) -> Iterator[WrittenCall]:
        if (tagged := _TAGGED.search(text)) is not None:
            text = tagged[1]
        elif _BEGUN.match(text) is None:
            return
        yield from _read(text.strip())

    def begin(self, text: str) -> int:
        tagged = _TAGGED.search(text)
        return 0 if tagged is None else tagged.start()


def _read(text: str) -> Iterator[WrittenCall]:
    if len(text) > _LONGEST:
        yield WrittenCall(error=f"the calls have {len(text):,} characters, more than {_LONGEST:,}")
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes such as "\d"
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = error.msg if isinstance(error, SyntaxError) else "it is nested too deeply"
        yield WrittenCall(error=f"the calls are not a Python list of calls: {why}")
        return
    for node in tree.elts if isinstance(tree, ast.List) else [tree]:
        yield _to_call(node)


def _to_call(node: ast.expr) -> WrittenCall:
    if not isinstance(node, ast.Call):
        return WrittenCall(error="the list must hold calls only: [NAME(PARAMETER=VALUE)]")
    name = ast.unparse(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return WrittenCall(name, error=f"{name}: every argument needs its name: {name}(PARAMETER=VALUE)")
    arguments: dict[str, object] = {}
    for keyword in node.keywords:
        assert keyword.arg is not None
        try:
            arguments[keyword.arg] = _literal(keyword.value)
        except (NotLiteral, RecursionError):
            return WrittenCall(name, error=f"{name}: {keyword.arg} must be a literal such as 3, 'text' or [1, 2]")
    return WrittenCall(name, arguments)


def _literal(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=str() | int() | None as value):  # bool is an int
            return value
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if math.isfinite(value):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    raise NotLiteral


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise NotLiteral


FORMAT = PythonicFormat()
