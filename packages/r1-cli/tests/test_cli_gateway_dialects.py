"""Dialects of the gateway: requests of three protocols become the same form, replies are written back. No server."""

import base64
import json

import pytest

from r1_cli.gateway.anthropic_messages import ANTHROPIC_MESSAGES
from r1_cli.gateway.chat_completions import CHAT_COMPLETIONS
from r1_cli.gateway.dialect import ignored_keys
from r1_cli.gateway.fields import read_body
from r1_cli.gateway.messages import ChatCall, ChatReply, ChatRequest, GatewayError
from r1_cli.gateway.responses import RESPONSES, EarlierResponses

PNG = b"\x89PNG not decoded here"
DATA = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{DATA}"
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}}
PICTURE = {"type": "image", "image": PNG}
CONVERSATION = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is this?"}, PICTURE]},
    {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "c1", "name": "look", "arguments": {"x": 1}}]},
    {"role": "tool", "content": [PICTURE, {"type": "text", "text": "a part"}], "tool_call_id": "c1", "name": "look"},
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": "Sure?"},
)
CHAT = {
    "model": "m",
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is "},
                {"type": "text", "text": "this?"},
                {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
            ],
        },
        {
            "role": "assistant",
            "content": "I look.",
            "refusal": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}],
        },
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "a part"}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
        {"role": "user", "content": "Sure?", "name": "Ann"},
    ],
    "tools": [{"type": "function", "function": {**TOOL["function"], "strict": True}}],
    "tool_choice": "auto",
    "max_completion_tokens": 9,
    "max_tokens": 12,
    "stop": ["END", ""],
    "response_format": {"type": "text"},
    "n": 1,
    "parallel_tool_calls": False,
    "logit_bias": {},
}
ANTHROPIC = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is this?"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [
                        {"type": "image", "source": {"type": "url", "url": URL}},
                        {"type": "text", "text": "a part"},
                    ],
                }
            ],
        },
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Sure?"},
    ],
    "tools": [{"name": "look", "description": "Look.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "stop_sequences": ["END"],
}
ITEMS = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "What is this?"},
                {"type": "input_image", "image_url": URL, "detail": "auto"},
            ],
        },
        {"type": "reasoning", "id": "r", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": '{"x": 1}'},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "a part"}],
        },
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Sure?"},
    ],
    "tools": [{"type": "function", "name": "look", "description": "Look.", "parameters": SCHEMA, "strict": True}],
    "max_output_tokens": 9,
    "text": {"format": {"type": "text"}, "verbosity": "low"},
}
CASES = {
    "chat": (CHAT_COMPLETIONS, CHAT),
    "anthropic": (ANTHROPIC_MESSAGES, ANTHROPIC),
    "responses": (RESPONSES, ITEMS),
}
TURN = ChatReply("7", "I look.", (ChatCall("c1", "look", '{"x": 1}'),), "tool_calls", 20, 2, (5, 6), (-0.5, -1.0))
ANSWER = ChatReply("8", "A cat", (), "length", 30, 1, (5,), (-0.5,))


@pytest.mark.parametrize("name", CASES)
def test_the_same_conversation_is_read_alike_from_each_protocol(name):
    dialect, body = CASES[name]
    stop = () if name == "responses" else ("END",)
    assert dialect.read(body) == ChatRequest(CONVERSATION, (TOOL,), 9, stop)


def test_a_tool_choice_of_none_hides_the_tools():
    assert CHAT_COMPLETIONS.read({**CHAT, "tool_choice": "none"}).tools == ()
    assert ANTHROPIC_MESSAGES.read({**ANTHROPIC, "tool_choice": {"type": "none"}}).tools == ()
    assert RESPONSES.read({**ITEMS, "tool_choice": "none"}).tools == ()


def user(content):
    return {"messages": [{"role": "user", "content": content}]}


