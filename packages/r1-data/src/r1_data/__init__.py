"""Prompts and conversations for language and vision-language models from any dataset."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from r1_data.conversations import ConversationReader
from r1_data.dataset import Mixture, PromptDataset, Summary
from r1_data.formats import Columns, Detected, detect, detect_columns
from r1_data.messages import RowReader, compile_format_prompt, to_example
from r1_data.model_inputs import collate
from r1_data.positions import position_ids_of
from r1_data.references import Downloads, Video
from r1_data.render import Renderer
from r1_data.sources import count_rows, read_rows, read_sources
from r1_data.stream import Stream, WeightedStream
from r1_data.tables.spec import answers_per_prompt, name_source
from r1_data.tables.table import Rows
from r1_data.types import Conversation, DataError, Demonstration, Example, MediaError, Prompt, Turns

__all__ = [
    "Columns",
    "Conversation",
    "ConversationReader",
    "DataError",
    "Demonstration",
    "Detected",
    "Downloads",
    "Example",
    "MediaError",
    "Mixture",
    "Prompt",
    "PromptDataset",
    "Renderer",
    "RowReader",
    "Rows",
    "Stream",
    "Summary",
    "Turns",
    "Video",
    "WeightedStream",
    "answers_per_prompt",
    "collate",
    "compile_format_prompt",
    "count_rows",
    "detect",
    "detect_columns",
    "name_source",
    "position_ids_of",
    "read_rows",
    "read_sources",
    "to_example",
]

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        if name == "__version__":
            return version("r1-data")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), "__version__"])
