"""Tests of tool calls: each format, the checks against schemas, and broken calls with errors that a policy can read."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from r1_data.turns.calls import FORMATS
from r1_data.turns.calls.parse import parse_calls
from r1_data.turns.calls.types import signatures

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {
                "x": {"type": "integer"},
                "name": {"type": "string"},
                "scale": {"type": "number"},
                "deep": {"type": "boolean"},
                "mode": {"type": "string", "enum": ["fast", "slow"]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "box": {"$ref": "#/$defs/Box"},
                "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["x"],
            "$defs": {
                "Box": {"type": "object", "properties": {"w": {"type": "integer"}}, "required": ["w"]},
            },
        },
    },
}
OTHER = {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}}
ARGUMENTS = {
    "x": 3,
    "name": 'a "b"\n</c>',
    "scale": 0.5,
    "deep": True,
    "tags": ["p", "q"],
    "box": {"w": 1},
    "limit": None,
}


def parse(name: str, text: str, **options: Any) -> list[Any]:
    return parse_calls(FORMATS[name], text, signatures([TOOL, OTHER]), **options)


def write(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Write calls as a policy does."""
    if name == "hermes":
        shown = [f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls]
        return "\n".join(shown)
    if name == "llama3_json":
        return "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)
    if name == "pythonic":
        written = [
            (tool, ", ".join(f"{key}={value!r}" for key, value in arguments.items())) for tool, arguments in calls
        ]
        return f"[{', '.join(f'{tool}({arguments})' for tool, arguments in written)}]"
    text = ""
    for tool, arguments in calls:
        text += f"<tool_call>\n<function={tool}>\n"
        for key, value in arguments.items():
            shown = value if isinstance(value, str) else json.dumps(value)
            text += f"<parameter={key}>\n{shown}\n</parameter>\n"
        text += "</function>\n</tool_call>\n"
    return text


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_back_with_the_types_of_the_schema(name):
    calls = parse(name, write(name, [("look", ARGUMENTS), ("search", {"query": "cats"})]))
    assert [(call.name, call.arguments, call.error) for call in calls] == [
        ("look", ARGUMENTS, ""),
        ("search", {"query": "cats"}, ""),
    ]
    assert [call.id for call in calls] == ["call00000", "call00001"]


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.text(), number=st.integers(), flag=st.booleans())
def test_any_argument_survives_the_format(name, text, number, flag):
    if name in ("qwen3_coder", "pythonic"):  # tags end a value; Python source has neither half surrogates nor zeros
        text = text.replace("<", "").encode("utf-8", "ignore").decode().replace("\0", "")
    arguments = {"x": number, "name": text, "deep": flag}
    (call,) = parse(name, write(name, [("look", arguments)]))
    assert (call.arguments, call.error) == (arguments, "")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text", ["", "The answer is 3.", '{"answer": 3}', "[1, 2]", "[a](b)", "{", "[", "<tool>", "look(3)"]
)
def test_text_without_a_call_has_none(name, text):
    assert parse(name, text) == []


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_text_may_stand_around_calls_in_tags(name):
    call = write(name, [("look", {"x": 3})])
    (found,) = parse(name, f"I look closer.\n{call}\nNow I wait.")
    assert (found.arguments, found.error) == ({"x": 3}, "")


WRONG = [
    ({}, "look: parameter x is missing"),
    ({"x": "left"}, 'look: x must be an integer, found "left"'),
    ({"x": True}, "look: x must be an integer, found true"),
    ({"x": 1.5}, "look: x must be an integer, found 1.5"),
    (
        {"x": 1, "z": 2},
        "look: unknown parameter z; the parameters are x, name, scale, deep, mode, tags, box, limit, note",
    ),
    ({"x": 1, "mode": "odd"}, 'look: mode must be one of "fast", "slow", found "odd"'),
    ({"x": 1, "tags": ["a", 2]}, "look: tags[1] must be a string, found 2"),
    ({"x": 1, "box": {}}, "look: parameter box.w is missing"),
    ({"x": 1, "box": {"w": "a"}}, 'look: box.w must be an integer, found "a"'),
    ({"x": 1, "limit": "many"}, 'look: limit must be an integer, found "many" or limit must be null, found "many"'),
    ({"x": 1, "deep": "yes"}, 'look: deep must be a boolean, found "yes"'),
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("arguments", "error"), WRONG)
def test_an_error_names_the_parameter_and_what_was_found(name, arguments, error):
    (call,) = parse(name, write(name, [("look", arguments)]))
    assert call.error == error
    assert call.name == "look"


@pytest.mark.parametrize("name", FORMATS)
def test_an_unknown_tool_is_named_with_those_that_there_are(name):
    (call,) = parse(name, write(name, [("peek", {"x": 1})]))
    assert call.error == 'unknown tool "peek"; the tools are: look, search'


@pytest.mark.parametrize("name", FORMATS)
def test_a_whole_number_is_an_integer_however_it_is_written(name):
    (call,) = parse(name, write(name, [("look", {"x": 3.0, "scale": 2})]))
    assert call.arguments == {"x": 3, "scale": 2}
    assert type(call.arguments["x"]) is int


BROKEN = [
    ("hermes", '<tool_call>{"name": "look", "arg', "not closed by </tool_call>"),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"x": 3}}', "not closed by </tool_call>"),
    ("hermes", '<tool_call>{"name": "look", "arg</tool_call>', "not valid JSON: Unterm"),
    ("hermes", "<tool_call>look(3)</tool_call>", "not valid JSON: Expecting value at character 1"),
    ("hermes", '<tool_call>{"name": "look"} or</tool_call>', "text between the JSON object and </tool_call>"),
    ("hermes", "<tool_call>[1]</tool_call>", "must be a JSON object"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'has no "name"'),
    ("hermes", '<tool_call>{"name": "look", "arguments": [3]}</tool_call>', "look: the arguments must be a JSON"),
    ("hermes", '<tool_call>{"name": "look", "arguments": "{"}</tool_call>', "look: the arguments are not valid JSON"),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"x": NaN}}</tool_call>', "NaN is no JSON number"),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"x": 1e999}}</tool_call>', "1e999 is too large"),
    ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "nested too deeply"),
    ("llama3_json", '{"name": "look", "parameters": {"x": ', "not valid JSON"),
    ("llama3_json", '{"name": "look", "parameters": 3}', "look: the arguments must be a JSON object"),
    ("pythonic", "[look(x=3", "not a Python list of calls"),
    ("pythonic", "[look(3)]", "look: every argument needs its name"),
    ("pythonic", "[look(**{'x': 3})]", "look: every argument needs its name"),
    ("pythonic", "[look(x=open('/etc/passwd'))]", "look: x must be a literal"),
    ("pythonic", "[look(x=1e999)]", "look: x must be a literal"),
    ("pythonic", "[look(x=3), 4]", "must hold calls only"),
    ("pythonic", f"[look(x={'(' * 300}", "not a Python list of calls"),
    ("pythonic", f"[look(name='{'a' * 2**17}')]", "characters, more than 65,536"),
    ("qwen3_coder", "<tool_call>\n<function=look>\n<parameter=x>\n3", "look: parameter x is not closed by"),
    ("qwen3_coder", "<tool_call><function=look><parameter=x>3</parameter></function>", "not closed by </tool_call>"),
    ("qwen3_coder", "<tool_call><function=look></tool_call>", "look: the call is not closed by </function>"),
    ("qwen3_coder", "<tool_call><function=look><parameter=x 3</parameter></function></tool_call>", "<parameter=NAME>"),
    ("qwen3_coder", "<tool_call><function=lo ok></function></tool_call>", "<function=NAME>, with a name without"),
    ("qwen3_coder", "<tool_call>look(3)</tool_call>", "must begin with <function=NAME>"),
    ("qwen3_coder", write("qwen3_coder", [("look", {"x": 1})]).replace(
        "</function>", "<parameter=x>\n2\n</parameter></function>"), "parameter x is given twice"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "error"), BROKEN)
