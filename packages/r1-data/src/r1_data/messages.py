"""Convert rows to examples: apply the format prompt, replace `<image>` and `<video>` by content items."""

import json
import math
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING

from r1_data.formats import Columns, detect_columns
from r1_data.references import Downloads, resolve_picture, resolve_video
from r1_data.types import Blank, DataError, EmptyCell, Example, MarkerMismatch, MediaReference, Message, MissingColumn

if TYPE_CHECKING:
    from jinja2 import Template

IMAGE_MARKER = "<image>"
VIDEO_MARKER = "<video>"

Cells = dict[str, list[object]]  # marker -> the cells that stand for it, in order
Media = dict[str, deque[object]]  # the same, of a whole row
_PLACED = "placed"  # another key: the markers of parts that place an item of a column
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # no control token: chat templates copy roles
_NAMES = {IMAGE_MARKER: "pictures", VIDEO_MARKER: "videos"}
_PARTS = {  # type of a content part -> marker
    "image": IMAGE_MARKER, "image_url": IMAGE_MARKER, "video": VIDEO_MARKER, "video_url": VIDEO_MARKER,
}  # fmt: skip


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
        return None if self.format_prompt is None else _compiled(self.format_prompt, self.format_prompt_name)


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


_compiled = lru_cache(maxsize=64)(compile_format_prompt)


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
    try:
        answer = _answer_text(_require(row, columns.ground_truth, "answer"), columns.ground_truth)
        embedded: Cells = {IMAGE_MARKER: [], VIDEO_MARKER: [], _PLACED: []}
        messages = _read_messages(_require(row, columns.prompt, "prompt"), embedded)
        if format_prompt is not None:
            _apply_format(messages, format_prompt, row)
        if system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system_prompt})
        media = _find_media(row, columns, embedded)
        references: list[MediaReference] = []
        if pattern := _markers(row, columns, media, embedded[_PLACED]):
            _match_markers(messages, media, pattern, columns)
            for message in messages:
                references += _place_media(message, media, pattern, image_dir, downloads)
        _require_text(messages)
    except DataError as error:
        raise type(error)(f"{row_id}: {error}") from error
    except Exception as error:  # rows may hold anything; any error is the row's
        raise DataError(f"{row_id}: the row cannot be read ({type(error).__name__}: {error})") from error
    read = {columns.prompt, columns.ground_truth, columns.images, columns.videos}
    metadata = {name: value for name, value in row.items() if name not in read}
    if source:
        own = metadata.get("data_source") or metadata.get("datasource")  # LMM-R1's spelling
        metadata["data_source"] = str(own or source)
    return Example(row_id, messages, tuple(references), answer, metadata, source)


def _require(row: Mapping[str, object], column: str, role: str) -> object:
    value: object = row
    for name in [column] if column in row else column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise MissingColumn(f"no {role} column {column!r}; columns found: {', '.join(map(str, row))}")
        value = value[name]
    if value is None:
        raise EmptyCell(f"the {role} column {column!r} is empty")
    return value


def _answer_text(value: object, column: str) -> str:
    what = f"the answer column {column!r}"
    value = value if isinstance(value, str) else _unwrapped(value)
    if value is None:
        raise EmptyCell(f"{what} is empty")
    if isinstance(value, list | tuple | dict):
        text = _as_json(value, what)
    elif (isinstance(value, float | Decimal) and not math.isfinite(value)) or value != value:  # NaT, too
        raise EmptyCell(f"{what} holds {value}, which is not a number")
    else:
        text = _decoded(value, what)
    _encode(text, what)
    return text


def _as_json(value: object, what: str) -> str:
    if not value:
        raise EmptyCell(f"{what} is empty: {value}")
    try:
        return json.dumps(
            value, ensure_ascii=False, allow_nan=False, default=lambda part: _decoded(_unwrapped(part), what)
        )
    except DataError:
        raise
    except ValueError as error:
        raise EmptyCell(f"{what} holds {_brief(value)}, in which something is not a number ({error})") from error


def _unwrapped(value: object) -> object:
    return value.tolist() if hasattr(value, "tolist") else value


def _decoded(value: object, what: str) -> str:
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{what} holds bytes that are not UTF-8 text ({error})") from error


