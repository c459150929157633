"""Replace `<image>` and `<video>` in messages by content items, and find the media that they stand for."""

import re
from collections import deque
from collections.abc import Mapping

from r1_data.cells import brief
from r1_data.formats import Columns
from r1_data.references import Downloads, resolve_picture, resolve_video
from r1_data.types import DataError, MarkerMismatch, MediaReference, Message

IMAGE_MARKER = "<image>"
VIDEO_MARKER = "<video>"

Cells = dict[str, list[object]]  # marker -> the cells that stand for it, in order
Media = dict[str, deque[object]]  # the same, of a whole row
PLACED = "placed"  # another key: the markers of parts that place an item of a column
_NAMES = {IMAGE_MARKER: "pictures", VIDEO_MARKER: "videos"}
_PARTS = {  # type of a content part -> marker
    "image": IMAGE_MARKER, "image_url": IMAGE_MARKER, "video": VIDEO_MARKER, "video_url": VIDEO_MARKER,
}  # fmt: skip


def no_cells() -> Cells:
    return {IMAGE_MARKER: [], VIDEO_MARKER: [], PLACED: []}


def place_all(
    messages: list[Message],
    row: Mapping[str, object],
    columns: Columns,
    embedded: Cells,
    image_dir: str | None,
    downloads: Downloads | None,
) -> tuple[MediaReference, ...]:
    """Replace the markers in all messages by content items, and return what they stand for, in order.

    Raises MarkerMismatch if there are more or fewer markers than media, and MediaError.
    """
    media = _find_media(row, columns, embedded)
    references: list[MediaReference] = []
    if pattern := _compile_markers(row, columns, media, embedded[PLACED]):
        _match_markers(messages, media, pattern, columns)
        for message in messages:
            references += _place_media(message, media, pattern, image_dir, downloads)
    return tuple(references)


def count_markers(messages: list[Message]) -> dict[str, int]:
    """Count the markers of each kind in messages whose content is text."""
    return {marker: sum(message["content"].count(marker) for message in messages) for marker in _NAMES}


def flatten_content(content: object, embedded: Cells) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"the content of a message must be text or a list of parts, found {brief(content)}")
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
                embedded[PLACED].append(_PARTS[kind])
            else:
                embedded[_PARTS[kind]].append({**part, "video": item} if kind == "video" else item)
            text += _PARTS[kind]
        else:
            raise DataError(f"a content part must be of type text, {', '.join(_PARTS)}, found {brief(part)}")
    return text


def _find_media(row: Mapping[str, object], columns: Columns, embedded: Cells) -> Media:
    found: Media = {}
    for marker, column in ((IMAGE_MARKER, columns.images), (VIDEO_MARKER, columns.videos)):
        value = row.get(column)
        listed = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
        if listed and embedded[marker]:
            raise DataError(f"{_NAMES[marker]} stand both in the messages and in column {column!r}; keep one of them")
        found[marker] = deque(listed or embedded[marker])
    return found


def _compile_markers(
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
