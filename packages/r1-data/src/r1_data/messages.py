"""A row becomes chat messages: columns found, format prompt applied, `<image>` markers turned into content items."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from r1_data.media import resolve_reference
from r1_data.types import DataError, Example

if TYPE_CHECKING:
    from jinja2 import Template

IMAGE_MARKER = "<image>"
VIDEO_MARKER = "<video>"

_LAYOUTS = (("problem", "answer"), ("question", "answer"), ("prompt", "answer"))  # (prompt column, answer column)


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of the columns that are read; every other column of a row becomes metadata."""

    prompt: str = "prompt"
    answer: str = "answer"
    images: str = "images"
    videos: str = "videos"


def detect_columns(row_keys: Iterable[str], configured: Columns, explicit: bool) -> Columns:
    """Return the columns to read of a row that has `row_keys`.

    With `explicit` (the user named the columns) that is `configured`, found or not. Otherwise a prompt or answer column
    that is absent gives way to the first known layout that is there, and `images` to `image`.
    """
    keys = set(row_keys)
    if explicit:
        return configured
    found = configured
    if not {configured.prompt, configured.answer} <= keys:
        layout = next((layout for layout in _LAYOUTS if keys.issuperset(layout)), None)
        if layout is not None:
            found = replace(found, prompt=layout[0], answer=layout[1])
    if configured.images not in keys and "image" in keys:
        found = replace(found, images="image")
    if configured.videos not in keys and "video" in keys:
        found = replace(found, videos="video")
    return found


def compile_format_prompt(text: str, name: str = "format prompt") -> "Template":
    """Compile a Jinja format prompt, in a sandbox; it sees `content` (the prompt) and every column of the row.

    Raises DataError with `name` and the line for a template that does not parse.
    """
    from jinja2 import StrictUndefined, TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        return ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(text.strip())
    except TemplateSyntaxError as error:
        raise DataError(f"{name}, line {error.lineno}: {error.message}") from error


def to_example(
    row_id: str,
    row: Mapping[str, Any],
    columns: Columns,
    *,
    format_prompt: "Template | None" = None,
    system_prompt: str | None = None,
    image_dir: str | None = None,
) -> Example:
    """Turn a row into messages, picture references and an answer.

    The prompt is text or a list of OpenAI messages; the format prompt is applied to the last user message. Pictures
    stand where `<image>` markers or image parts are; without either they come first. A system message of the row's own
    wins over `system_prompt`. An answer that is a list or a mapping is kept as JSON text.

    Raises DataError that opens with `row_id`: a column missing, markers and pictures not equal in number, a video.
    """
    try:
        answer = _answer_text(_require(row, columns.answer, "answer"))
        embedded: list[Any] = []
        messages = _read_messages(_require(row, columns.prompt, "prompt"), embedded)
        _refuse_videos(row, columns, messages)
        if format_prompt is not None:
            _apply_format(messages, format_prompt, row)
        if system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system_prompt})
        pictures = _pictures(row, columns, embedded)
        _match_markers(messages, len(pictures), columns)
        media = tuple(resolve_reference(picture, image_dir) for picture in pictures)
    except DataError as error:
        raise DataError(f"{row_id}: {error}") from error
    read = {columns.prompt, columns.answer, columns.images, columns.videos}
    metadata = {name: value for name, value in row.items() if name not in read}
    return Example(row_id, [_split_markers(message) for message in messages], media, answer, metadata)


def _require(row: Mapping[str, Any], column: str, role: str) -> Any:
    if column not in row:
        raise DataError(f"no {role} column {column!r}; columns found: {', '.join(map(str, row))}")
    if row[column] is None:
        raise DataError(f"the {role} column {column!r} is empty")
    return row[column]


def _answer_text(value: Any) -> str:
    import json

    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _read_messages(prompt: Any, embedded: list[Any]) -> list[dict[str, Any]]:
    """Messages whose content is text with markers; pictures that stand inside them are added to `embedded`."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"a prompt must be text or a list of messages, found {_brief(prompt)}")
    messages = []
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"a message must have 'role' and 'content', found {_brief(message)}")
        others = {name: value for name, value in message.items() if value is not None}
        messages.append({**others, "content": _flatten_content(message.get("content"), embedded)})
    if messages[-1]["role"] == "assistant":
        raise DataError("the last message is the assistant's own; a prompt must end where the model is to answer")
    return messages


def _flatten_content(content: Any, embedded: list[Any]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"the content of a message must be text or a list of parts, found {_brief(content)}")
    text = ""
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            text += part["text"]
        elif kind in ("image", "image_url"):
            picture = part.get(kind)
            if kind == "image_url" and isinstance(picture, Mapping):
                picture = picture.get("url")
            if picture is not None:
                embedded.append(picture)
            text += IMAGE_MARKER
        elif kind in ("video", "video_url"):
            text += VIDEO_MARKER
        else:
            raise DataError(f"a content part must be of type text, image or image_url, found {_brief(part)}")
    return text


def _refuse_videos(row: Mapping[str, Any], columns: Columns, messages: list[dict[str, Any]]) -> None:
    if row.get(columns.videos) or any(VIDEO_MARKER in message["content"] for message in messages):
        raise DataError(f"video rows (column {columns.videos!r} or {VIDEO_MARKER}) are not available in this version")


def _apply_format(messages: list[dict[str, Any]], template: "Template", row: Mapping[str, Any]) -> None:
    from jinja2 import TemplateError

    asked = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if asked is None:
        raise DataError("the format prompt has no user message to apply to")
    try:
        asked["content"] = template.render({**row, "content": asked["content"]})
    except (TemplateError, TypeError, ArithmeticError) as error:
        raise DataError(f"the format prompt cannot be filled ({error}); columns found: {', '.join(row)}") from error


def _pictures(row: Mapping[str, Any], columns: Columns, embedded: list[Any]) -> list[Any]:
    value = row.get(columns.images)
    listed = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    if listed and embedded:
        raise DataError(f"pictures stand both in the messages and in column {columns.images!r}; keep one of them")
    return listed or embedded


def _match_markers(messages: list[dict[str, Any]], pictures: int, columns: Columns) -> None:
    """Check one marker a picture; where there are pictures and no marker at all, put them first."""
    markers = sum(message["content"].count(IMAGE_MARKER) for message in messages)
    if markers == 0 and pictures:
        asked = next((message for message in messages if message["role"] == "user"), messages[-1])
        asked["content"] = IMAGE_MARKER * pictures + asked["content"]
    elif markers != pictures:
        raise DataError(f"{markers} {IMAGE_MARKER} markers but {pictures} pictures in column {columns.images!r}")


def _split_markers(message: dict[str, Any]) -> dict[str, Any]:
    """Content with markers as a list of image and text items; content without any stays text."""
    if IMAGE_MARKER not in message["content"]:
        return message
    items: list[dict[str, str]] = []
    for position, text in enumerate(message["content"].split(IMAGE_MARKER)):
        if position:
            items.append({"type": "image"})
        if text:
            items.append({"type": "text", "text": text})
    return {**message, "content": items}


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