def _encode(text: str, what: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{what} holds half of a surrogate pair, which is no text, at {error.start}") from error


def _require_text(messages: list[Message]) -> None:
    shows = False
    for message in messages:
        items = message["content"] if isinstance(message["content"], list) else [{"text": message["content"]}]
        for item in items:
            _encode(item.get("text", ""), "the prompt")
            shows = shows or "text" not in item or is_visible(item["text"])
    if not shows:
        raise Blank("the prompt is empty: it holds nothing that can be seen")


def is_visible(text: str) -> bool:
    return any(letter.isprintable() and not letter.isspace() for letter in text)


def _read_messages(prompt: object, embedded: Cells) -> list[Message]:
    prompt = _decoded(prompt, "the prompt") if isinstance(prompt, bytes) else prompt
    prompt = _parse_messages(prompt) if isinstance(prompt, str) else prompt
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and not prompt:
        raise Blank("the prompt is an empty list: no messages")
    if not isinstance(prompt, list):
        raise DataError(f"a prompt must be text or a list of messages, found {_brief(prompt)}")
    messages: list[Message] = []
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"a message must have 'role' and 'content', found {_brief(message)}")
        if not _ROLE.fullmatch(message["role"]):
            raise DataError(
                f"message {len(messages) + 1} has the role {_brief(message['role'])}; a role is a word such as system, "
                "user, assistant or tool: letters, digits, '_', '-' and '.', at most 64"
            )
        others = {name: value for name, value in message.items() if value is not None}
        messages.append({**others, "content": _flatten_content(message.get("content"), embedded)})
    if messages[-1]["role"] == "assistant":
        raise DataError("the last message is the assistant's own; a prompt must end where the model is to answer")
    return messages


def _parse_messages(text: str) -> object:
    opening = text[:40].replace(" ", "").replace("\n", "")
    if not opening.startswith(('[{"role":', '[{"content":', "[{'role':", "[{'content':")):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the prompt looks like a list of messages but is no JSON ({error})") from error


def _flatten_content(content: object, embedded: Cells) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"the content of a message must be text or a list of parts, found {_brief(content)}")
    text = ""
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            text += part["text"]
        elif isinstance(kind, str) and kind in _PARTS:
            item = part.get(kind)
            if isinstance(item, Mapping) and "url" in item:
                item = item["url"]
            if item is None:
                embedded[_PLACED].append(_PARTS[kind])
            else:
                embedded[_PARTS[kind]].append({**part, "video": item} if kind == "video" else item)
            text += _PARTS[kind]
        else:
            raise DataError(f"a content part must be of type text, {', '.join(_PARTS)}, found {_brief(part)}")
    return text


def _apply_format(messages: list[Message], template: "Template", row: Mapping[str, object]) -> None:
    question = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if question is None:
        raise DataError("the format prompt has no user message to apply to")
    try:
        question["content"] = template.render({**row, "content": question["content"]})
    except Exception as error:  # a template may call any method of the row's values
        raise DataError(f"the format prompt cannot be filled ({error}); columns found: {', '.join(row)}") from error


def _find_media(row: Mapping[str, object], columns: Columns, embedded: Cells) -> Media:
    found: Media = {}
    for marker, column in ((IMAGE_MARKER, columns.images), (VIDEO_MARKER, columns.videos)):
        value = row.get(column)
        listed = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
        if listed and embedded[marker]:
            raise DataError(f"{_NAMES[marker]} stand both in the messages and in column {column!r}; keep one of them")
        found[marker] = deque(listed or embedded[marker])
    return found


def _markers(
    row: Mapping[str, object], columns: Columns, media: Media, placed: list[object]
) -> "re.Pattern[str] | None":
    named = {IMAGE_MARKER: columns.images, VIDEO_MARKER: columns.videos}
    markers = [marker for marker, column in named.items() if media[marker] or column in row or marker in placed]
    return re.compile(f"({'|'.join(markers)})") if markers else None


def _match_markers(messages: list[Message], media: Media, pattern: "re.Pattern[str]", columns: Columns) -> None:
    question = next((message for message in messages if message["role"] == "user"), messages[-1])
    for marker, column in ((VIDEO_MARKER, columns.videos), (IMAGE_MARKER, columns.images)):
        found = [found for message in messages for found in pattern.findall(message["content"])]
        markers, items = found.count(marker), len(media[marker])
        if markers == 0 and items:
            question["content"] = marker * items + question["content"]
        elif markers != items:
            raise MarkerMismatch(f"{markers} {marker} markers but {items} {_NAMES[marker]} in column {column!r}")


def _place_media(
    message: Message, media: Media, pattern: "re.Pattern[str]", image_dir: str | None, downloads: Downloads | None
) -> list[MediaReference]:
    """Replace the markers in a message by content items, and take their cells out of `media`."""
    pieces = pattern.split(message["content"])
    if len(pieces) == 1:
        return []
    items: list[dict[str, str]] = []
    references: list[MediaReference] = []
    for piece in filter(None, pieces):
        if pattern.fullmatch(piece):
            resolve = resolve_picture if piece == IMAGE_MARKER else resolve_video
            references.append(resolve(media[piece].popleft(), image_dir, downloads))
            items.append({"type": piece[1:-1]})
        else:
            items.append({"type": "text", "text": piece})
    message["content"] = items
    return references


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
