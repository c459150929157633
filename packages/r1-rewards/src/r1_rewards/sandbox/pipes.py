"""Exchange data through pipes with an untrusted process: limited in bytes and time, never blocked by it."""

import json
import os
import select
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any, Literal

Ending = Literal["ended", "timeout", "output", "killed"]

STDERR_BYTES = 4096
_PIECE = 1 << 16


class OutputError(Exception):
    """The process wrote too much, or something that is no message."""


class Exchange:
    """Feed a program's stdin and collect its stdout and stderr until it ends."""

    def __init__(self, pipes: Sequence[int], ended: socket.socket, stdin: bytes, bound: int) -> None:
        """`pipes`: our ends of stdin, stdout and stderr; `ended`: readable when the program ends."""
        self._stdin, self._stdout, self._stderr = pipes
        self._ended = ended
        self._unsent = memoryview(stdin)
        self._bound = bound
        self.stdout, self.stderr = bytearray(), bytearray()

    def run(self, deadline: float) -> Ending:
        """Return when the program has ended or written too much, or at `deadline` (`time.monotonic`)."""
        for descriptor in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(descriptor, False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdin, selectors.EVENT_WRITE)
            for source in (self._stdout, self._stderr, self._ended):
                selector.register(source, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select(deadline - time.monotonic())}
                if time.monotonic() >= deadline:
                    return "timeout"
                for descriptor in (self._stdout, self._stderr):
                    if descriptor in ready and not self._read(descriptor):
                        selector.unregister(descriptor)
                if len(self.stdout) > self._bound:
                    return "output"
                if self._stdin in ready and not self._write():
                    selector.unregister(self._stdin)
                    os.dup2(self._stderr, self._stdin)  # closes the pipe, so that the program sees the end of its input
                if self._ended in ready:
                    return "ended"

    def drain(self) -> Ending:
        while self._read(self._stdout) and len(self.stdout) <= self._bound:
            pass
        while self._read(self._stderr):
            pass
        return "output" if len(self.stdout) > self._bound else "ended"

    def _read(self, descriptor: int) -> bool:
        try:
            piece = os.read(descriptor, _PIECE)
        except BlockingIOError:
            return True
        if descriptor == self._stdout:
            self.stdout += piece
        else:
            self.stderr = (self.stderr + piece)[-STDERR_BYTES:]
        return bool(piece)

    def _write(self) -> bool:
        try:
            self._unsent = self._unsent[os.write(self._stdin, self._unsent[:_PIECE]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return bool(self._unsent)


class JsonChannel:
    """JSON lines to and from an untrusted process."""

    def __init__(self, writer: int, reader: int, bound: int) -> None:
        """Take ownership of the two descriptors; `bound` is the most bytes of one message."""
        self._writer, self._reader, self._bound = writer, reader, bound
        self._read = bytearray()
        os.set_blocking(writer, False)
        os.set_blocking(reader, False)

    def tell(self, message: object, deadline: float) -> None:
        """Send a message. Raises TimeoutError at `deadline` (`time.monotonic`), EOFError if the process has ended."""
        unsent = memoryview(json.dumps(message).encode("ascii") + b"\n")
        while unsent:
            _wait([], [self._writer], deadline)
            try:
                unsent = unsent[os.write(self._writer, unsent[:_PIECE]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise EOFError("the process has ended") from error

    def hear(self, deadline: float) -> dict[str, Any]:
        """Return the next message. Raises TimeoutError, EOFError, or OutputError for anything but a JSON object."""
        start = 0
        while (end := self._read.find(b"\n", start)) < 0:
            start = len(self._read)
            if start > self._bound:
                raise OutputError(f"a message of more than {self._bound} bytes")
            _wait([self._reader], [], deadline)
            try:
                piece = os.read(self._reader, _PIECE)
            except BlockingIOError:
                continue
            if not piece:
                raise EOFError("the process has ended")
            self._read += piece
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise OutputError("a message that is not JSON") from error
        if not isinstance(message, dict):
            raise OutputError("a message that is not an object")
        return message

    def close(self) -> None:
        os.close(self._writer)
        os.close(self._reader)


def _wait(readers: list[int], writers: list[int], deadline: float) -> None:
    remaining = deadline - time.monotonic()
    if remaining <= 0 or not any(select.select(readers, writers, [], remaining)):
        raise TimeoutError("no time is left")
