"""Calls as JSON between tags (Hermes, Qwen2.5, Qwen3, Qwen3-VL).

Example: `<tool_call>{"name": "look", "arguments": {"x": 3}}</tool_call>`
"""

import json
from collections.abc import Iterator, Mapping

from r1_data.turns.calls.json_values import BrokenJson, read_value, to_call
from r1_data.turns.calls.types import ToolFormat, WrittenCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesFormat(ToolFormat):
    name = "hermes"
    stop_strings = (CLOSE,)
    instruction = (
        f"To call one, write its name and arguments as a JSON object between {OPEN} and {CLOSE}:\n"
        f'{OPEN}\n{{"name": "NAME", "arguments": {{"PARAMETER": VALUE}}}}\n{CLOSE}\n'
        "Its result follows between <tool_response> and </tool_response>."
    )

    def find(self, text: str) -> Iterator[WrittenCall]:
        position = 0
        while (start := text.find(OPEN, position)) >= 0:
            body = start + len(OPEN)
            error = ""
            try:
                value, end = read_value(text, body)
            except BrokenJson as broken:
                end, error = body, f"the call is {broken}"
            close = text.find(CLOSE, end)
            if close < 0:
                yield WrittenCall(error=f"the call is not closed by {CLOSE}")
                return
            if not error and text[end:close].strip():
                error = f"there is text between the JSON object and {CLOSE}"
            yield WrittenCall(error=error) if error else to_call(value)
            position = close + len(CLOSE)

    def begin(self, text: str) -> int:
        return text.find(OPEN)


def write_call(call: Mapping[str, object]) -> str:
    """Write {"name", "arguments"} as the policy would."""
    return f"{OPEN}\n{json.dumps({key: call[key] for key in ('name', 'arguments')}, ensure_ascii=False)}\n{CLOSE}"


FORMAT = HermesFormat()
