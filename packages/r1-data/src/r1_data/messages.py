"""Convert rows to examples: apply the format prompt, replace `<image>` and `<video>` by content items."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from r1_data.cells import brief, decoded, is_visible, naming_row, read_text, require_cell, require_unicode
from r1_data.formats import Columns, detect_columns
from r1_data.markers import Cells, flatten_content, no_cells, place_all
from r1_data.references import Downloads
from r1_data.types import Blank, DataError, Example, Message, Row

if TYPE_CHECKING:
    from jinja2 import Template

_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # no control token: chat templates copy roles


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
    prepare: Callable[[Example], Example] | None = None  # changes every example, e.g. `r1_data.turns.ToolPrompt`

    def __post_init__(self) -> None:
        self._template()

    def __call__(self, row_id: str, row: Mapping[str, object]) -> Example:
        """Convert a row to an example. Raises DataError that begins with `row_id`."""
        example = to_example(
            row_id,
            row,
            detect_columns(row, self.columns, self.explicit_columns),
            format_prompt=self._template(),
            system_prompt=self.system_prompt,
            image_dir=self.image_dir,
            downloads=self.downloads,
            source=self.source,
        )
        return example if self.prepare is None else self.prepare(example)

    def _template(self) -> "Template | None":
        return None if self.format_prompt is None else compile_once(self.format_prompt, self.format_prompt_name)


FORMATTED = "prompt_is_formatted"  # column: true if the prompt has a format prompt already; `r1 rows` writes it


def compile_format_prompt(text: str, name: str = "format prompt") -> "Template":
    """Compile a Jinja format prompt in a sandbox; it gets `content` (the prompt) and every column of the row.

    Raises DataError with `name` and the line if the template does not parse.
    """
    from jinja2 import StrictUndefined, TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        return ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(text.strip())
    except TemplateSyntaxError as error:
        raise DataError(f"{name}, line {error.lineno}: {error.message}") from error


compile_once = lru_cache(maxsize=64)(compile_format_prompt)


def to_example(
    row_id: str,
    row: Mapping[str, object],
    columns: Columns,
    *,
    format_prompt: "Template | None" = None,
    system_prompt: str | None = None,
    image_dir: str | None = None,
    downloads: Downloads | None = None,
    source: str = "",
) -> Example:
    """Convert a row to messages, references to media, and an answer.

    The prompt is text or a list of OpenAI messages, as a list or as JSON text; the format prompt applies to the last
    user message. Media go where the `<image>` and `<video>` markers or parts are, or first if there are none; in a row
    without a column of its kind, a marker is text. The row's own system message replaces `system_prompt`. A list or
    mapping as answer becomes JSON text; bytes are decoded as UTF-8. `source` becomes the row's `data_source` unless it
    has one.

    Raises DataError that begins with `row_id`: a missing or empty column, another number of markers than media, and
    anything that a template or a cell of an unexpected type raises.
    """
    with naming_row(row_id):
        answer = read_text(require_cell(row, columns.ground_truth, "answer"), columns.ground_truth)
        embedded = no_cells()
        messages = read_messages(require_cell(row, columns.prompt, "prompt"), embedded)
        if format_prompt is not None:
            apply_format(messages, format_prompt, row)
        if system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system_prompt})
        media = place_all(messages, row, columns, embedded, image_dir, downloads)
        require_text(messages)
    read = {columns.prompt, columns.ground_truth, columns.images, columns.videos}
    metadata = other_columns(row, read, source)
    return Example(row_id, messages, media, answer, metadata, source)


def other_columns(row: Mapping[str, object], read: set[str], source: str) -> Row:
    """Return the columns of a row that are not `read`, and its `data_source`, which is `source` unless it names one."""
    metadata = {name: value for name, value in row.items() if name not in read}
    if source:
        own = metadata.get("data_source") or metadata.get("datasource")  # LMM-R1's spelling
        metadata["data_source"] = str(own or source)
    return metadata


def require_text(messages: list[Message]) -> None:
    shows = False
    for message in messages:
        items = message["content"] if isinstance(message["content"], list) else [{"text": message["content"]}]
        for item in items:
            require_unicode(item.get("text", ""), "the prompt")
            shows = shows or "text" not in item or is_visible(item["text"])
    if not shows:
        raise Blank("the prompt is empty: it holds nothing that can be seen")


def read_messages(prompt: object, embedded: Cells) -> list[Message]:
    prompt = decoded(prompt, "the prompt") if isinstance(prompt, bytes) else prompt
    prompt = parse_messages(prompt) if isinstance(prompt, str) else prompt
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and not prompt:
        raise Blank("the prompt is an empty list: no messages")
    if not isinstance(prompt, list):
        raise DataError(f"a prompt must be text or a list of messages, found {brief(prompt)}")
    messages = read_list(prompt, embedded)
    if messages[-1]["role"] == "assistant":
        raise DataError("the last message is the assistant's own; a prompt must end where the model is to answer")
    return messages


def read_list(listed: Sequence[object], embedded: Cells) -> list[Message]:
    """Read messages in OpenAI's form. Pictures and videos in parts become markers, and go to `embedded`."""
    messages: list[Message] = []
    for message in listed:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"a message must have 'role' and 'content', found {brief(message)}")
        if not _ROLE.fullmatch(message["role"]):
            raise DataError(
                f"message {len(messages) + 1} has the role {brief(message['role'])}; a role is a word such as system, "
                "user, assistant or tool: letters, digits, '_', '-' and '.', at most 64"
            )
        others = {name: value for name, value in message.items() if value is not None}
        messages.append({**others, "content": flatten_content(message.get("content"), embedded)})
    return messages


def parse_messages(text: str) -> object:
    opening = text[:40].replace(" ", "").replace("\n", "")
    if not opening.startswith(('[{"role":', '[{"content":', "[{'role':", "[{'content':")):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the prompt looks like a list of messages but is no JSON ({error})") from error


def apply_format(messages: list[Message], template: "Template", row: Mapping[str, object]) -> None:
    """Render the last user message with the template, unless the row says that it is rendered."""
    if row.get(FORMATTED) is True:
        return
    question = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if question is None:
        raise DataError("the format prompt has no user message to apply to")
    try:
        question["content"] = template.render({**row, "content": question["content"]})
    except Exception as error:  # a template may call any method of the row's values
        raise DataError(f"the format prompt cannot be filled ({error}); columns found: {', '.join(row)}") from error
