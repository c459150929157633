"""Check the messages that an environment answers with, and take the pictures out of them."""

import re
from collections.abc import Iterator, Mapping, Sequence

from r1_data.references import is_pil, resolve_picture
from r1_data.turns.conversation import join_texts
from r1_data.types import DataError, JsonObject, MediaError, Message, PictureReference

_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)
_ROLES = ("tool", "user")


def read_messages(
    messages: Sequence[Mapping[str, object]], *, roles: Sequence[str] = _ROLES
) -> tuple[list[Message], list[PictureReference]]:
    """Return messages as templates take them, and the pictures of their image parts in order.

    Contents become a string, or parts of type text and image where there are pictures. Half surrogates and zero bytes
    become `?`. The name and id of a call are left out if they are not words, because templates copy them.

    Args:
        messages: OpenAI messages of these roles; an image part holds bytes, a PIL image, or a `data:` URL.

    Raises:
        DataError: another role, or a content of another kind.
        MediaError: a picture of another kind; paths and URLs are not read, because tools are not trusted with them.
    """
    pictures: list[PictureReference] = []
    return [_read(message, roles, pictures) for message in messages], pictures


def _read(message: Mapping[str, object], roles: Sequence[str], pictures: list[PictureReference]) -> Message:
    role, content = message.get("role"), message.get("content")
    if role not in roles:
        raise DataError(f"a message must have the role {' or '.join(roles)}, found {role!r}")
    read: Message = {"role": role}
    for name in ("name", "tool_call_id"):
        value = message.get(name)
        if isinstance(value, str) and _NAME.fullmatch(value):
            read[name] = value
    if isinstance(content, str):
        return {**read, "content": clean_text(content)}
    if not isinstance(content, list | tuple):
        raise DataError(f"the content of a message must be text or a list of parts, found {type(content).__name__}")
    return {**read, "content": join_texts(list(_parts(content, pictures)))}


def _parts(content: Sequence[object], pictures: list[PictureReference]) -> Iterator[JsonObject]:
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
            yield {"type": "text", "text": clean_text(part["text"])}
        elif isinstance(part, Mapping) and kind in ("image", "image_url"):
            pictures.append(_picture(part.get(kind)))
            yield {"type": "image"}
        else:
            raise DataError(f"a part of a message must be of type text, image or image_url, found {kind!r}")


def _picture(value: object) -> PictureReference:
    if isinstance(value, Mapping):
        value = value.get("url") or value.get("bytes")
    if isinstance(value, bytes) or is_pil(value) or (isinstance(value, str) and value[:5].lower() == "data:"):
        return resolve_picture(value, None)
    raise MediaError(f"a picture must be bytes, a PIL image or a data: URL, found {type(value).__name__}")


def clean_text(text: str) -> str:
    if text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", "?")
