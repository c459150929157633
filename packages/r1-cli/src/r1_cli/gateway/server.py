"""The HTTP server that agents sample from, on loopback. Needs `r1-cli[gateway]`.

Routes, each behind `/sessions/ID`: `/v1/chat/completions`, `/v1/responses`, `/v1/messages`, `/v1/models` and `/reward`.
"""

import asyncio
import hmac
import json
import logging
import math
import re
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from r1_cli.gateway.anthropic_messages import ANTHROPIC_MESSAGES
from r1_cli.gateway.chat_completions import CHAT_COMPLETIONS
from r1_cli.gateway.dialect import Dialect, ignored_keys
from r1_cli.gateway.fields import Fields, read_body
from r1_cli.gateway.messages import ChatReply, ChatRequest, GatewayError
from r1_cli.gateway.responses import RESPONSES, EarlierResponses
from r1_data.types import JsonObject
from r1_rewards.services import http_limits

if TYPE_CHECKING:
    import uvicorn

TOKEN_BYTES = 32
MAX_BODY_BYTES = 64 << 20
LONG_BODY_BYTES = 1 << 20  # read in another thread, because others wait meanwhile
IDLE_SECONDS = 600  # after which a connection is closed; agents hold theirs while tools run
STOP_SECONDS = 1  # for requests that are being answered when the server ends
MODEL = "policy"
SESSION_PATH = re.compile("/sessions/([^/]+)(/.+)")  # a session's name in URLs, and a route
UNREAD = (401, 404, 408, 413)  # statuses after which a part of the body may be left
IGNORED_HEADER = "x-r1-ignored"

log = logging.getLogger("r1")
Answer = Callable[[str, ChatRequest], "Future[ChatReply]"]
Written = tuple[JsonObject | bytes, dict[str, str]]  # JSON or server-sent events, and headers
Endpoint = Callable[[Dialect, "Session", JsonObject], Awaitable[Written]]
Send = Callable[[http_limits.Message], Awaitable[None]]
Reply = tuple[int, bytes, dict[str, str]]  # status, body and headers


@dataclass(frozen=True, slots=True)
class SessionAddress:
    """Where the agent of a session finds the policy.

    `base_url` is for clients of OpenAI's protocols, and ends in "/v1"; Anthropic's clients add that themselves to
    `root_url`.
    """

    root_url: str
    api_key: str

    @property
    def base_url(self) -> str:
        return f"{self.root_url}/v1"

    @property
    def reward_url(self) -> str:
        return f"{self.root_url}/reward"


@dataclass(frozen=True, slots=True)
class Session:
    id: str
    api_key: str
    responses: EarlierResponses = field(default_factory=EarlierResponses)


