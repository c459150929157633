"""Messages between the pool and its workers: JSON, each behind its length, over a private socket."""

import json
import socket
import struct
import time
from typing import Any

Outcome = dict[str, Any]  # of one sample: {"parts": {name: float}}, or {"failure": [cause, message]}

MAX_BYTES = 1 << 31
_LENGTH = struct.Struct(">Q")


def send(connection: socket.socket, message: Any, deadline: float | None = None) -> None:
    """Send one JSON value; `deadline` is a `time.monotonic` moment. Raises TimeoutError, OSError, TypeError.

    ASCII-only JSON carries every str, lone surrogates included.
    """
    payload = json.dumps(message).encode("ascii")
    _set_timeout(connection, deadline)
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive(connection: socket.socket, deadline: float | None = None) -> Any:
    """Return the next JSON value. Raises EOFError where the other side is gone, TimeoutError at the deadline."""
    (length,) = _LENGTH.unpack(_receive_bytes(connection, _LENGTH.size, deadline))
    if length > MAX_BYTES:
        raise EOFError(f"a message of {length} bytes: the connection is out of step")
    return json.loads(_receive_bytes(connection, length, deadline))


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
