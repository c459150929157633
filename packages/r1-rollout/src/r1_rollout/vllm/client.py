"""HTTP client of one vLLM server: JSON requests, JSON or streamed answers, deadlines, cancellation.

It uses the standard library and not httpx: r1-rollout needs numpy, torch and transformers only, and httpx's synchronous
client has no call that interrupts a blocked read from another thread, as `HttpCall.cancel` does.
"""

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

from r1_rollout.errors import ServerError
from r1_rollout.types import Json, JsonObject

_LONGEST_LINE = 64 * 2**20  # bytes of one event or answer; beyond it a server is not to be believed


class ServerFault(ServerError):
    """A server is gone, too slow, or its answer is invalid. Another may succeed."""


class ServerRejected(ServerFault):
    """A server answers that it failed (HTTP 500)."""


class ServerStalled(ServerFault):
    """A server holds a request and sends nothing."""


class RequestRefused(ServerError, ValueError):
    """A server refuses the request (HTTP 400 to 499); others would, too."""


class NotThere(RequestRefused):
    """A server does not know the address, or the model that the request names (HTTP 404)."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a vLLM server, and the token that it asks for."""

    url: str  # http://host:port, https://host:port, or unix:/path/of/a/socket
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if not (parts.scheme in ("http", "https") and parts.hostname) and not (parts.scheme == "unix" and parts.path):
            raise ValueError(f"{self.url!r} is no server's address: write http://host:port")

    @property
    def remote(self) -> bool:
        return urlsplit(self.url).hostname not in (None, "localhost", "127.0.0.1", "::1")

    @property
    def exposed(self) -> bool:
        return self.remote and urlsplit(self.url).scheme == "http"

    def connect(self, timeout: float) -> HTTPConnection:
        parts = urlsplit(self.url)
        if parts.scheme == "unix":
            return _UnixConnection(parts.path, timeout)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        return kind(parts.hostname or "", parts.port, timeout=timeout)


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(self._path)
        except OSError:
            self.close()
            raise


class HttpCall:
    """A pending request; `cancel`, from any thread, closes its connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.cancelled = False

    def attach(self, sock: socket.socket | None) -> None:
        with self._lock:
            self._socket = sock

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)


def ask(endpoint: Endpoint, method: str, path: str, body: Mapping[str, Json] | None = None, *, timeout: float) -> Json:
    """Return the JSON answer of the server, or None if it is empty.

    Args:
        timeout: seconds without a byte from the server.

    Raises:
        RequestRefused: HTTP 400 to 499.
        ServerFault: any other failure.
    """
    with _open(endpoint, method, path, body, timeout, HttpCall()) as response:
        return _parse(response.read(_LONGEST_LINE), endpoint, path)


def tell(endpoint: Endpoint, path: str, body: Mapping[str, Json], *, timeout: float) -> None:
    with _open(endpoint, "POST", path, body, timeout, HttpCall()):
        pass


def stream(
    endpoint: Endpoint, path: str, body: Mapping[str, Json], *, timeout: float, call: HttpCall
) -> Iterator[JsonObject]:
    """Yield the events of a server-sent stream up to its `[DONE]`.

    Raises:
        RequestRefused: HTTP 400 to 499, or an event that reports one of these.
        ServerFault: any other failure, an invalid event, an end before `[DONE]`.
    """
    with _open(endpoint, "POST", path, body, timeout, call) as response:
        while line := response.readline(_LONGEST_LINE):
            word, _, rest = line.partition(b":")
            if word != b"data":
                continue
            if rest.strip() == b"[DONE]":
                return
            event = _parse(rest, endpoint, path)
            _check_event(event, f"{endpoint.url}{path}")
            yield event
    raise ServerFault(f"{endpoint.url}{path}: the stream ended early")


@contextmanager
def _open(
    endpoint: Endpoint, method: str, path: str, body: Mapping[str, Json] | None, timeout: float, call: HttpCall
) -> Iterator[HTTPResponse]:
    where = f"{endpoint.url}{path}"
    connection = endpoint.connect(timeout)
    headers = {"Content-Type": "application/json"}
    if endpoint.token:
        headers["Authorization"] = f"Bearer {endpoint.token}"
    try:
        connection.connect()
        call.attach(connection.sock)
        if call.cancelled:
            raise ServerFault(f"{where}: cancelled")
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        response = connection.getresponse()
        _check_status(response, where)
        yield response
    except TimeoutError as error:
        raise ServerStalled(f"{where}: nothing heard for {timeout:g} s") from error
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, RequestRefused):
            raise
        raise ServerFault(f"{where}: {type(error).__name__}: {error}") from error
    finally:
        call.attach(None)
        connection.close()


def _check_status(response: HTTPResponse, where: str) -> None:
    if response.status == 200:
        return
    answer = response.read(2000).decode(errors="replace")
    if response.status in (401, 403):
        raise ServerFault(f"{where}: HTTP {response.status}, the server does not take this token: {answer:.300}")
    if 400 <= response.status < 500 and response.status not in (408, 429):
        refusal = NotThere if response.status == 404 else RequestRefused
        raise refusal(f"{where}: HTTP {response.status}: {answer}")
    kind = ServerRejected if response.status == 500 else ServerFault
    raise kind(f"{where}: HTTP {response.status}: {answer:.300}")


def _check_event(event: Json, where: str) -> None:
    error = event.get("error") if isinstance(event, dict) else event
    if error is None:
        return
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, int) and 400 <= code < 500:
        raise RequestRefused(f"{where}: {error.get('message')}")
    raise ServerFault(f"{where}: an error instead of an event: {str(event)[:300]}")


def _parse(text: bytes, endpoint: Endpoint, path: str) -> Json:
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ServerFault(f"{endpoint.url}{path}: no JSON: {text[:100]!r}") from error
