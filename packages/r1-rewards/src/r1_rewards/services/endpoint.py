"""Post JSON to one of several servers: timeouts, retries with back-off, fail-over.

Needs `r1-rewards[http]`. Failures are `RequestFailed` with a cause.
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import urlsplit

from r1_rewards.types import Cause, RewardSpecError

if TYPE_CHECKING:
    import httpx

MAX_REPLY_BYTES = 64 * 2**20
LOOPBACK = ("localhost", "127.0.0.1", "::1")
MAX_PAUSE = 30.0  # seconds between two tries, and that a server rests after a failure
REFUSALS = (400, 413, 422, 500)  # statuses that can be the fault of what was sent

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def bearer_headers(urls: Sequence[str], variable: str) -> dict[str, str]:
    """Return the header with the token in an environment variable; {} if that is not set.

    Raises RewardSpecError if the token would be sent unencrypted.
    """
    if not (token := os.environ.get(variable)):
        return {}
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme == "http" and parts.hostname not in LOOPBACK:
            raise RewardSpecError(
                f"{url}: the token in {variable} would be sent over the network unencrypted; write https://, or name "
                "another variable, which is not set"
            )
    return {"authorization": f"Bearer {token}"}


class Unusable(Exception):
    """A complete reply without what the caller needs; a retry may succeed."""


class RequestFailed(Exception):
    def __init__(self, cause: Cause, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.cause: Cause = cause
        self.refused = refused  # whether a server looked at what was sent and could not take it


class Post(Protocol):
    """Send `body` as JSON and return `read(reply)`; `read` raises Unusable to ask for a retry."""

    async def __call__(self, body: object, read: Callable[[object], Result]) -> Result: ...


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts and retries. Pauses double from `backoff` up to MAX_PAUSE seconds, with random jitter."""

    timeout: float = 180.0  # seconds per try
    deadline: float = 600.0  # seconds per request, all tries and pauses together
    tries: int = 5
    backoff: float = 0.5  # seconds, the longest first pause

    def __post_init__(self) -> None:
        if self.timeout <= 0 or self.deadline <= 0 or self.tries < 1 or self.backoff < 0:
            raise RewardSpecError(f"timeout, deadline and tries must be positive and backoff not negative, got {self}")


class _TryFailed(Exception):
    def __init__(
        self,
        cause: Cause,
        message: str,
        *,
        refused: bool = False,
        final: bool = False,
        pause: float = 0,
        busy: bool = False,
    ) -> None:
        super().__init__(message)
        self.cause: Cause = cause
        self.refused = refused
        self.final = final  # whether this server would say the same again
        self.pause = pause  # seconds that the server asked for
        self.busy = busy  # whether it asked to be asked again: that is waited for, and is no failed try


@dataclass(slots=True, eq=False)
class _Server:
    url: str
    busy: int = 0
    failures: int = 0  # in a row
    rests_until: float = 0.0
    answered: bool = False  # since this process began
    restarting: bool = False  # it answered, and now takes no connection


