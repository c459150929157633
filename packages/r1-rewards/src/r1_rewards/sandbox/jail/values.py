"""Plain values as JSON, and JSON messages over a socket: all that passes between judged code and its judges.

Unlike JSON alone it keeps tuples, sets, bytes, non-text keys and nan, as tagged objects. No pickles, no classes.
"""

import json
import math
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

_EXACT = 1 << 53
_LENGTH = struct.Struct(">I")
MAX_BYTES = 1 << 28


class RunLimits(TypedDict):
    memory_mib: int
    cpu_seconds: float
    files_mib: int
    threads: int
    output_mib: int
    module_paths: Sequence[str]


class Request(TypedDict):
    mode: str
    source: str
    units: list[str]
    limits: RunLimits
    required: list[str]


def encode(value: object, other: Callable[[object], object]) -> Any:
    """Return `value` as JSON; `other` encodes values that are not plain.

    Subclasses become their base type, a deque a list. Raises RecursionError for cycles.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value) if -_EXACT < value < _EXACT else {"int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, list | deque):
        return [encode(item, other) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, other) for item in value]}
    if isinstance(value, set | frozenset):
        return {"set": [encode(item, other) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, other), encode(item, other)] for key, item in value.items()]}
    return other(value)


def decode(data: Any, other: Callable[[dict[str, Any]], object], *, text_keys: bool = False) -> Any:
    """Return the value that `encode` wrote as `data`; `other` reads objects with unknown tags.

    With `text_keys`, keys of dicts become text and sets are refused: numbers can be chosen to share one hash, and a set
    of a few thousand of them would take minutes to build. Raises TypeError or ValueError for invalid data.
    """

    def inner(item: object) -> object:
        return decode(item, other, text_keys=text_keys)

    if isinstance(data, list):
        return [inner(item) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError("a tagged value has one tag")
    ((tag, body),) = data.items()
    match tag:
        case "int":
            return int(body, 16)
        case "float":
            return float(body)
        case "complex":
            return complex(float(body[0]), float(body[1]))
        case "bytes":
            return bytes.fromhex(body)
        case "tuple":
            return tuple(inner(item) for item in body)
        case "set" if text_keys:
            raise ValueError("a set, where text keys are wanted")
        case "set":
            return {inner(item) for item in body}
        case "dict" if text_keys:
            return {str(inner(key)): inner(item) for key, item in body}
        case "dict":
            return {inner(key): inner(item) for key, item in body}
    return other(data)


def send(connection: socket.socket, message: object) -> None:
    payload = json.dumps(message).encode("ascii")
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive(connection: socket.socket) -> Any:
    """Raises EOFError if the other side is gone, TimeoutError as the socket is set."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > MAX_BYTES:
        raise EOFError(f"a message of {length} bytes: the connection is out of step")
    return json.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = connection.recv(min(length - len(data), 1 << 20))
        if not piece:
            raise EOFError("the other side closed the connection")
        data += piece
    return data
