"""What user code returns, as JSON for the pipe: text within its limit, pictures as PNG. Runs in a worker only."""

import base64
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import TYPE_CHECKING, SupportsFloat, TypedDict

from r1_rewards.environments.types import JsonObject, Observation, TruncateSide

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 40_000_000  # of one picture
MAX_SIDES_RATIO = 200  # of the longer side to the shorter: vision processors refuse more
MAX_PICTURE_BYTES = 32 << 20  # of one PNG file
MAX_PARTS = 256
MAX_ERROR = 500  # characters of an error text
MAX_STATE = 10_000  # characters of a state's name
NO_MORE_PICTURES = "[no more pictures]"
_LONE = re.compile("[\0\ud800-\udfff]")
# An absolute path: it would tell the policy about the machine. Fractions and URLs are none.
_PATH = re.compile(r"(?<![\w:/.])(?:/[^\s/'\":,;()<>]+)+/([^\s/'\":,;()<>]+)")


class ResultError(Exception):
    """A value that is no result of a tool or environment."""


class WireResult(TypedDict):
    """An observation on the pipe; parts as in `StepResult`, with pictures as base64."""

    parts: list[JsonObject]
    reward: object  # of user code: checked by the reader
    done: bool
    state: str | None
    truncated: int
    replaced: int


@dataclass(frozen=True, slots=True)
class ResultLimits:
    max_characters: int  # of all text of a result
    side: TruncateSide
    max_images: int


def encode_result(value: object, limits: ResultLimits) -> WireResult:
    """Return what a tool or `step` returned as JSON. Raises ResultError for what cannot be shown to a policy."""
    found = value if isinstance(value, Observation) else Observation(value)
    if _is_gym_tuple(value):
        found = _read_gym_tuple(value)
    contents = _split(found.content)
    texts, truncated = truncate_texts(
        [one for one in contents if isinstance(one, str)], limits.max_characters, limits.side
    )
    cleaned = [_LONE.subn("?", text) for text in texts]
    remaining, pictures, parts = iter(cleaned), 0, list[JsonObject]()
    for content in contents:
        if isinstance(content, str):
            parts.append(_text(next(remaining)[0]))
        else:
            pictures += 1
            parts.append(_encode_picture(content) if pictures <= limits.max_images else _text(NO_MORE_PICTURES))
    return {
        "parts": [part for part in parts if part.get("text") != ""],
        "reward": found.reward if isinstance(found.reward, int | float) else _number(found.reward),
        "done": bool(found.done),
        "state": None if found.state is None else _LONE.sub("?", str(found.state)[:MAX_STATE]),
        "truncated": truncated,
        "replaced": sum(count for _, count in cleaned),
    }


