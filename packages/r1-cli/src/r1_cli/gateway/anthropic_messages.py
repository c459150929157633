"""The dialect of Anthropic's messages: https://docs.anthropic.com/en/api/messages"""

import json
from collections.abc import Iterator

from r1_cli.gateway.dialect import OTHER_POLICY, Dialect, reads_tools, refuse_keys, sse
from r1_cli.gateway.fields import Fields, decode_base64, function_tool, image_part, make_request, text_part
from r1_cli.gateway.messages import ChatReply, ChatRequest, GatewayError
from r1_data.turns.conversation import join_texts
from r1_data.types import JsonObject, Message

REFUSED = {"mcp_servers": "the gateway calls no servers", "container": "the policy has no container"}
LEFT_OUT = ("thinking", "redacted_thinking")  # blocks of an assistant, which the policy never wrote
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 500: "api_error",
    503: "overloaded_error",
}  # fmt: skip


def read(body: JsonObject) -> ChatRequest:
    fields = Fields(body)
    refuse_keys(fields, REFUSED)
    if form := (fields.get("output_config", dict) or {}).get("format"):
        raise GatewayError(400, f"output_config.format must be left out ({OTHER_POLICY}), found {form!r:.80}")
    choice = (fields.get("tool_choice", dict) or {}).get("type")
    tools = [_tool(tool) for tool in fields.objects("tools")] if reads_tools(fields, choice) else []
    system = fields.content("system", _part)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for message in fields.objects("messages"):
        messages += _messages(message)
    if messages and messages[-1]["role"] == "assistant":
        raise GatewayError(400, "the last message must be the user's: the policy begins its turns itself", "messages")
    return make_request(messages, tools, fields.count("max_tokens"), fields.texts("stop_sequences"))


def _tool(fields: Fields) -> JsonObject:
    if fields.values.get("type", "custom") != "custom":
        raise fields.wrong("type", 'must be "custom": tools of a server do not exist here')
    return function_tool(fields, "input_schema")


def _messages(fields: Fields) -> list[Message]:
    """Return a message per result of a tool, and one for the blocks between them."""
    role = fields.need("role", str)
    if role not in ("user", "assistant", "system"):
        raise fields.wrong("role", 'must be "user" or "assistant"')
    if not isinstance(fields.values.get("content"), list):
        return [{"role": role, "content": fields.content("content", _part)}]
    blocks = [block for block in fields.objects("content") if block.values.get("type") not in LEFT_OUT]
    return [_assistant(blocks)] if role == "assistant" else list(_user(role, blocks))


def _assistant(blocks: list[Fields]) -> Message:
    calls = [block for block in blocks if block.values.get("type") == "tool_use"]
    texts = [_part(block) for block in blocks if block not in calls]
    message: Message = {"role": "assistant", "content": join_texts(texts)}
    if calls:
        message["tool_calls"] = [
            {"id": call.need("id", str), "name": call.need("name", str), "arguments": call.need("input", dict)}
            for call in calls
        ]
    return message


def _user(role: str, blocks: list[Fields]) -> Iterator[Message]:
    parts: list[JsonObject] = []
    for block in blocks:
        if block.values.get("type") != "tool_result":
            parts.append(_part(block))
            continue
        if parts:
            yield {"role": role, "content": join_texts(parts)}
            parts = []
        yield {
            "role": "tool",
            "content": block.content("content", _part),
            "tool_call_id": block.need("tool_use_id", str),
        }
    if parts or not blocks:
        yield {"role": role, "content": join_texts(parts)}


def _part(fields: Fields) -> JsonObject:
    kind = fields.values.get("type")
    if kind == "text":
        return text_part(fields.need("text", str))
    if kind != "image":
        raise fields.wrong("type", 'must be "text" or "image"')
    source = fields.object("source")
    if source.values.get("type") == "base64":
        return {"type": "image", "image": decode_base64(source.need("data", str), source.where("data"))}
    return image_part(source, "url")


def write(body: JsonObject, reply: ChatReply) -> JsonObject:
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": str(body.get("model", "policy")),
        "content": _blocks(reply),
        "stop_reason": STOP_REASONS[reply.finish_reason],
        "stop_sequence": None,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
    }


def _blocks(reply: ChatReply) -> list[JsonObject]:
    texts: list[JsonObject] = [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in reply.calls
    ]
    return [*texts, *calls]


def events(body: JsonObject, reply: ChatReply) -> Iterator[bytes]:
    whole = write(body, reply)
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": 0}
    yield _event("message_start", message={**whole, "content": [], "stop_reason": None, "usage": usage})
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            start, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            start = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _event("content_block_start", index=index, content_block=start)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    stop = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", delta=stop, usage={"output_tokens": reply.completion_tokens})
    yield _event("message_stop")


def _event(kind: str, **values: object) -> bytes:
    return sse({"type": kind, **values}, event=kind)


def write_error(error: GatewayError) -> JsonObject:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


ANTHROPIC_MESSAGES = Dialect(read, write, events, write_error)
