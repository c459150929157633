"""Tool calls as a policy writes them, and the base class of the formats that read them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from r1_data.types import JsonObject


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call of a turn, checked against the tool's schema.

    Example: `ParsedCall("look", {"x": 3}, "call00000")`
    """

    name: str  # "" if the call is so broken that it names no tool
    arguments: dict[str, object]
    id: str  # unique in its turn
    error: str = ""  # why the call cannot be executed, for the policy to read; "" if it can


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A tool call as it stands in a turn, before its tool is looked up."""

    name: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict)
    id: str = ""  # "" if the format or the policy gives none
    error: str = ""
    as_text: bool = False  # the arguments are text, to be read as the schema's types


class ToolFormat(ABC):
    """A way to write tool calls."""

    name: ClassVar[str]
    stop_strings: ClassVar[tuple[str, ...]] = ()  # each ends a call; sampling may stop there
    instruction: ClassVar[str]  # tells a policy how to write a call

    @abstractmethod
    def find(self, text: str) -> Iterator[WrittenCall]:
        """Yield the calls in a turn's text, in linear time; broken ones with an error. Text that is no call is skipped.

        Raises nothing, whatever the text.
        """

    def begin(self, text: str) -> int:
        """Return where the first call begins, in a text in which `find` finds one."""
        return 0

    def describe(self, tools: Sequence[JsonObject]) -> str:
        """Return a text for the system message that shows the schemas of `tools` and how to call them."""
        import json

        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (
            "# Tools\n\nYou can call functions. These are their names, purposes and JSON schemas of their parameters:\n"
            f"<tools>\n{schemas}\n</tools>\n\n{self.instruction}"
        )


def signatures(tools: Sequence[JsonObject]) -> dict[str, JsonObject]:
    """Return the JSON schema of each tool's parameters by name, from OpenAI schemas with or without "function"."""
    functions = [tool.get("function", tool) for tool in tools]
    return {str(function["name"]): function.get("parameters") or {} for function in functions}