class HttpEndpoint:
    """Several equal servers behind one method.

    A request goes to the least busy server that did not just fail. Network errors, timeouts, 408, 425, 429, 5xx and
    unusable replies are retried, at other servers first; other 4xx only at other servers. Redirects are not followed. A
    busy server that sends Retry-After (429 or 503) is waited for until the deadline, and so is one that has answered
    before and takes no connection now, as while it restarts.

    After as many failed requests in a row as run concurrently, and at least three, the rest of that `run` fails
    untried. A refused request counts an eighth: it may itself be at fault.
    """

    def __init__(
        self,
        urls: Sequence[str],
        patience: Patience,
        *,
        headers: Mapping[str, str] | None = None,
        concurrency: int = 8,
    ) -> None:
        """`concurrency` is requests at a time per server. Raises RewardSpecError for invalid URLs and numbers."""
        try:
            import httpx
        except ImportError as error:
            raise RewardSpecError('a reward over HTTP needs: pip install "r1-rewards[http]"') from error
        if not urls or concurrency < 1:
            raise RewardSpecError(f"needs a URL and at least one request at a time, got {list(urls)} and {concurrency}")
        for url in urls:
            if not url.startswith(("http://", "https://")) or not httpx.URL(url).host:
                raise RewardSpecError(f"{url!r} is not a URL; write http://HOST:PORT/PATH")
            if httpx.URL(url).userinfo:
                raise RewardSpecError("a URL with a password ends up in logs; put the secret into the environment")
        self.urls = tuple(urls)
        self.patience = patience
        self._servers = [_Server(url) for url in urls]
        self._headers = {"content-type": "application/json", **(headers or {})}
        self._concurrency = concurrency * len(urls)
        self._tls = httpx.create_ssl_context()
        self._cancels: set[Callable[[], object]] = set()
        self._lock = threading.Lock()
        self._failed_in_a_row = 0.0

    def run(self, work: Callable[[Post], Awaitable[Result]]) -> Result:
        """Run `work(post)` in an event loop in its own thread. Callable from any thread.

        Calls are serialized. Raises RuntimeError if `close` ends the call.
        """
        with self._lock, ThreadPoolExecutor(1, thread_name_prefix="r1-http") as thread:
            self._failed_in_a_row = 0.0
            future = thread.submit(asyncio.run, self._session(work))
            try:
                return future.result()
            except asyncio.CancelledError as error:
                raise RuntimeError(f"the connection to {self} was closed while it was in use") from error
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        for cancel in tuple(self._cancels):
            with contextlib.suppress(RuntimeError):  # its loop has just ended by itself
                cancel()

    def __str__(self) -> str:
        return ", ".join(self.urls)

    async def _session(self, work: Callable[[Post], Awaitable[Result]]) -> Result:
        import httpx

        task = asyncio.current_task()
        assert task is not None
        cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        self._cancels.add(cancel)
        for server in self._servers:
            server.busy, server.rests_until = 0, 0.0
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._concurrency)
        slots = asyncio.Semaphore(self._concurrency)
        try:
            async with httpx.AsyncClient(
                headers=self._headers, timeout=None, limits=limits, verify=self._tls, follow_redirects=False
            ) as client:
                return await work(partial(self._post, client, slots))
        finally:
            self._cancels.discard(cancel)

    async def _post(
        self, client: "httpx.AsyncClient", slots: asyncio.Semaphore, body: object, read: Callable[[object], Result]
    ) -> Result:
        async with slots:
            content = json.dumps(body).encode("ascii")
            if self._failed_in_a_row >= max(3, self._concurrency):
                raise RequestFailed("remote", f"not tried: none of the last requests to {self} came to anything")
            try:
                result = await self._insist(client, content, read)
            except RequestFailed as error:
                self._failed_in_a_row += 0.125 if error.refused else 1.0
                raise
            self._failed_in_a_row = 0.0
            return result

    async def _insist(self, client: "httpx.AsyncClient", content: bytes, read: Callable[[object], Result]) -> Result:
        now, patience = asyncio.get_running_loop().time, self.patience
        end = now() + patience.deadline
        candidates, tried = list(self._servers), Counter[_Server]()
        failure = _TryFailed("timeout", "no time was left for a first try")
        attempt = waits = 0
        while attempt < patience.tries:
            server = min(candidates, key=lambda s: (tried[s], s.rests_until > now(), s.busy))
            if tried[server]:  # all have failed once: only now is it worth waiting
                pause = min(patience.backoff * 2 ** min(attempt + waits - 1, 30), MAX_PAUSE) * random.uniform(0.5, 1.0)
                await asyncio.sleep(min(max(pause, failure.pause), max(end - now(), 0)))
            limit = min(patience.timeout, end - now())
            if limit <= 0:
                break
            tried[server] += 1
            try:
                return await self._try(client, server, content, read, limit)
            except _TryFailed as error:
                failure = error
                attempt, waits = attempt + (not error.busy), waits + error.busy
                if error.final:
                    candidates.remove(server)
                    if not candidates:
                        break
        total = tried.total()
        message = f"{total} {'try' if total == 1 else 'tries'}, the last at {failure}"
        raise RequestFailed(failure.cause, message, refused=failure.refused)

    def _report_restart(self, server: _Server, message: str) -> None:
        if not server.restarting:
            server.restarting = True
            seconds = self.patience.deadline
            logger.warning("%s; it has answered before, so each request waits for it, up to %g s", message, seconds)

    async def _try(
        self,
        client: "httpx.AsyncClient",
        server: _Server,
        content: bytes,
        read: Callable[[object], Result],
        limit: float,
    ) -> Result:
        import httpx

        loop = asyncio.get_running_loop()
        server.busy += 1
        try:
            async with asyncio.timeout(limit):
                status, headers, reply = await _exchange(client, server.url, content)
            _check_status(status, headers, reply)
            try:
                result = read(json.loads(reply))
            except (ValueError, RecursionError) as error:
                raise Unusable(f"the reply is not JSON ({error}): {_excerpt(reply)}") from error
        except TimeoutError:
            failure = _TryFailed("timeout", f"{server.url}: no reply after {limit:.3g} s")
        except (httpx.HTTPError, OSError) as error:
            message = f"{server.url}: {type(error).__name__} {error}".rstrip()
            gone = server.answered and isinstance(error, httpx.ConnectError)
            failure = _TryFailed("remote", message, busy=gone)
            if gone:
                self._report_restart(server, message)
                server.rests_until = loop.time() + 1.0
        except Unusable as error:
            failure = _TryFailed("wrong_shape", f"{server.url}: {error}", refused=True)
        except _TryFailed as error:
            failure = _TryFailed(
                error.cause, f"{server.url}: {error}",
                refused=error.refused, final=error.final, pause=error.pause, busy=error.busy,
            )  # fmt: skip
        else:
            if server.restarting:
                logger.warning("%s answers again", server.url)
            server.failures, server.answered, server.restarting = 0, True, False
            return result
        finally:
            server.busy -= 1
        if not failure.refused and not failure.busy:
            server.failures += 1
            server.rests_until = loop.time() + min(2.0**server.failures, MAX_PAUSE)
        raise failure


async def _exchange(client: "httpx.AsyncClient", url: str, content: bytes) -> tuple[int, Mapping[str, str], bytes]:
    async with client.stream("POST", url, content=content) as response:
        reply = bytearray()
        async for chunk in response.aiter_bytes():
            reply += chunk
            if len(reply) > MAX_REPLY_BYTES:
                raise Unusable(f"the reply is longer than {MAX_REPLY_BYTES} bytes")
        return response.status_code, response.headers, bytes(reply)


def _check_status(status: int, headers: Mapping[str, str], reply: bytes) -> None:
    if status == 200:
        return
    message = f"HTTP {status}: {_excerpt(reply)}"
    again = status in (408, 425, 429) or status >= 500
    asked = headers.get("retry-after", "")
    pause = min(float(asked), MAX_PAUSE) if asked.isascii() and asked.isdigit() else 0.0
    busy = status in (429, 503) and bool(pause)
    raise _TryFailed("remote", message, refused=status in REFUSALS, final=not again, pause=pause, busy=busy)


def _excerpt(reply: bytes) -> str:
    return ascii(reply[:200].decode("utf-8", "replace"))
