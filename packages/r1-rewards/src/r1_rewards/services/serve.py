"""Serve a verifier over HTTP: loopback unless there is a token; bounded requests; a deadline per response.

Routes: `POST /get_reward` for OpenRLHF's and LMM-R1's trainers, `POST /score` without loss, `GET /health`. Needs
`r1-rewards[serve]`.
"""

import asyncio
import hmac
import ipaddress
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from r1_rewards.services.http_limits import (
    Message,
    Receive,
    RefusedRequest,
    drain,
    header_timeout_protocol,
    read_body,
)
from r1_rewards.services.protocols import write_score
from r1_rewards.services.remote import TOKEN_VARIABLE
from r1_rewards.types import OpenVerifier, RewardInput, RewardSpecError, Score, Verifier

if TYPE_CHECKING:
    from fastapi import FastAPI

BUSY_SECONDS = 120.0  # that a request waits for others, before it is told to come back
RETRY_AFTER = 1  # seconds, as told then
STOP_SECONDS = 30  # for requests that are being served when the server is told to stop
MIN_TOKEN = 16  # characters
MARKERS = {  # after which a response begins, by chat format
    "base": "Assistant: ",
    "chatml": "<|im_start|>assistant\n",
    "gemma3": "<start_of_turn>model\n",
    "phi3": "<|assistant|>\n",
    "phi4": "<|assistant|>",
    "qwen1": "<｜Assistant｜>",
}
END_TOKENS = (
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<｜end▁of▁sentence｜>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
    "<pad>",
)

Scope = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    body_bytes: int = 32 * 2**20
    answers: int = 4096  # per request
    characters: int = 1_000_000  # per string
    requests: int = 64  # at a time; further ones wait, then are told to come back (503)


