"""Prompts for language and vision-language models from any dataset."""

from r1_data.dataset import PromptDataset, Summary
from r1_data.messages import Columns, compile_format_prompt, detect_columns, to_example
from r1_data.render import Renderer
from r1_data.sources import Rows, count_rows, read_rows
from r1_data.stream import Stream
from r1_data.types import DataError, Example, Prompt

__all__ = [
    "Columns",
    "DataError",
    "Example",
    "Prompt",
    "PromptDataset",
    "Renderer",
    "Rows",
    "Stream",
    "Summary",
    "compile_format_prompt",
    "count_rows",
    "detect_columns",
    "read_rows",
    "to_example",
]
