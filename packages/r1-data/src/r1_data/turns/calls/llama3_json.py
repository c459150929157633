"""Calls as bare JSON that begins the turn (Llama 3.1, 3.2, 3.3): `{"name": …, "parameters": …}`, several apart by `;`.

A JSON object without a name is an answer, not a call.
"""

import re
from collections.abc import Iterator

from r1_data.turns.calls.json_values import BrokenJson, read_value, to_call
from r1_data.turns.calls.types import ToolFormat, WrittenCall

_PREFIX = re.compile(r"\s*(?:<\|python_tag\|>\s*)?")
_SEPARATOR = re.compile(r"[\s;]*")
_BEGUN = re.compile(r'\{\s*"(?:type|name|parameters|arguments)"\s*:')


class Llama3JsonFormat(ToolFormat):
    name = "llama3_json"
    instruction = (
        "To call one, answer with nothing but a JSON object of its name and arguments:\n"
        '{"name": "NAME", "parameters": {"PARAMETER": VALUE}}'
    )

    def find(self, text: str) -> Iterator[WrittenCall]:
        prefix = _PREFIX.match(text)
        assert prefix is not None
        position = prefix.end()
        while text.startswith("{", position):
            try:
                value, end = read_value(text, position)
            except BrokenJson as error:
                if _BEGUN.match(text, position):
                    yield WrittenCall(error=f"the call is {error}")
                return
            if not (isinstance(value, dict) and "name" in value and {"parameters", "arguments"} & value.keys()):
                return
            yield to_call(value)
            separator = _SEPARATOR.match(text, end)
            assert separator is not None
            position = separator.end()


FORMAT = Llama3JsonFormat()
