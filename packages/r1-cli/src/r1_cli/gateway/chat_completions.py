"""The dialect of OpenAI's chat completions: https://platform.openai.com/docs/api-reference/chat"""

import time
from collections.abc import Iterator

from r1_cli.gateway.dialect import OTHER_POLICY, Dialect, reads_tools, refuse_keys, sse
from r1_cli.gateway.fields import Fields, function_tool, image_part, make_request, read_arguments, text_part
from r1_cli.gateway.messages import ChatReply, ChatRequest, GatewayError
from r1_data.types import JsonObject, Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
REFUSED = {
    "logit_bias": OTHER_POLICY,
    "functions": "use tools",
    "function_call": "use tools",
    "audio": "the policy writes text",
    "top_logprobs": "only the log-probs of sampled tokens are known",
    "web_search_options": "the policy has no web search",
}
ERROR_TYPES = {404: "not_found_error", 500: "server_error", 503: "server_error"}
ERROR_CODES = {401: "invalid_api_key"}


def read(body: JsonObject) -> ChatRequest:
    fields = Fields(body)
    refuse_keys(fields, REFUSED)
    if body.get("n") not in (None, 1):
        raise fields.wrong("n", "must be 1: send the request again with another seed for another sample")
    require_text(fields, "response_format")
    limits = [limit for key in ("max_tokens", "max_completion_tokens") if (limit := fields.count(key))]
    tools = [_tool(tool) for tool in fields.objects("tools")] if reads_tools(fields, body.get("tool_choice")) else []
    messages = [_message(message) for message in fields.objects("messages")]
    return make_request(messages, tools, min(limits, default=None), fields.texts("stop"), fields.get("seed", int))


def require_text(fields: Fields, name: str) -> None:
    """Raises GatewayError for a format of replies that constrains sampling, such as a JSON schema."""
    form = fields.get(name, dict) or {}
    if form.get("type", "text") != "text":
        raise fields.wrong(name, f'must be of type "text" ({OTHER_POLICY})')


def _tool(fields: Fields) -> JsonObject:
    if fields.values.get("type") != "function":
        raise fields.wrong("type", 'must be "function"')
    return function_tool(fields.object("function"), "parameters")


def _message(fields: Fields) -> Message:
    role = ROLES.get(fields.need("role", str))
    if role is None:
        raise fields.wrong("role", f"must be one of {', '.join(ROLES)}")
    message: Message = {"role": role, "content": fields.content("content", _part)}
    if calls := fields.objects("tool_calls"):
        message["tool_calls"] = [_call(call) for call in calls]
    if role == "tool":
        message["tool_call_id"] = fields.need("tool_call_id", str)
    return message


def _part(fields: Fields) -> JsonObject:
    kind = fields.values.get("type")
    if kind in ("text", "refusal"):
        return text_part(fields.need(kind, str))
    if kind == "image_url":
        return image_part(fields.object("image_url"), "url")
    raise fields.wrong("type", 'must be "text" or "image_url"')


def _call(fields: Fields) -> JsonObject:
    if fields.values.get("type", "function") != "function":
        raise fields.wrong("type", 'must be "function"')
    function = fields.object("function")
    arguments = read_arguments(function.get("arguments", str) or "")
    return {"id": fields.need("id", str), "name": function.need("name", str), "arguments": arguments}


def write(body: JsonObject, reply: ChatReply) -> JsonObject:
    choice = {
        "index": 0,
        "message": {**_message_of(reply), "refusal": None},
        "logprobs": _logprobs(body, reply),
        "finish_reason": reply.finish_reason,
    }
    return {**_head(body, reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def events(body: JsonObject, reply: ChatReply) -> Iterator[bytes]:
    head = _head(body, reply, "chat.completion.chunk")
    delta = _message_of(reply)
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    choice = {"index": 0, "delta": delta, "logprobs": _logprobs(body, reply), "finish_reason": None}
    yield sse({**head, "choices": [choice]})
    yield sse({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reply.finish_reason}]})
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        yield sse({**head, "choices": [], "usage": _usage(reply)})
    yield b"data: [DONE]\n\n"


def _head(body: JsonObject, reply: ChatReply, kind: str) -> JsonObject:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": kind,
        "created": int(time.time()),
        "model": str(body.get("model", "policy")),
    }


def _message_of(reply: ChatReply) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": reply.text or (None if reply.calls else "")}
    if reply.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
    return message


def _usage(reply: ChatReply) -> JsonObject:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def _logprobs(body: JsonObject, reply: ChatReply) -> JsonObject | None:
    return {"content": token_logprobs(reply), "refusal": None} if body.get("logprobs") else None


def token_logprobs(reply: ChatReply) -> list[JsonObject]:
    """Return the sampled tokens by id, since their texts alone do not tell them apart ("token_id:17", as vLLM does)."""
    return [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": [], "top_logprobs": []}
        for token, logprob in zip(reply.token_ids, reply.logprobs, strict=True)
    ]


def write_error(error: GatewayError) -> JsonObject:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error")
    code = ERROR_CODES.get(error.status)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}


CHAT_COMPLETIONS = Dialect(read, write, events, write_error)