def test_a_broken_call_says_what_is_wrong(name, text, error):
    found = parse(name, text)
    assert any(part in found[-1].error for part in error.split("|")), found
    assert len(found[-1].error) < 300


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_calls_behind_a_broken_one_are_read(name):
    broken = "<tool_call>\nlook\n</tool_call>\n"
    first, second = parse(name, broken + write(name, [("look", {"x": 3})]))
    assert first.error
    assert (second.arguments, second.error) == ({"x": 3}, "")


def test_so_many_calls_are_read_and_no_more():
    assert len(parse("hermes", write("hermes", [("look", {"x": 1})] * 200))) == 128


def test_the_second_of_two_equal_ids_is_an_error():
    call = '<tool_call>{"name": "look", "id": "a", "arguments": {"x": 1}}</tool_call>'
    first, second = parse("hermes", call * 2)
    assert (first.id, first.error) == ("a", "")
    assert second.error == 'look: the id "a" belongs to another call of this turn'


def test_arguments_may_be_json_text_and_strings_may_span_lines():
    (call,) = parse("hermes", '<tool_call>{"name": "look", "arguments": "{\\"x\\": 3}"}</tool_call>')
    assert call.arguments == {"x": 3}
    (call,) = parse("hermes", '<tool_call>{"name": "search", "arguments": {"query": "a\nb"}}</tool_call>')
    assert call.arguments == {"query": "a\nb"}


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_a_call_inside_think_is_an_error_unless_one_follows(name):
    call = write(name, [("look", {"x": 3})])
    for text, thinking in ((f"<think>Hm. {call}", False), (f"<think>{call}</think>Done.", False), (call, True)):
        (found,) = parse(name, text, thinking=thinking)
        assert (found.name, found.arguments) == ("look", {"x": 3})
        assert "inside <think>" in found.error
    (found,) = parse(name, f"<think>I could write {call}</think>\n{call}")
    assert found.error == ""
    (found,) = parse(name, f"{call}</think>{call}", thinking=True)
    assert found.error == ""