def serve(
    verifier: OpenVerifier,
    *,
    host: str = "127.0.0.1",
    port: int = 5000,
    token: str | None = None,
    limits: RequestLimits | None = None,
    response_after: str | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, finish the running requests, and close the verifier.

    Raises RewardSpecError for an address other than loopback without a token, and if FastAPI or uvicorn is missing;
    OSError or SystemExit for an address in use.
    """
    require_token(host, token)
    try:
        import uvicorn
    except ImportError as error:
        raise RewardSpecError('serving needs: pip install "r1-rewards[serve]"') from error
    limits = limits or RequestLimits()
    with verifier:
        config = uvicorn.Config(
            build_app(verifier, token=token, limits=limits, response_after=response_after),
            host=host,
            port=port,
            log_level="warning",
            server_header=False,
            http=header_timeout_protocol(),
            timeout_graceful_shutdown=STOP_SECONDS,
        )
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises it again when it is done
        try:
            uvicorn.Server(config).run()
        except KeyboardInterrupt:
            pass
        finally:
            signal.signal(signal.SIGTERM, before)


def require_token(host: str, token: str | None, variable: str = TOKEN_VARIABLE) -> None:
    if token is not None and len(token) < MIN_TOKEN:
        raise RewardSpecError(f"the token in {variable} has {len(token)} characters, it needs {MIN_TOKEN}")
    if token is None and not is_loopback(host):
        raise RewardSpecError(
            f"{host} can be reached from other machines: put a secret of at least {MIN_TOKEN} characters into the "
            f"environment variable {variable}, here and where it is asked from, or serve on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in addresses)


def build_app(
    verifier: Verifier,
    *,
    token: str | None = None,
    limits: RequestLimits | None = None,
    response_after: str | None = None,
) -> App:
    """Return the ASGI application. A response begins after the text `response_after`, or the text it names in MARKERS.

    Raises RewardSpecError if FastAPI is missing.
    """
    app, limits = _empty_app(), limits or RequestLimits()
    _add_score(app, verifier, limits)
    _add_get_reward(app, verifier, limits, MARKERS.get(response_after or "", response_after))
    return RequestGuard(app, token=token, body_bytes=limits.body_bytes, requests=limits.requests)


def _empty_app() -> "FastAPI":
    """Return an application with `/health` only, which answers a request that does not validate with what is wrong."""
    try:
        from fastapi import FastAPI
        from fastapi.exceptions import RequestValidationError
        from fastapi.responses import JSONResponse
    except ImportError as error:
        raise RewardSpecError('serving needs: pip install "r1-rewards[serve]"') from error
    app = FastAPI(title="r1-rewards", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(RequestValidationError)
    async def explain(request: object, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]  # never its "input", which is as long as the request
        where = ".".join(str(place) for place in first["loc"] if place != "body")
        return JSONResponse({"error": f"{where or 'body'}: {first['msg']}"}, 400)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def _add_score(app: "FastAPI", verifier: Verifier, limits: RequestLimits) -> None:
    from pydantic import BaseModel, ConfigDict, Field

    Text = Annotated[str, Field(max_length=limits.characters)]

    class Input(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True)
        response: Text
        ground_truth: Text
        response_length: Annotated[int, Field(ge=0)] = 0
        prompt: Text = ""
        metadata: dict[str, object] = Field(default_factory=dict)
        messages: list[dict[str, object]] = Field(default_factory=list)
        step: Annotated[int, Field(ge=0)] = 0

    class Inputs(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True)
        inputs: Annotated[list[Input], Field(max_length=limits.answers)]

    @app.post("/score")
    def score(body: Inputs) -> dict[str, object]:
        scores = verifier([RewardInput(**dict(item)) for item in body.inputs])
        return {"scores": [write_score(score) for score in scores]}


def _add_get_reward(app: "FastAPI", verifier: Verifier, limits: RequestLimits, marker: str | None) -> None:
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel, Field

    Texts = Annotated[list[Annotated[str, Field(max_length=limits.characters)]], Field(max_length=limits.answers)]

    class Queries(BaseModel):  # open: trainers add fields of their own
        query: Texts
        prompts: Texts
        labels: Texts

    @app.post("/get_reward")
    def get_reward(queries: Queries) -> object:
        lengths = [len(queries.query), len(queries.prompts), len(queries.labels)]
        if len(set(lengths)) > 1:
            return JSONResponse({"error": f"query, prompts and labels have {lengths} entries, not as many each"}, 400)
        inputs = [
            RewardInput(response_of(query, prompt, marker), label, prompt=prompt)
            for query, prompt, label in zip(queries.query, queries.prompts, queries.labels, strict=True)
        ]
        return write_rewards(verifier(inputs))


def response_of(query: str, prompt: str, marker: str | None) -> str:
    """Return the response in a query (prompt and response), without end tokens.

    It begins after the first `marker`, or else after `prompt` if the query starts with it, or else at the start. An
    empty response stays empty, so that the prompt is not scored instead.
    """
    head, found, response = query.partition(marker) if marker else (query, "", "")
    if not found:
        response = head.removeprefix(prompt)
    response = response.strip()
    while end := next((end for end in END_TOKENS if response.endswith(end)), None):
        response = response.removesuffix(end).rstrip()
    return response


def write_rewards(scores: Sequence[Score]) -> dict[str, object]:
    """Return scores in OpenRLHF's form: `rewards`, a list for every part that all scores have, and `errors`."""
    shared = set.intersection(*(set(score.parts) for score in scores)) if scores else set()
    written: dict[str, object] = {
        name: [score.parts[name] for score in scores] for name in sorted(shared - {"overall", "rewards", "errors"})
    }
    if any(score.error for score in scores):
        written["errors"] = [score.error and f"{score.error.cause}: {score.error.message}" for score in scores]
    return {"rewards": [score.value for score in scores], **written}


class RequestGuard:
    """ASGI middleware that refuses requests by token and size before parsing, and queues the others.

    Requests without a token do not use a slot; `/health` needs none. uvicorn's `limit_concurrency` would refuse instead
    of queue, and it does not limit bodies.
    """

    def __init__(self, app: App, *, token: str | None, body_bytes: int, requests: int) -> None:
        self._app = app
        self._slots = asyncio.Semaphore(requests)
        self._expected = f"Bearer {token}".encode() if token else None
        self._body_bytes = body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            await self._app(scope, receive, send)
            return
        if not self._is_authorized(dict(scope["headers"])):
            await drain(receive)
            await _refuse(send, 401, "a bearer token is needed")
            return
        try:
            async with asyncio.timeout(BUSY_SECONDS):
                await self._slots.acquire()
        except TimeoutError:
            await drain(receive)
            await _refuse(send, 503, f"busy for {BUSY_SECONDS:g} s")
            return
        try:
            await self._serve(scope, receive, send)
        finally:
            self._slots.release()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive, self._body_bytes)
        except RefusedRequest as error:
            await _refuse(send, error.status, str(error))
            return
        whole = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_whole() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, receive_whole, send)

    def _is_authorized(self, headers: dict[bytes, bytes]) -> bool:
        given = headers.get(b"authorization", b"")
        return self._expected is None or hmac.compare_digest(given, self._expected)


async def _refuse(send: Send, status: int, error: str) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close"), (b"www-authenticate", b"Bearer")]
    if status == 503:
        headers.append((b"retry-after", b"%d" % RETRY_AFTER))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b'{"error": "%s"}' % error.encode("ascii")})
