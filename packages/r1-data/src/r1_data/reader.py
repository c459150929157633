"""How the rows of one source are read: which columns, which format prompt, where its pictures are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from r1_data.formats import Columns, detect_columns
from r1_data.messages import compile_format_prompt, to_example
from r1_data.references import Downloads
from r1_data.types import Example

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True, slots=True)
class RowReader:
    """Turns the rows of one source into examples: `reader("train.jsonl:1", {"problem": …, "answer": …})`.

    It holds nothing but settings, so it can be sent to another process.
    """

    columns: Columns = field(default_factory=Columns)
    explicit_columns: bool = False  # the user named `columns`, so known formats are not tried (see `detect_columns`)
    format_prompt: str | None = None  # Jinja text, see `compile_format_prompt`
    format_prompt_name: str = "format prompt"  # how errors call it
    system_prompt: str | None = None  # for rows without a system message of their own
    image_dir: str | None = None  # where relative paths begin, and out of which no path leads
    downloads: Downloads | None = None  # how http and https are fetched; None: they are not
    source: str = ""  # the name that the rows are reported under, as `Prompt.source` and `data_source`

    def __post_init__(self) -> None:
        """Raises DataError for a format prompt that does not parse."""
        self._template()

    def __call__(self, row_id: str, row: Mapping[str, Any]) -> Example:
        """Turn a row into an example. Raises DataError that opens with `row_id`."""
        return to_example(
            row_id,
            row,
            detect_columns(row, self.columns, self.explicit_columns),
            format_prompt=self._template(),
            system_prompt=self.system_prompt,
            image_dir=self.image_dir,
            downloads=self.downloads,
            source=self.source,
        )

    def _template(self) -> "Template | None":
        return None if self.format_prompt is None else _compiled(self.format_prompt, self.format_prompt_name)


_compiled = lru_cache(maxsize=64)(compile_format_prompt)
