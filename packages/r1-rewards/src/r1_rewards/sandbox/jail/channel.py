"""JSON messages over the socket between the sandbox's owner and its supervisor, and over pipes, line by line."""

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct(">I")
MAX_BYTES = 1 << 28


def send(connection: socket.socket, message: Any) -> None:
    """Send one JSON value behind its length. Raises OSError where the other side is gone."""
    payload = json.dumps(message).encode("ascii")
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive(connection: socket.socket) -> Any:
    """Return the next JSON value. Raises EOFError where the other side is gone, TimeoutError as the socket is set."""
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
