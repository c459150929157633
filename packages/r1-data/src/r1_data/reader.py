"""How to read the rows of a source: columns, format prompt, picture folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from r1_data.formats import Columns, detect_columns
from r1_data.messages import compile_format_prompt, to_example
from r1_data.references import Downloads
from r1_data.types import Example

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True, slots=True)
class RowReader:
    """Converts rows of a source to examples. It pickles. Raises DataError if the format prompt does not parse.

    Example: `reader("train.jsonl:1", {"problem": …, "answer": …})`
    """

    columns: Columns = field(default_factory=Columns)
    explicit_columns: bool = False  # the user named `columns`: known formats are not tried (see `detect`)
    format_prompt: str | None = None  # Jinja text, see `compile_format_prompt`
    format_prompt_name: str = "format prompt"  # its name in error messages
    system_prompt: str | None = None  # for rows without a system message
    image_dir: str | None = None  # relative paths start here, and no path leaves it
    downloads: Downloads | None = None  # None: http and https URLs are refused
    source: str = ""  # the rows' name in reports: `Prompt.source` and `data_source`

    def __post_init__(self) -> None:
        self._template()

    def __call__(self, row_id: str, row: Mapping[str, object]) -> Example:
        """Convert a row to an example. Raises DataError that begins with `row_id`."""
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