def test_calls_that_begin_a_turn_are_found_behind_thoughts_and_tags():
    (call,) = parse("llama3_json", '<think>x</think>\n<|python_tag|>{"name": "look", "parameters": {"x": 3}}')
    assert call.arguments == {"x": 3}
    (call,) = parse("pythonic", "Let me see.<|tool_call_start|>[look(x=-3)]<|tool_call_end|>")
    assert call.arguments == {"x": -3}
    (call,) = parse("pythonic", "[look(x=3, deep=true, limit=null)]")
    assert call.arguments == {"x": 3, "deep": True, "limit": None}


def test_tags_that_a_value_quotes_do_not_end_it():
    value = "a </parameter> b\n<function=look> </function> c"
    (call,) = parse("qwen3_coder", write("qwen3_coder", [("look", {"x": 1, "name": value})]))
    assert call.arguments["name"] == value
    (call,) = parse("hermes", write("hermes", [("look", {"x": 1, "name": "</tool_call><tool_call>"})]))
    assert call.arguments["name"] == "</tool_call><tool_call>"


def test_text_values_become_what_the_schema_asks_for():
    values = {"x": "\n 3 \n", "deep": "True", "note": "None", "name": "12"}
    text = "".join(f"<parameter={name}>{value}</parameter>" for name, value in values.items())
    (call,) = parse("qwen3_coder", f"<function=look>{text}</function>")
    assert call.arguments == {"x": 3, "deep": True, "note": None, "name": "12"}


def test_true_is_not_the_number_one_of_an_enum():
    tools = signatures([{"name": "any", "parameters": {"properties": {"a": {"enum": [1, "x"]}}}}])
    (call,) = parse_calls(FORMATS["hermes"], '<tool_call>{"name": "any", "arguments": {"a": true}}</tool_call>', tools)
    assert call.error == 'any: a must be one of 1, "x", found true'


def test_a_schema_that_names_no_parameters_and_one_that_refers_to_itself():
    free = {"name": "any", "parameters": {"type": "object", "additionalProperties": {"type": "integer"}}}
    circle = {"name": "loop", "parameters": {"properties": {"a": {"$ref": "#/properties/a"}}}}
    tools = signatures([free, circle, {"name": "none"}])

    def one(call: str) -> Any:
        return parse_calls(FORMATS["hermes"], f"<tool_call>{call}</tool_call>", tools)[0]

    assert one('{"name": "any", "arguments": {"b": 1}}').error == ""
    assert one('{"name": "any", "arguments": {"b": "c"}}').error == 'any: b must be an integer, found "c"'
    assert one('{"name": "loop", "arguments": {"a": 1}}').error == ""
    assert one('{"name": "none", "arguments": {"a": 1}}').error == "none: unknown parameter a; there are no parameters"


@pytest.mark.parametrize("name", FORMATS)
@given(pieces=st.lists(st.sampled_from([
    "<tool_call>", "</tool_call>", "<function=look>", "</function>", "<parameter=x>", "</parameter>", '{"name": "look"',
    '"arguments"', "[look(", "x=", ")]", "{", "}", "\n", "3", '"', "'", "<think>", "</think>", "\\", "\0", "\ud800",
])))  # fmt: skip
def test_no_text_raises(name, pieces):
    for thinking in (False, True):
        for call in parse(name, "".join(pieces), thinking=thinking):
            assert call.error or call.name == "look"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("piece", [
    "<tool_call>", '<tool_call>{"a": "', "<function=look><parameter=x>", "</parameter> ",
    "<tool_call><function=look><parameter=x></tool_call>", "{\"name\": ", "[look(", "<think>",
])  # fmt: skip
def test_long_broken_text_is_read_in_little_time(name, piece):
    begin = time.process_time()
    parse(name, piece * (200_000 // len(piece)))
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_explains_itself_with_the_schemas(name):
    text = FORMATS[name].describe([TOOL, OTHER])
    assert json.dumps(TOOL) in text
    assert "PARAMETER" in text
    assert all(stop in text for stop in FORMATS[name].stop_strings)
