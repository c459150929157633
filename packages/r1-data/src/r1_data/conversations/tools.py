"""Tools and tool calls of a conversation: JSON text or objects, OpenAI's form or LLaMA-Factory's."""

import json
from collections.abc import Mapping
from typing import Any

from r1_data.cells import brief, unwrapped
from r1_data.types import DataError, JsonObject


def read_json(text: str, what: str) -> Any:
    """Parse JSON. Raises DataError that begins with `what`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} is no JSON ({error}): {brief(text)}; write it with json.dumps") from error


def read_tools(value: object, column: str) -> tuple[JsonObject, ...]:
    """Return the OpenAI schemas of the tools in a cell: a list, one tool, or JSON text of these.

    A bare `{"name": …, "parameters": …}` becomes `{"type": "function", "function": …}`.
    """
    value = unwrapped(value)
    if isinstance(value, str):
        value = read_json(value, f"column {column!r}") if value.strip() else None
    if value is None or value != value:
        return ()
    listed = [value] if isinstance(value, Mapping) else value
    if not isinstance(listed, list):
        raise DataError(f"column {column!r} must hold a list of tools, found {brief(value)}")
    return tuple(
        _tool(read_json(tool, f"a tool of column {column!r}") if isinstance(tool, str) else tool, column)
        for tool in listed
    )


def _tool(tool: object, column: str) -> JsonObject:
    if not isinstance(tool, Mapping):
        raise DataError(f"column {column!r} must hold JSON schemas of tools, found {brief(tool)}")
    wrapped = tool if "function" in tool else {"type": "function", "function": tool}
    if not isinstance(wrapped["function"], Mapping) or not wrapped["function"].get("name"):
        raise DataError(f"column {column!r} holds a tool without a name: {brief(tool)}")
    return dict(drop_nulls(wrapped))


def read_calls(value: object, place: int) -> list[JsonObject]:
    """Return calls in OpenAI's form, with their arguments as objects, which chat templates expect.

    Raises DataError that names the message at `place`.
    """
    what = f"the tool call of message {place}"
    value = read_json(value, what) if isinstance(value, str) else unwrapped(value)
    listed = [value] if isinstance(value, Mapping) else value
    if not isinstance(listed, list):
        raise DataError(f"{what} must be an object with name and arguments, or a list of these, found {brief(value)}")
    return [_call(call, what) for call in listed]


def _call(call: object, what: str) -> JsonObject:
    call = read_json(call, what) if isinstance(call, str) else call
    if not isinstance(call, Mapping):
        raise DataError(f"{what} must be an object with name and arguments, found {brief(call)}")
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{what} must be an object with name and arguments, found {brief(call)}")
    arguments = function.get("arguments")
    arguments = read_json(arguments, f"{what}: arguments") if isinstance(arguments, str) else drop_nulls(arguments)
    if not isinstance(arguments, Mapping | None):
        raise DataError(f"{what}: arguments must be an object, found {brief(arguments)}")
    others = {} if function is call else {key: part for key, part in call.items() if part is not None}
    made = {key: part for key, part in function.items() if part is not None}
    return {**others, "type": "function", "function": {**made, "arguments": dict(arguments or {})}}


def drop_nulls(value: Any) -> Any:
    """Drop keys without a value, at any depth: Arrow gives every object of a column the keys of all."""
    if isinstance(value, Mapping):
        return {key: drop_nulls(part) for key, part in value.items() if part is not None}
    return [drop_nulls(part) for part in value] if isinstance(value, list) else value
