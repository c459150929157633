"""Messages between the pool and its workers: length-prefixed JSON over a socket, and pictures in it."""

import base64
import io
import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from r1_rewards.types import Failure, Outcome, Score

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 1 << 31
_LENGTH = struct.Struct(">Q")
_PIECE = 1 << 18


def send(connection: socket.socket, message: object, deadline: float | None = None) -> None:
    """Send one JSON value; `deadline` is in `time.monotonic` seconds. Raises TimeoutError, OSError, TypeError.

    ASCII-only JSON carries every str, lone surrogates included.
    """
    payload = json.dumps(message).encode("ascii")
    _set_timeout(connection, deadline)
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive(connection: socket.socket, deadline: float | None = None) -> Any:
    length = _read_length(_receive_bytes(connection, _LENGTH.size, deadline))
    return json.loads(_receive_bytes(connection, length, deadline))


def pack(outcome: Outcome) -> dict[str, object]:
    if isinstance(outcome, Failure):
        return {"cause": outcome.cause, "message": outcome.message}
    return {"parts": dict(outcome.parts), "extracted": outcome.extracted, "reason": outcome.reason}


def unpack(message: dict[str, Any]) -> Outcome:
    try:
        if "cause" in message:
            return Failure(message["cause"], message["message"])
        parts = message["parts"]
        return Score(parts["overall"], parts, extracted=message["extracted"], reason=message["reason"])
    except (KeyError, TypeError) as error:
        raise ValueError("a message that is no outcome") from error


class WireSample(TypedDict):
    response: str
    response_length: int
    ground_truth: str
    prompt: str
    metadata: dict[str, object]
    messages: list[Mapping[str, object]]
    images: list[dict[str, str]]
    step: int
    source: str


class Job(TypedDict):
    """Samples for a worker, to score in one call (`whole`) or one by one in `cpu_seconds` each."""

    samples: list[WireSample]
    whole: bool
    cpu_seconds: float


@dataclass
class Inbox:
    _connection: socket.socket
    _data: bytearray = field(default_factory=bytearray)

    def read(self) -> list[Any]:
        piece = self._connection.recv(_PIECE, socket.MSG_DONTWAIT)
        if not piece:
            raise EOFError("the other side closed the connection")
        self._data += piece
        messages, start = [], 0
        while len(self._data) - start >= _LENGTH.size:
            end = start + _LENGTH.size + _read_length(self._data[start : start + _LENGTH.size])
            if end > len(self._data):
                break
            messages.append(json.loads(self._data[start + _LENGTH.size : end]))
            start = end
        del self._data[:start]
        return messages


def _read_length(prefix: bytes | bytearray) -> int:
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_BYTES:
        raise EOFError(f"a message of {length} bytes: the connection is out of step")
    return int(length)


def _receive_bytes(connection: socket.socket, length: int, deadline: float | None) -> bytearray:
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        _set_timeout(connection, deadline)
        count = connection.recv_into(view[done:])
        if count == 0:
            raise EOFError("the other side closed the connection")
        done += count
    return data


def _set_timeout(connection: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        connection.settimeout(None)
        return
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("the deadline has passed")
    connection.settimeout(remaining)


def encode_picture(picture: object, seen: dict[int, dict[str, str]]) -> dict[str, str]:
    """Return a PIL image, encoded bytes or a path as JSON; `seen` caches a batch's pictures, which groups share.

    Raises TypeError for anything else.
    """
    if id(picture) not in seen:
        seen[id(picture)] = _encode_picture(picture)
    return seen[id(picture)]


def decode_picture(picture: Mapping[str, str]) -> "Image":
    try:
        import PIL.Image
    except ImportError as error:
        raise RuntimeError("a reward function that asks for pictures needs: pip install pillow") from error
    return PIL.Image.open(picture["path"] if "path" in picture else io.BytesIO(base64.b64decode(picture["bytes"])))


def _encode_picture(picture: object) -> dict[str, str]:
    if isinstance(picture, str | os.PathLike):
        return {"path": os.path.abspath(picture)}
    if not isinstance(picture, bytes):
        if not hasattr(picture, "save"):
            raise TypeError(f"a picture is {type(picture).__name__}; it must be a PIL image, bytes or a path")
        buffer = io.BytesIO()
        picture.save(buffer, format="PNG", compress_level=1)
        picture = buffer.getvalue()
    return {"bytes": base64.b64encode(picture).decode("ascii")}


def check_json(values: Mapping[str, object], what: str) -> None:
    for key, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{what}: {key!r} is {type(value).__name__}, which is not a JSON value: {error}") from error