def truncate_texts(texts: Sequence[str], limit: int, side: TruncateSide) -> tuple[list[str], int]:
    """Return the texts with at most `limit` characters together, and how many were left out.

    `side` is where characters are left out; a mark there, which is not counted, says how many.
    """
    total = sum(map(len, texts))
    if total <= limit:
        return list(texts), 0
    head = {"left": 0, "right": limit, "middle": (limit + 1) // 2}[side]
    tail_from = total - (limit - head)
    mark = f"…[{total - limit:,} characters left out]…"
    found, start = [], 0
    for text in texts:
        end = start + len(text)
        kept = text[: max(0, head - start)] + (mark if start <= head < end else "")
        if end > tail_from:
            kept += text[max(0, tail_from - start) :] if start <= tail_from or start > head else text
        found.append(kept)
        start = end
    return found, total - limit


def describe_error(error: BaseException) -> str:
    """Return "TypeError: …": the last line of a traceback, without paths of this machine."""
    try:
        lines = str(error)[:10_000].strip().splitlines()
    except Exception:
        lines = []
    text = type(error).__name__ + (f": {lines[-1]}" if lines else "")
    text = _PATH.sub(r"\1", text)
    return _LONE.sub("?", text if len(text) <= MAX_ERROR else text[: MAX_ERROR - 1] + "…")


def error_line(error: BaseException, file: str) -> str:
    """Return " (line N of FILE)", if the error passed through the user's file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" (line {lines[-1]} of {os.path.basename(file)})" if lines else ""


def write_picture(picture: "Image") -> bytes:
    """Return a picture as PNG. Raises ResultError if it is too large, too narrow or empty."""
    width, height = picture.size
    if width < 1 or height < 1:
        raise ResultError(f"a picture of {width}x{height} pixels is empty")
    if width * height > MAX_PIXELS:
        raise ResultError(f"a picture of {width}x{height} pixels is over the limit of {MAX_PIXELS:,}")
    if max(width, height) > MAX_SIDES_RATIO * min(width, height):
        raise ResultError(f"a picture of {width}x{height} pixels is too narrow: at most {MAX_SIDES_RATIO} to 1")
    if picture.mode not in ("1", "L", "LA", "P", "RGB", "RGBA"):
        picture = picture.convert("RGB")
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", compress_level=1)
    if buffer.tell() > MAX_PICTURE_BYTES:
        raise ResultError(f"a picture of {buffer.tell():,} bytes is over the limit of {MAX_PICTURE_BYTES:,}")
    return buffer.getvalue()


def _split(content: object) -> list[object]:
    """Return the parts of a result: str, and pictures as PIL images or bytes."""
    if content is None:
        return []
    if isinstance(content, str) or _is_picture(content):
        return [content]
    if isinstance(content, list | tuple) and any(_is_picture(one) or _is_part(one) for one in content):
        if len(content) > MAX_PARTS:
            raise ResultError(f"the result has {len(content)} parts, more than {MAX_PARTS}")
        return [_read_part(one) for one in content]
    return [_to_json(content)]


def _read_part(part: object) -> object:
    if isinstance(part, str) or _is_picture(part):
        return part
    if not isinstance(part, Mapping) or not _is_part(part):
        return _to_json(part)
    if part["type"] == "text":
        return str(part.get("text", ""))
    found = part.get("image", part.get("image_url"))
    if isinstance(found, Mapping):
        found = found.get("url")
    if isinstance(found, str) and found.startswith("data:"):
        try:
            return base64.b64decode(found.partition(",")[2], validate=True)
        except ValueError as error:
            raise ResultError("a picture's data URL is not base64") from error
    if _is_picture(found) or isinstance(found, bytes | bytearray):
        return found
    raise ResultError("a picture is a PIL image, bytes of a file, or a data URL")


def _encode_picture(picture: object) -> JsonObject:
    import PIL.Image

    if isinstance(picture, bytes | bytearray):
        if len(picture) > MAX_PICTURE_BYTES:
            raise ResultError(f"a picture of {len(picture):,} bytes is over the limit of {MAX_PICTURE_BYTES:,}")
        try:
            opened = PIL.Image.open(io.BytesIO(picture))
            if opened.width * opened.height <= MAX_PIXELS:  # else `write_picture` refuses it
                opened.load()
        except PIL.Image.DecompressionBombError as error:
            raise ResultError(f"a picture's bytes hold more pixels than the limit of {MAX_PIXELS:,}") from error
        except Exception as error:  # Pillow's readers raise whatever a broken file makes them
            raise ResultError("a picture's bytes cannot be read") from error
        picture = opened
    assert isinstance(picture, PIL.Image.Image)
    return {"type": "image", "image": base64.b64encode(write_picture(picture)).decode("ascii")}


def _is_picture(value: object) -> bool:
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def _is_part(value: object) -> bool:
    return isinstance(value, Mapping) and value.get("type") in ("text", "image", "image_url")


def _to_json(value: object) -> str:
    if isinstance(value, bytes | bytearray):
        raise ResultError("the result is bytes; return text, or a picture as a PIL image")
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if not isinstance(value, Mapping | list | tuple | int | float):
        raise ResultError(f"the result is {type(value).__name__}; return text, a picture, parts or a mapping")
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError) as error:
        raise ResultError(f"the result cannot be written as JSON: {error}") from error
    except RecursionError as error:
        raise ResultError("the result is nested too deeply") from error


def _is_gym_tuple(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and 3 <= len(value) <= 5
        and isinstance(value[1], SupportsFloat)
        and all(type(flag).__name__ in ("bool", "bool_") for flag in value[2 : 4 if len(value) == 5 else 3])
    )


def _read_gym_tuple(value: object) -> Observation:
    assert isinstance(value, tuple)
    return Observation(value[0], value[1], any(value[2:4]) if len(value) == 5 else value[2])


def _text(text: str) -> JsonObject:
    return {"type": "text", "text": text}


def _number(value: object) -> object:
    try:
        return float(value)  # type: ignore[arg-type] # of NumPy or torch
    except (TypeError, ValueError, OverflowError):
        return str(value)[:80]
