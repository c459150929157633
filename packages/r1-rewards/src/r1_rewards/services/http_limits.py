"""Limits on the requests of an ASGI server: bytes of a body, seconds to arrive."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

DRAINED_BYTES = 1 << 20  # of a request that is turned away
DRAIN_SECONDS = 5.0
HEADER_SECONDS = 10.0  # for a connection to say what it wants
BODY_SECONDS = 60.0  # for a request's body to arrive

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]


class RefusedRequest(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def read_body(receive: Receive, most_bytes: int) -> bytes:
    """Raises RefusedRequest: 408 for a body that takes longer than BODY_SECONDS, 413 for a longer one."""
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while more and len(body) <= most_bytes:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
    except TimeoutError as error:
        raise RefusedRequest(408, f"the request took longer than {BODY_SECONDS:g} s to arrive") from error
    if len(body) > most_bytes:
        raise RefusedRequest(413, f"the request has more than {most_bytes} bytes")
    return bytes(body)


async def drain(receive: Receive) -> None:
    """Read part of a refused body: if closed at once, the connection would be reset before the reply arrives."""
    left = DRAINED_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def header_timeout_protocol() -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with a timeout of HEADER_SECONDS for a request's head.

    Without it clients could hold connections for ever: uvicorn's `timeout_keep_alive` starts only after a response.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class HeaderTimeoutProtocol(H11Protocol):
        timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop()
            elif self.timer is None:
                self._wait()

        def connection_lost(self, error: Exception | None) -> None:
            self._stop()
            super().connection_lost(error)

        def _wait(self) -> None:
            self.timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

        def _stop(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

    return HeaderTimeoutProtocol
