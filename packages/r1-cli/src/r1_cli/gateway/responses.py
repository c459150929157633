"""The dialect of OpenAI's responses: https://platform.openai.com/docs/api-reference/responses"""

import time
from collections.abc import Iterator, Mapping
from itertools import count

from r1_cli.gateway.chat_completions import ROLES, require_text, token_logprobs, write_error
from r1_cli.gateway.dialect import Dialect, reads_tools, refuse_keys, sse
from r1_cli.gateway.fields import Fields, function_tool, image_part, make_request, read_arguments, text_part
from r1_cli.gateway.messages import ChatCall, ChatReply, ChatRequest
from r1_data.types import JsonObject, Message

REFUSED = {
    "background": "a response is sent as soon as it is sampled",
    "conversation": "send the whole input, or previous_response_id",
    "prompt": "there are no stored prompts",
    "top_logprobs": "only the log-probs of sampled tokens are known",
}
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}  # and their fields
LOGPROBS = "message.output_text.logprobs"  # in `include`


class EarlierResponses:
    """The items of a session's responses, for `previous_response_id`."""

    def __init__(self) -> None:
        self._items: dict[str, list[object]] = {}  # by the id of a response: its input's and its own

    def expand(self, body: JsonObject) -> JsonObject:
        """Put the items of the previous response before the input. Raises GatewayError for an unknown id."""
        fields = Fields(body)
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else fields.get("input", list) or []
        if (previous := fields.get("previous_response_id", str)) is not None:
            if previous not in self._items:
                raise fields.wrong("previous_response_id", "must be of an earlier response of this session")
            items = [*self._items[previous], *items]
        return {**body, "input": items}

    def add(self, expanded: JsonObject, response: JsonObject) -> None:
        self._items[response["id"]] = [*expanded["input"], *response["output"]]


def read(body: JsonObject) -> ChatRequest:
    """`input` is a list; see `EarlierResponses.expand`."""
    fields = Fields(body)
    refuse_keys(fields, REFUSED)
    require_text(Fields(fields.get("text", dict) or {}, "text"), "format")
    tools = [_tool(tool) for tool in fields.objects("tools")] if reads_tools(fields, body.get("tool_choice")) else []
    messages: list[Message] = []
    if instructions := fields.content("instructions", _part):
        messages.append({"role": "system", "content": instructions})
    for item in fields.objects("input"):
        _add_item(messages, item)
    return make_request(messages, tools, fields.count("max_output_tokens"), ())


def _tool(fields: Fields) -> JsonObject:
    if fields.values.get("type") != "function":
        raise fields.wrong("type", 'must be "function": tools of a server do not exist here')
    return function_tool(fields, "parameters")


def _add_item(messages: list[Message], item: Fields) -> None:
    """Add an item. The text and the calls of one turn are items of their own, and become one message."""
    kind = item.values.get("type", "message")
    if kind == "message":
        role = ROLES.get(item.need("role", str))
        if role is None or role == "tool":
            raise item.wrong("role", "must be user, assistant, system or developer")
        messages.append({"role": role, "content": item.content("content", _part)})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        arguments = read_arguments(item.get("arguments", str) or "")
        call = {"id": item.need("call_id", str), "name": item.need("name", str), "arguments": arguments}
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = item.content("output", _part)
        messages.append({"role": "tool", "content": content, "tool_call_id": item.need("call_id", str)})
    elif kind != "reasoning":  # which the policy never wrote
        raise item.wrong("type", "must be message, function_call or function_call_output")


def _part(fields: Fields) -> JsonObject:
    kind = fields.values.get("type")
    if isinstance(kind, str) and kind in TEXTS:
        return text_part(fields.need(TEXTS[kind], str))
    if kind == "input_image":
        return image_part(fields, "image_url")
    raise fields.wrong("type", 'must be "input_text", "output_text" or "input_image"')


def write(body: JsonObject, reply: ChatReply) -> JsonObject:
    cut = reply.finish_reason == "length"
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": str(body.get("model", "policy")),
        "instructions": body.get("instructions"),
        "previous_response_id": body.get("previous_response_id"),
        "metadata": body.get("metadata") or {},
        "output": _items(body, reply),
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
    }


def _items(body: JsonObject, reply: ChatReply) -> list[JsonObject]:
    include = body.get("include")
    logprobs = token_logprobs(reply) if isinstance(include, list) and LOGPROBS in include else []
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    items: list[JsonObject] = []
    if reply.text or not reply.calls:
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": logprobs}
        items.append(
            {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "status": status, "content": [part]}
        )
    return [*items, *(_call_item(call) for call in reply.calls)]


def _call_item(call: ChatCall) -> JsonObject:
    return {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def events(body: JsonObject, reply: ChatReply) -> Iterator[bytes]:
    response = write(body, reply)
    begun = {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    told: list[tuple[str, Mapping[str, object]]] = [
        ("created", {"response": begun}),
        ("in_progress", {"response": begun}),
    ]
    for index, item in enumerate(response["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        empty: JsonObject = {"content": []} if "content" in item else {"arguments": ""}
        open_item = {**item, **empty, "status": "in_progress"}
        told.append(("output_item.added", {"output_index": index, "item": open_item}))
        told += _text_events(place, item) if "content" in item else _call_events(place, item)
        told.append(("output_item.done", {"output_index": index, "item": item}))
    told.append((response["status"], {"response": response}))
    for number, (name, values) in zip(count(), told, strict=False):
        kind = f"response.{name}"
        yield sse({"type": kind, "sequence_number": number, **values}, event=kind)


def _text_events(place: JsonObject, item: JsonObject) -> list[tuple[str, Mapping[str, object]]]:
    part = item["content"][0]
    place = {**place, "content_index": 0}
    logprobs = part["logprobs"]
    return [
        ("content_part.added", {**place, "part": {**part, "text": "", "logprobs": []}}),
        ("output_text.delta", {**place, "delta": part["text"], "logprobs": logprobs}),
        ("output_text.done", {**place, "text": part["text"], "logprobs": logprobs}),
        ("content_part.done", {**place, "part": part}),
    ]


def _call_events(place: JsonObject, item: JsonObject) -> list[tuple[str, Mapping[str, object]]]:
    arguments = item["arguments"]
    return [
        ("function_call_arguments.delta", {**place, "delta": arguments}),
        ("function_call_arguments.done", {**place, "name": item["name"], "arguments": arguments}),
    ]


RESPONSES = Dialect(read, write, events, write_error)
