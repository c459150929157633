"""Requests and replies in the form that all dialects of the gateway translate from and to."""

from dataclasses import dataclass
from typing import Literal

from r1_data.types import JsonObject, Message

FinishReason = Literal["stop", "length", "tool_calls"]


class GatewayError(Exception):
    """A request that cannot be answered. `param` is the key of the request that is at fault, if there is one."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        """`status` is the HTTP status: 400, 401, 404, 409, 413 or 503."""
        super().__init__(message)
        self.status, self.message, self.param = status, message, param


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request of an agent.

    Messages have the roles system, user, assistant and tool. A content is text, or parts {"type": "text", "text": str}
    and {"type": "image", "image": bytes of the file}. An assistant's message may have `tool_calls`, each {"id": str,
    "name": str, "arguments": dict}, with the text in place of a dict where it is not a JSON object. A tool's message
    has `tool_call_id`, and may have `name`.
    """

    messages: tuple[Message, ...]
    tools: tuple[JsonObject, ...] = ()  # OpenAI schemas: {"type": "function", "function": {...}}
    max_tokens: int | None = None  # None: what the run's limits leave
    stop: tuple[str, ...] = ()
    seed: int | None = None  # tells a request for another sample from a retry; the run has seeds of its own


@dataclass(frozen=True, slots=True)
class ChatCall:
    id: str
    name: str
    arguments: str  # JSON text of an object


@dataclass(frozen=True, slots=True)
class ChatReply:
    """The policy's turn. `text` is without the markup of `calls`, end tokens and the stop string that ended it."""

    id: str
    text: str
    calls: tuple[ChatCall, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    token_ids: tuple[int, ...]  # [completion_tokens], as sampled
    logprobs: tuple[float, ...]  # [completion_tokens], at the run's sampling temperature
