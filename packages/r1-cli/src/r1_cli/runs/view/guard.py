"""Access control of the `r1 view` server, and security headers for browsers."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

COOKIE = "r1_view"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
        b"frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
]

Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]


class Guard:
    """ASGI middleware that allows GET requests for the server's own host names with its token."""

    def __init__(self, app: Any, token: str | None, hosts: frozenset[str] | None) -> None:
        """`token` None: none is needed. `hosts` are the allowed Host headers, against DNS rebinding; None: any."""
        self._app, self._token, self._hosts = app, token, hosts

    async def __call__(self, scope: Message, receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
            await send(message)

        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["method"] not in ("GET", "HEAD"):
            await _answer(send_guarded, 405, b"only GET is served")
        elif self._hosts is not None and _name(headers.get(b"host", "")) not in self._hosts:
            await _answer(send_guarded, 421, b"this name is not served: use the address that r1 view printed")
        elif self._token and given and self._is_token(given):
            cookie = f"{COOKIE}={self._token}; HttpOnly; SameSite=Strict; Path=/".encode()
            await _answer(send_guarded, 303, b"", [(b"location", b"/"), (b"set-cookie", cookie)])
        elif self._token and not self._is_token(_carried(headers)):
            await _answer(send_guarded, 401, b"the token is missing: open the address that r1 view printed")
        else:
            await self._app(scope, receive, send_guarded)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), (self._token or "").encode())


def allowed_hosts(host: str) -> frozenset[str] | None:
    """Return the Host headers for a server bound to `host`; None if unknown."""
    if host in ("0.0.0.0", "::"):
        return None
    return LOOPBACK | {f"[{host}]" if ":" in host else host.lower()}


def _name(host: str) -> str:
    name, _, port = host.lower().rpartition(":")
    return name if port.isdigit() else host.lower()


def _carried(headers: dict[bytes, str]) -> str:
    if (said := headers.get(b"authorization", "")).startswith("Bearer "):
        return said.removeprefix("Bearer ")
    pairs = (pair.strip().partition("=") for pair in headers.get(b"cookie", "").split(";"))
    return next((value for name, _, value in pairs if name == COOKIE), "")


async def _answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    start = [(b"content-type", b"text/plain; charset=utf-8"), *(headers or ())]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})
