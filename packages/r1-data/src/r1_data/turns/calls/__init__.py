"""Formats of tool calls: a file each, with a `FORMAT`."""

from r1_data.turns.calls import hermes, llama3_json, pythonic, qwen3_coder
from r1_data.turns.calls.types import ParsedCall, ToolFormat
from r1_data.types import DataError

__all__ = ["FORMATS", "ParsedCall", "ToolFormat", "named_format"]

# In the order in which a call that a template renders is tried: tags first, then what may begin any text.
FORMATS: dict[str, ToolFormat] = {
    module.FORMAT.name: module.FORMAT for module in (qwen3_coder, hermes, pythonic, llama3_json)
}


def named_format(name: str) -> ToolFormat:
    """Raises DataError that lists the formats."""
    if name not in FORMATS:
        raise DataError(f"no format of tool calls is named {name!r}; choose one of {', '.join(sorted(FORMATS))}")
    return FORMATS[name]