class GatewayServer:
    """Serves sessions until `close`, in a thread of its own.

    A turn that was begun is sampled to its end and stays in its session, also if its client disconnects.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        reward: Callable[[str, float], None] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        """Start to listen.

        Args:
            answer: gets a session's id and a request, in the server's thread; it must not block. A GatewayError, raised
                or in the future, becomes an error of the client's protocol.
            reward: gets a session's id and the reward that its agent sent.
            port: 0 for any that is free.
            max_body_bytes: of a request.

        Raises:
            ModuleNotFoundError: uvicorn is missing; the message has the line that installs it.
            OSError: the address cannot be used.
        """
        try:
            import uvicorn
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"agents need {error.name}: pip install 'r1-cli[gateway]'") from error
        self._answer, self._reward, self._max_body_bytes = answer, reward, max_body_bytes
        self._routes: dict[tuple[str, str], tuple[Dialect, Endpoint]] = {
            ("POST", "/v1/chat/completions"): (CHAT_COMPLETIONS, self._complete),
            ("POST", "/v1/responses"): (RESPONSES, self._complete),
            ("POST", "/v1/messages"): (ANTHROPIC_MESSAGES, self._complete),
            ("GET", "/v1/models"): (CHAT_COMPLETIONS, self._list_models),
            ("POST", "/reward"): (CHAT_COMPLETIONS, self._take_reward),
        }
        self._sessions: dict[str, Session] = {}  # by their name in URLs
        self._warned: set[str] = set()
        self._socket = _listen(host, port)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(self._settings())
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="gateway", daemon=True)
        self._thread.start()

    def _settings(self) -> "uvicorn.Config":
        import uvicorn

        return uvicorn.Config(
            self._serve,
            http=http_limits.header_timeout_protocol(),
            interface="asgi3",
            ws="none",
            proxy_headers=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=STOP_SECONDS,
        )

    def open(self, session_id: str) -> SessionAddress:
        """Begin a session with a token of its own. Raises ValueError if it is open."""
        if any(session.id == session_id for session in self._sessions.values()):
            raise ValueError(f"session {session_id!r} is open")
        name = plain = re.sub(r"[^A-Za-z0-9_-]", "-", session_id)
        while name in self._sessions:
            name = f"{plain}-{secrets.token_hex(4)}"
        session = Session(session_id, secrets.token_urlsafe(TOKEN_BYTES))
        self._sessions[name] = session
        return SessionAddress(f"{self.url}/sessions/{name}", session.api_key)

    def close_session(self, session_id: str) -> None:
        """Refuse further requests of a session (404). What is being answered is not ended."""
        self._sessions = {name: session for name, session in self._sessions.items() if session.id != session_id}

    def close(self) -> None:
        """End the server and all sessions."""
        self._sessions = {}
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    async def _serve(self, scope: http_limits.Message, receive: http_limits.Receive, send: Send) -> None:
        """Answer a request; this is an ASGI application: https://asgi.readthedocs.io/en/latest/specs/www.html"""
        status, body, headers = await self._respond(scope, receive)
        headers = {"content-type": "application/json", "content-length": str(len(body)), **headers}
        listed = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": listed})
        await send({"type": "http.response.body", "body": body})

    async def _respond(self, scope: http_limits.Message, receive: http_limits.Receive) -> Reply:
        dialect, method = CHAT_COMPLETIONS, scope["method"]
        try:
            name, (dialect, endpoint) = self._find_route(method, scope["path"])
            session = self._authorize(name, dict(scope["headers"]))
        except GatewayError as error:
            await http_limits.drain(receive)
            return _refuse(dialect, error)
        try:
            body = {} if method == "GET" else await self._read(receive)
            content, headers = await endpoint(dialect, session, body)
            if isinstance(content, bytes):
                return 200, content, {"content-type": "text/event-stream; charset=utf-8", **headers}
            return 200, _to_json(content), headers
        except GatewayError as error:
            return _refuse(dialect, error)
        except http_limits.RefusedRequest as error:
            return _refuse(dialect, GatewayError(error.status, str(error)))
        except Exception as error:
            log.exception("the gateway cannot answer a request")
            return _refuse(dialect, GatewayError(500, f"the gateway failed: {type(error).__name__}"))

    def _find_route(self, method: str, path: str) -> tuple[str, tuple[Dialect, Endpoint]]:
        """Return the name of the session and what answers."""
        found = SESSION_PATH.fullmatch(path)
        route = self._routes.get((method, found[2])) if found else None
        if found is None or route is None:
            listed = ", ".join(route for _, route in self._routes)
            raise GatewayError(404, f"there is no {method} {path} here; sessions have {listed}")
        return found[1], route

    def _authorize(self, name: str, headers: dict[bytes, bytes]) -> Session:
        session = self._sessions.get(name)
        if session is None:
            raise GatewayError(404, f"there is no session {name!r}, or it is closed")
        given = (headers.get(b"authorization", b"").removeprefix(b"Bearer "), headers.get(b"x-api-key", b""))
        if not any(hmac.compare_digest(key, session.api_key.encode()) for key in given):
            raise GatewayError(401, "the API key is not this session's: use OPENAI_API_KEY of the agent's environment")
        return session

    async def _read(self, receive: http_limits.Receive) -> JsonObject:
        body = await http_limits.read_body(receive, self._max_body_bytes)
        return await asyncio.to_thread(read_body, body) if len(body) > LONG_BODY_BYTES else read_body(body)

    async def _complete(self, dialect: Dialect, session: Session, body: JsonObject) -> Written:
        streams = Fields(body).get("stream", bool) is True
        if dialect is RESPONSES:
            body = session.responses.expand(body)
        reply = await result_of(self._answer(session.id, dialect.read(body)))
        written = dialect.write(body, reply)
        if dialect is RESPONSES:
            session.responses.add(body, written)
        headers = {"cache-control": "no-store"}
        if ignored := ignored_keys(body):
            self._warn(ignored)
            headers[IGNORED_HEADER] = ", ".join(ignored)
        return b"".join(dialect.events(body, reply)) if streams else written, headers

    def _warn(self, ignored: list[str]) -> None:
        if new := [key for key in ignored if key not in self._warned]:
            self._warned.update(new)
            log.warning("an agent sets %s; the run's own settings are used (worker.rollout)", ", ".join(new))

    async def _list_models(self, dialect: Dialect, session: Session, body: JsonObject) -> Written:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "r1"}
        as_anthropic = {"type": "model", "display_name": MODEL, "created_at": "1970-01-01T00:00:00Z"}
        ends = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
        return {"object": "list", "data": [{**model, **as_anthropic}], **ends}, {}

    async def _take_reward(self, dialect: Dialect, session: Session, body: JsonObject) -> Written:
        value = body.get("reward")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise Fields(body).wrong("reward", "must be a finite number")
        if self._reward is None:
            raise GatewayError(400, "this run takes no rewards of agents")
        self._reward(session.id, float(value))
        return {}, {}


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=1024)
    # Connections inherit it. asyncio sets it only on sockets of its own, and a reply would wait 40 ms for an ACK.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _to_json(value: JsonObject) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _refuse(dialect: Dialect, error: GatewayError) -> Reply:
    # Clients of both vendors send a request again after 408, 409 and 5xx unless a header says not to.
    headers = {"x-should-retry": "true" if error.status == 503 else "false"}
    if error.status in UNREAD:
        headers["connection"] = "close"
    return error.status, _to_json(dialect.write_error(error)), headers


async def result_of(future: "Future[ChatReply]") -> ChatReply:
    """Wait for a reply. Unlike with `asyncio.wrap_future`, a caller that is cancelled does not cancel the turn.

    Raises GatewayError if the turn was cancelled, because its session has ended.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: object) -> None:
        with suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    await done.wait()
    if future.cancelled():
        raise GatewayError(404, "the session is closed")
    return future.result()
