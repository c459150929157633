"""Read the tool calls of a turn and check each against the schema of its tool."""

from collections.abc import Iterable, Mapping
from itertools import islice

from r1_data.turns.calls.arguments import WrongArgument, brief, check_arguments
from r1_data.turns.calls.types import ParsedCall, ToolFormat, WrittenCall
from r1_data.types import JsonObject

_THINK, _THINK_END = "<think>", "</think>"
_MOST = 128  # calls of a turn that are read


def parse_calls(
    tool_format: ToolFormat, text: str, tools: Mapping[str, JsonObject], *, thinking: bool = False
) -> list[ParsedCall]:
    """Return the calls of a turn in order; those that cannot be executed have an error.

    Calls inside `<think>` are errors, unless a call follows the thoughts: then the thoughts only mention them.

    Args:
        tools: the JSON schema of each tool's parameters, by the tool's name.
        thinking: the turn begins inside `<think>`, because the generation prompt ends with it.
    """
    start = answer_start(text, thinking=thinking)
    calls: Iterable[WrittenCall] = islice(tool_format.find(text[start:]), _MOST)
    checked = _check_all(calls, tools)
    if checked or not start:
        return checked
    thoughts = text[:start] if thinking else text[text.index(_THINK) + len(_THINK) : start]
    message = f"the call stands inside {_THINK} and was not executed; write it behind {_THINK_END}"
    inside = _check_all(islice(tool_format.find(thoughts.removesuffix(_THINK_END)), _MOST), tools)
    return [ParsedCall(call.name, call.arguments, call.id, message) for call in inside]


def split_calls(
    tool_format: ToolFormat, text: str, tools: Mapping[str, JsonObject], *, thinking: bool = False
) -> tuple[str, list[ParsedCall]]:
    """Return a turn's text before its calls, and the calls, as a server returns them to an agent.

    The agent checks names and arguments. Calls inside `<think>` and broken ones that name no tool stay text.

    Args:
        tools, thinking: as `parse_calls` has them.
    """
    start = answer_start(text, thinking=thinking)
    found = [call for call in islice(tool_format.find(text[start:]), _MOST) if call.name]
    if not found:
        return text, []
    calls = [
        ParsedCall(call.name, _read_arguments(tools.get(call.name, {}), call), call.id or f"call{index:05d}")
        for index, call in enumerate(found)
    ]
    return text[: start + tool_format.begin(text[start:])].rstrip(), calls


def _read_arguments(schema: JsonObject, call: WrittenCall) -> dict[str, object]:
    """Return the arguments as the schema's types where they fit it, otherwise as they are written."""
    try:
        return check_arguments(schema, call.arguments, as_text=call.as_text)
    except Exception:  # the schema is an agent's own, and may be of any form
        return dict(call.arguments)


def answer_start(text: str, *, thinking: bool) -> int:
    """Return the index behind a turn's thoughts: 0 if it has none, the length of the text if they are not closed."""
    if not thinking and not text.lstrip().startswith(_THINK):
        return 0
    end = text.find(_THINK_END)
    return len(text) if end < 0 else end + len(_THINK_END)


def _check_all(calls: Iterable[WrittenCall], tools: Mapping[str, JsonObject]) -> list[ParsedCall]:
    parsed: list[ParsedCall] = []
    used: set[str] = set()
    for index, call in enumerate(calls):
        id_, error, arguments = call.id or f"call{index:05d}", call.error, dict(call.arguments)
        if not error and call.name not in tools:
            names = ", ".join(tools) or "there are none"
            error = f"unknown tool {brief(call.name)}; the tools are: {names}"
        if not error and id_ in used:
            error = f"{call.name}: the id {brief(id_)} belongs to another call of this turn"
        if not error:
            try:
                arguments = check_arguments(tools[call.name], arguments, as_text=call.as_text)
            except (WrongArgument, RecursionError) as wrong:
                error = f"{call.name}: {wrong}"
        used.add(id_)
        parsed.append(ParsedCall(call.name, arguments, id_, error))
    return parsed
