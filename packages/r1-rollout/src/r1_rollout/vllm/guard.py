"""Token guard of a vLLM server: every request needs the bearer token.

vLLM's own `--api-key` covers `/v1`, `/v2`, `/inference` and `/cohere`, but not the endpoints that replace weights
(`/collective_rpc`, `/update_weight_version`, …). `vllm serve --middleware r1_rollout.vllm.guard.TokenGuard` covers all.
"""

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

TOKEN_VARIABLE = "VLLM_API_KEY"  # vLLM's own name for it, so that its lock and this one take the same key

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class TokenGuard:
    """ASGI middleware that answers 401 to requests without the token of the environment."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        token = os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise RuntimeError(f"{TOKEN_VARIABLE} is not set: a server whose weights can be replaced needs a token")
        self._app = app
        self._expected = b"Bearer " + token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        if hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"a bearer token is needed"})
