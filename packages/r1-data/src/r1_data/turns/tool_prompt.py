"""Show the schemas of tools in a first prompt."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from r1_data.turns.calls import named_format
from r1_data.types import DataError, Example, JsonObject, Message

COLUMN = "tools"  # of a row: the names of the tools that it may use


@dataclass(frozen=True, slots=True)
class ToolPrompt:
    """Changes examples so that their prompts show the schemas of tools. It pickles.

    Where the template does not write schemas, or another format of calls was chosen, they are written into the system
    message, or into the first user message with a template without system messages.
    """

    tools: tuple[JsonObject, ...]  # OpenAI schemas
    tool_format: str  # a format of `r1_data.turns.calls`
    by_template: bool  # the template writes the schemas and explains this format
    reads_system: bool  # the template writes system messages

    def __call__(self, example: Example) -> Example:
        """Raises DataError that names the row: it names a tool that there is not."""
        try:
            tools = self.select(example.metadata)
        except DataError as error:
            raise DataError(f"{example.id}: {error}") from error
        if not tools:
            return example
        if self.by_template:
            return replace(example, tools=tools)
        text, (first, *rest) = named_format(self.tool_format).describe(tools), example.messages
        if self.reads_system and first["role"] == "system":
            return replace(example, messages=[_with_text(first, f"\n\n{text}"), *rest])
        if self.reads_system:
            return replace(example, messages=[{"role": "system", "content": text}, first, *rest])
        index = next((i for i, one in enumerate(example.messages) if one["role"] == "user"), 0)
        shown = list(example.messages)
        shown[index] = _with_text(shown[index], f"{text}\n\n", first=True)
        return replace(example, messages=shown)

    def written_by_template(self, metadata: Mapping[str, object]) -> tuple[JsonObject, ...]:
        """Return a row's tools if the template writes them, else none: the messages have them."""
        return self.select(metadata) if self.by_template else ()

    def select(self, metadata: Mapping[str, object]) -> tuple[JsonObject, ...]:
        """Return the tools that a row's column `tools` names, in their own order; all if it has no list of names.

        Raises DataError for a name that no tool has.
        """
        names = metadata.get(COLUMN)
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            return self.tools
        known = {tool.get("function", tool)["name"]: tool for tool in self.tools}
        if unknown := [name for name in names if name not in known]:
            raise DataError(f"column {COLUMN!r} names the tool {unknown[0]!r}; the tools are {', '.join(known)}")
        return tuple(tool for name, tool in known.items() if name in names)


@dataclass(frozen=True, slots=True)
class SourceToolPrompts:
    """Changes examples by the tools of their source. It pickles."""

    default: ToolPrompt
    by_source: Mapping[str, ToolPrompt]

    def __call__(self, example: Example) -> Example:
        return self.by_source.get(example.source, self.default)(example)


def _with_text(message: Message, text: str, *, first: bool = False) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": text + content if first else content + text}
    part = {"type": "text", "text": text}
    return {**message, "content": [part, *content] if first else [*content, part]}
