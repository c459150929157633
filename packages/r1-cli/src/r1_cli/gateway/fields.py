"""Read the fields of requests. An error is a GatewayError of status 400 that names the field."""

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from r1_cli.gateway.messages import ChatRequest, GatewayError
from r1_data.turns.calls.json_values import BrokenJson, read_text
from r1_data.turns.conversation import join_texts
from r1_data.turns.observations import clean_text
from r1_data.types import JsonObject, Message

KINDS: dict[type, str] = {
    str: "text", int: "a whole number", bool: "true or false", dict: "an object", list: "a list",
}  # fmt: skip
SHOWN = 80  # characters of a value in an error

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of a request's JSON, and its place there ("messages[2]"; "" for the body)."""

    values: JsonObject
    path: str = ""

    def where(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str, kind: type[T]) -> T | None:
        """Return a field of exactly that type, None if it is missing or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) is not kind:
            raise self.wrong(name, f"must be {KINDS[kind]}")
        return value

    def need(self, name: str, kind: type[T]) -> T:
        value = self.get(name, kind)
        if value is None:
            raise self.wrong(name, f"must be {KINDS[kind]}")
        return value

    def count(self, name: str) -> int | None:
        value = self.get(name, int)
        if value is not None and value < 1:
            raise self.wrong(name, "must be at least 1")
        return value

    def objects(self, name: str) -> "list[Fields]":
        """Return the objects of a list; an empty list if the field is missing."""
        values = self.get(name, list) or []
        listed = [Fields(value, f"{self.where(name)}[{index}]") for index, value in enumerate(values)]
        for one in listed:
            if not isinstance(one.values, dict):
                raise GatewayError(400, f"{one.path} must be an object, found {brief(one.values)}", one.path)
        return listed

    def object(self, name: str) -> "Fields":
        return Fields(self.need(name, dict), self.where(name))

    def content(self, name: str, read_part: Callable[["Fields"], JsonObject]) -> str | list[JsonObject]:
        """Return text, or parts where one is a picture. Neighbouring texts are joined; "" if the field is missing."""
        value = self.values.get(name)
        if value is None or isinstance(value, str):
            return clean_text(value or "")
        if not isinstance(value, list):
            raise self.wrong(name, "must be text or a list of parts")
        return join_texts([read_part(part) for part in self.objects(name)])

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a text or a list of texts, without empty ones."""
        value = self.values.get(name)
        listed = [value] if isinstance(value, str) else self.get(name, list) or []
        if not all(isinstance(one, str) for one in listed):
            raise self.wrong(name, "must be text or a list of texts")
        return tuple(one for one in listed if one)

    def wrong(self, name: str, problem: str) -> GatewayError:
        where = self.where(name)
        return GatewayError(400, f"{where} {problem}, found {brief(self.values.get(name))}", where)


def brief(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def read_body(body: bytes) -> JsonObject:
    """Raises GatewayError if the body is not one JSON object."""
    try:
        value = read_text(body.decode())
    except (UnicodeDecodeError, BrokenJson) as error:
        raise GatewayError(400, f"the body cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise GatewayError(400, f"the body must be a JSON object, found {brief(value)}")
    return value


def text_part(text: str) -> JsonObject:
    return {"type": "text", "text": clean_text(text)}


def image_part(fields: Fields, name: str) -> JsonObject:
    """Read a picture of a data URL. Other URLs are refused: the gateway fetches nothing."""
    url = fields.need(name, str)
    head, comma, data = url.partition(",")
    if not comma or not head.lower().startswith("data:") or not head.lower().endswith(";base64"):
        raise GatewayError(
            400,
            f"{fields.where(name)} must be a data URL (data:image/png;base64,...); this server fetches no pictures, "
            f"found {brief(url)}",
            fields.where(name),
        )
    return {"type": "image", "image": decode_base64(data, fields.where(name))}


def decode_base64(data: str, where: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise GatewayError(400, f"{where} is not base64: {error}", where) from error


def read_arguments(text: str) -> "JsonObject | str":
    """Return the arguments of a call, or the text itself if it is not a JSON object."""
    try:
        value = read_text(text or "{}")
    except BrokenJson:
        return text
    return value if isinstance(value, dict) else text


def function_tool(fields: Fields, parameters: str) -> JsonObject:
    """Return a tool in OpenAI's nested form. `parameters` is the name of the field with its JSON schema."""
    function: JsonObject = {"name": fields.need("name", str)}
    if description := fields.get("description", str):
        function["description"] = clean_text(description)
    function["parameters"] = fields.get(parameters, dict) or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def make_request(
    messages: Sequence[Message],
    tools: Sequence[JsonObject],
    max_tokens: int | None,
    stop: tuple[str, ...],
    seed: int | None = None,
) -> ChatRequest:
    """Give results of tools the names of their calls, which some chat templates write. Refuse an empty conversation."""
    if not messages:
        raise GatewayError(400, "there are no messages", "messages")
    names: dict[str, str] = {}
    named: list[Message] = []
    for message in messages:
        names |= {call["id"]: call["name"] for call in message.get("tool_calls", ())}
        name = names.get(message.get("tool_call_id", ""))
        named.append({**message, "name": name} if name and "name" not in message else message)
    return ChatRequest(tuple(named), tuple(tools), max_tokens, stop, seed)