def called(arguments):
    call = {"id": "c", "function": {"name": "look", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}


def test_arguments_that_are_no_object_stay_text():
    read = [CHAT_COMPLETIONS.read(called(text)).messages[0] for text in ("", '{"x": ', "[1]", '{"a": 1}')]
    assert [message["tool_calls"][0]["arguments"] for message in read] == [{}, '{"x": ', "[1]", {"a": 1}]
    assert read[0]["content"] == ""


def test_text_that_no_tokenizer_takes_is_replaced():
    assert CHAT_COMPLETIONS.read(user("a\ud800b\0")).messages[0]["content"] == "a?b?"
    assert CHAT_COMPLETIONS.read(user([{"type": "text", "text": "\udfff"}])).messages[0]["content"] == "?"


def test_results_of_tools_and_text_of_one_anthropic_message_are_messages_of_their_own():
    results = [{"type": "tool_result", "tool_use_id": name, "content": name} for name in "ab"]
    body = {"messages": [{"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]}]}
    assert ANTHROPIC_MESSAGES.read(body).messages == (
        {"role": "tool", "content": "a", "tool_call_id": "a"},
        {"role": "tool", "content": "b", "tool_call_id": "b"},
        {"role": "user", "content": "Go on."},
    )


def test_calls_without_a_text_are_one_message():
    calls = [{"type": "function_call", "call_id": i, "name": "look", "arguments": "{}"} for i in "ab"]
    messages = RESPONSES.read({"input": [{"role": "user", "content": "?"}, *calls]}).messages
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["a", "b"]
    assert messages[1]["content"] == ""


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("chat", {"n": 2}, "n must be 1"),
        ("chat", {"logit_bias": {"5": 1}}, "logit_bias cannot be used here: log-probs would be of another policy"),
        ("chat", {"tool_choice": "required"}, 'tool_choice must be "auto" or "none"'),
        ("chat", {"tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice must be"),
        ("chat", {"response_format": {"type": "json_object"}}, 'response_format must be of type "text"'),
        ("chat", {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format must be"),
        ("chat", {"functions": [{}]}, "functions cannot be used here: use tools"),
        ("chat", {"top_logprobs": 2}, "top_logprobs cannot be used here"),
        ("chat", {"max_tokens": 0}, "max_tokens must be at least 1, found 0"),
        ("chat", {"max_tokens": True}, "max_tokens must be a whole number, found true"),
        ("chat", {"max_tokens": 1.5}, "max_tokens must be a whole number, found 1.5"),
        ("chat", {"stop": [1]}, "stop must be text or a list of texts"),
        ("chat", {"messages": []}, "there are no messages"),
        ("chat", {"messages": "hello"}, 'messages must be a list, found "hello"'),
        ("chat", {"messages": [1]}, "messages[0] must be an object, found 1"),
        ("chat", {"messages": [{"content": "x"}]}, "messages[0].role must be text, found null"),
        ("chat", {"messages": [{"role": "function"}]}, "messages[0].role must be one of"),
        ("chat", {"messages": [{"role": "tool", "content": ""}]}, "messages[0].tool_call_id must be text"),
        ("chat", user(5), "messages[0].content must be text or a list of parts"),
        ("chat", user([{"type": "input_audio"}]), "messages[0].content[0].type must be"),
        ("chat", user([{"type": "image_url", "image_url": URL}]), "messages[0].content[0].image_url must be an object"),
        ("chat", {"tools": [{"type": "custom"}]}, 'tools[0].type must be "function"'),
        ("chat", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name must be text"),
        ("anthropic", {"tool_choice": {"type": "any"}}, 'tool_choice must be "auto" or "none"'),
        ("anthropic", {"tools": [{"type": "web_search_20250305", "name": "s"}]}, 'tools[0].type must be "custom"'),
        ("anthropic", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format must be left out"),
        ("anthropic", {"messages": [{"role": "assistant", "content": "A"}]}, "the last message must be the user's"),
        ("anthropic", user([{"type": "document"}]), 'messages[0].content[0].type must be "text" or "image"'),
        ("responses", {"background": True}, "background cannot be used here"),
        ("responses", {"text": {"format": {"type": "json_schema"}}}, "text.format must be"),
        ("responses", {"tools": [{"type": "web_search"}]}, 'tools[0].type must be "function"'),
        ("responses", {"input": [{"type": "item_reference", "id": "1"}]}, "input[0].type must be message"),
        ("responses", {"input": [{"role": "tool", "content": ""}]}, "input[0].role must be user"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_field(name, change, told):
    dialect, body = CASES[name]
    with pytest.raises(GatewayError) as caught:
        dialect.read({**body, **change})
    assert caught.value.status == 400
    assert told in caught.value.message


@pytest.mark.parametrize(
    "url",
    ["https://example.com/a.png", "file:///etc/passwd", "data:image/png,raw", "data:image/png;base64,%%", "a.png"],
)
def test_only_data_urls_are_pictures(url):
    cases = [
        (CHAT_COMPLETIONS, user([{"type": "image_url", "image_url": {"url": url}}])),
        (ANTHROPIC_MESSAGES, user([{"type": "image", "source": {"type": "url", "url": url}}])),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}),
    ]
    for dialect, body in cases:
        with pytest.raises(GatewayError, match=r"must be a data URL|is not base64") as caught:
            dialect.read(body)
        assert caught.value.param.endswith("url")


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"a": NaN}', b"\xff{}", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(body):
    with pytest.raises(GatewayError, match="the body"):
        read_body(body)


def test_sampling_keys_that_the_run_replaces_are_named():
    assert ignored_keys({"temperature": 0.0, "top_p": None, "seed": 1, "stop": "x"}) == ["temperature", "seed"]


def test_replies_of_chat_completions():
    written = CHAT_COMPLETIONS.write({"model": "m", "logprobs": True}, TURN)
    choice = written["choices"][0]
    assert (written["object"], written["model"], choice["finish_reason"]) == ("chat.completion", "m", "tool_calls")
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
    assert choice["message"] == {"role": "assistant", "content": "I look.", "tool_calls": [call], "refusal": None}
    assert [token["token"] for token in choice["logprobs"]["content"]] == ["token_id:5", "token_id:6"]
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == [-0.5, -1.0]
    assert written["usage"] == {"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22}
    assert CHAT_COMPLETIONS.write({}, ANSWER)["choices"][0]["logprobs"] is None


def parse(events):
    """Return the JSON of server-sent events, after checking their form."""
    blocks = b"".join(events).decode().split("\n\n")
    assert blocks.pop() == ""
    lines = [block.split("\n") for block in blocks]
    parsed = [json.loads(found[-1].removeprefix("data: ")) for found in lines if found[-1] != "data: [DONE]"]
    named = [found[0].removeprefix("event: ") for found in lines if len(found) == 2]
    assert named == [event["type"] for event in parsed if "type" in event]
    return parsed


def test_events_of_chat_completions():
    body = {"stream": True, "stream_options": {"include_usage": True}}
    first, last, usage = parse(CHAT_COMPLETIONS.events(body, TURN))
    assert first["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "tool_calls")
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 22)
    assert len(parse(CHAT_COMPLETIONS.events({"stream": True}, TURN))) == 2
    assert list(CHAT_COMPLETIONS.events({}, TURN))[-1] == b"data: [DONE]\n\n"


def test_replies_and_events_of_anthropic_messages():
    written = ANTHROPIC_MESSAGES.write({"model": "m"}, TURN)
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {"x": 1}}
    assert written["content"] == [{"type": "text", "text": "I look."}, call]
    assert (written["stop_reason"], written["usage"]) == ("tool_use", {"input_tokens": 20, "output_tokens": 2})
    assert ANTHROPIC_MESSAGES.write({}, ANSWER)["stop_reason"] == "max_tokens"
    told = parse(ANTHROPIC_MESSAGES.events({}, TURN))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [one["type"] for one in told] == ["message_start", *block, *block, "message_delta", "message_stop"]
    assert told[4]["content_block"] == {**call, "input": {}}
    assert json.loads(told[5]["delta"]["partial_json"]) == {"x": 1}


def test_replies_and_events_of_responses():
    written = RESPONSES.write({"model": "m", "include": ["message.output_text.logprobs"]}, TURN)
    text, call = written["output"]
    assert (text["content"][0]["text"], len(text["content"][0]["logprobs"])) == ("I look.", 2)
    assert (call["call_id"], call["arguments"], written["status"]) == ("c1", '{"x": 1}', "completed")
    cut = RESPONSES.write({}, ANSWER)
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    told = parse(RESPONSES.events({}, TURN))
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    assert told[-1]["type"] == "response.completed"
    assert told[-1]["response"]["output"] == RESPONSES.write({}, TURN)["output"]
    assert parse(RESPONSES.events({}, ANSWER))[-1]["type"] == "response.incomplete"


def test_a_response_goes_on_from_an_earlier_one():
    earlier = EarlierResponses()
    first = earlier.expand({"input": "One?"})
    earlier.add(first, RESPONSES.write(first, TURN))
    result = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    second = earlier.expand({"input": [result], "previous_response_id": "resp_7", "instructions": "Be brief."})
    assert [message["role"] for message in RESPONSES.read(second).messages] == ["system", "user", "assistant", "tool"]
    earlier.add(second, RESPONSES.write(second, ANSWER))
    third = earlier.expand({"input": "Three?", "previous_response_id": "resp_8"})
    assert [message["content"] for message in RESPONSES.read(third).messages] == [
        "One?", "I look.", "2", "A cat", "Three?",
    ]  # fmt: skip
    with pytest.raises(GatewayError, match="previous_response_id must be of an earlier response of this session"):
        earlier.expand({"input": "x", "previous_response_id": "resp_9"})


def test_errors_have_the_form_of_their_protocol():
    error = GatewayError(401, "no", None)
    told = {"message": "no", "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
    assert CHAT_COMPLETIONS.write_error(error) == RESPONSES.write_error(error) == {"error": told}
    assert ANTHROPIC_MESSAGES.write_error(error) == {
        "type": "error",
        "error": {"type": "authentication_error", "message": "no"},
    }
