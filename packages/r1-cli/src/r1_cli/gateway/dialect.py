"""What a protocol of chat models is to the gateway: how its requests are read, and its replies and errors written."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from r1_cli.gateway.fields import Fields
from r1_cli.gateway.messages import ChatReply, ChatRequest, GatewayError
from r1_data.types import JsonObject

# Keys of requests that the run's own settings replace.
SAMPLING_KEYS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
OTHER_POLICY = "log-probs would be of another policy than the one that is trained"


@dataclass(frozen=True, slots=True)
class Dialect:
    """`write` and `events` get the body of the request. A reply's events are written once it is whole."""

    read: Callable[[JsonObject], ChatRequest]  # raises GatewayError
    write: Callable[[JsonObject, ChatReply], JsonObject]
    events: Callable[[JsonObject, ChatReply], Iterator[bytes]]  # server-sent events
    write_error: Callable[[GatewayError], JsonObject]


def ignored_keys(body: JsonObject) -> list[str]:
    return [key for key in SAMPLING_KEYS if body.get(key) is not None]


def refuse_keys(fields: Fields, reasons: dict[str, str]) -> None:
    """Raises GatewayError for the first of these keys that the request has, with the reason."""
    for key, reason in reasons.items():
        if fields.values.get(key) not in (None, False, 0, [], {}):
            raise GatewayError(400, f"{fields.where(key)} cannot be used here: {reason}", fields.where(key))


def reads_tools(fields: Fields, choice: object) -> bool:
    """Return whether the policy sees the tools, by the value of `tool_choice`. A forced call is refused."""
    if choice in (None, "auto", "none"):
        return choice != "none"
    raise fields.wrong("tool_choice", f'must be "auto" or "none" ({OTHER_POLICY})')


def sse(data: JsonObject, event: str | None = None) -> bytes:
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()
