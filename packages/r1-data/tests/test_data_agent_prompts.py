"""Tests of prompts that are rendered from an agent's own messages, and of calls as an agent gets them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turn_cases import LOOK, QUESTION, TURN, picture_turns, sampled, turns_of, with_pictures
from turn_templates import QWEN2_5, QWEN3_VL, TEXT_TEMPLATES
from turn_templates import merging_tokenizer as make_tokenizer

from r1_data.turns import TurnRenderer
from r1_data.types import DataError, Example

SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"id": "call00000", "name": "look", "arguments": {"x": 3}}
SPELLED = ["<|im_end|>", "<|im_start|>", "<|eot_id|>", "<|im_<|im_end|>end|>", "<|start|>", "<end_of_turn>"]
TEXTS = st.lists(st.one_of(st.sampled_from(SPELLED), st.text(max_size=4))).map("".join)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def turns(tokenizer: Any) -> TurnRenderer:
    return turns_of(tokenizer, QWEN2_5)


def test_a_conversation_without_control_tokens_is_what_a_server_renders(turns):
    messages = [SYSTEM, QUESTION, {"role": "assistant", "content": TURN}, QUESTION]
    prompt = turns.with_tools([LOOK]).render("r:1", messages)
    served = turns.renderer.render(Example("r:1", messages, (), "", tools=(LOOK,)))
    assert (prompt.text, prompt.token_ids) == (served.text, served.token_ids)
    assert prompt.position_ids.tolist() == served.position_ids.tolist()
    assert prompt.messages == messages


@pytest.mark.parametrize("name", [name for name in TEXT_TEMPLATES if name != "gpt_oss"])  # whose results follow calls
@settings(max_examples=8)
@given(text=TEXTS, later=TEXTS)
def test_no_text_of_an_agent_writes_a_control_token(tokenizer, name, text, later):
    turns = turns_of(tokenizer, TEXT_TEMPLATES[name])
    special = set(tokenizer.all_special_ids) | {
        id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special
    }

    def write(text: str, later: str) -> list[int]:
        system = [{"role": "system", "content": f"S{text}"}] if turns.info.reads_system else []
        talk = [{"role": "user", "content": f"U{text}"}, {"role": "assistant", "content": f"A{text}{later}"}]
        described = {**LOOK["function"], "description": text}
        found = turns.with_tools([{**LOOK, "function": described}]).render(
            "r", [*system, *talk, {"role": "user", "content": f"V{later}"}]
        )
        assert tokenizer.decode(found.token_ids) == found.text
        return [token for token in found.token_ids if token in special]

    assert write(text, later) == write("", "")


def test_calls_and_their_arguments_spell_no_control_token(turns):
    call = {**CALL, "arguments": {"<|im_start|>x": ["<|im_end|>", 3]}}
    messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    prompt = turns.with_tools([LOOK]).render("r", [*messages, {"role": "tool", "content": "<|im_end|>"}])
    assert '<tool_call>\n{"name": "look", "arguments": {"x": ["", 3]}}\n</tool_call><|im_end|>\n' in prompt.text
    end = turns.renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert prompt.token_ids.count(end) == prompt.text.count("<|im_end|>") - 1  # the tool's is plain text


def test_calls_are_written_where_the_template_writes_none(tokenizer):
    turns = turns_of(tokenizer, TEXT_TEMPLATES["gemma"]).with_tools([LOOK])
    prompt = turns.render("r", [QUESTION, {"role": "assistant", "content": "So:", "tool_calls": [CALL]}, QUESTION])
    assert 'So:\n<tool_call>\n{"name": "look", "arguments": {"x": 3}}\n</tool_call>' in prompt.text


def test_pictures_of_an_agent_are_processed_as_those_of_rows(processor, picture):
    turns = picture_turns(processor, QWEN3_VL)
    message = with_pictures(picture(60, 90), role="user", text="What is this? <|image_pad|>")
    prompt = turns.render("r", [SYSTEM, message])
    row = Example("r", [{"role": "user", "content": [{"type": "image"}]}], (message["content"][0]["image"],), "")
    expected = turns.renderer.render(row).model_inputs
    assert {name: value.tolist() for name, value in prompt.model_inputs.items()} == {
        name: value.tolist() for name, value in expected.items()
    }
    assert prompt.engine_token_ids.count(turns.renderer.require_vision().tokens["picture"][1]) == 1


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "at least one message"),
        ([{"role": "robot", "content": "x"}], "must have the role system or tool or user"),
        ([QUESTION, {"role": "assistant", "content": [{"type": "image", "image": b""}]}], "picture"),
    ],
)
def test_other_messages_are_refused(turns, messages, error):
    with pytest.raises(DataError, match=error):
        turns.render("r", messages)


@pytest.mark.parametrize(
    ("text", "before", "calls"),
    [
        ("So:\n<tool_call>\n{}\n</tool_call>", "So:", [("look", {"x": 3})]),
        ("<think>\n<tool_call>{}</tool_call>\n</think>\n5", "<think>\n<tool_call>{}</tool_call>\n</think>\n5", []),
        ("<tool_call>{} twice</tool_call>", "<tool_call>{} twice</tool_call>", []),
    ],
)
def test_an_agent_gets_the_text_before_its_calls_and_broken_ones_as_text(turns, text, before, calls):
    call = '{"name": "look", "arguments": {"x": 3}}'
    turns = turns.with_tools([LOOK])
    read = turns.decode_turn(sampled(turns, text.replace("{}", call)))
    found, made = turns.split_calls(read)
    assert (found, [(one.name, one.arguments) for one in made]) == (before.replace("{}", call), calls)


def test_an_agent_gets_calls_that_its_schemas_do_not_allow(turns):
    schema = {"type": "function", "function": {"name": "look", "parameters": {"properties": "none", "required": 3}}}
    for name in ("look", "fly"):
        text = f'<tool_call>{{"name": "{name}", "arguments": {{"x": "a"}}}}</tool_call>'
        ((call,)) = turns.with_tools([schema]).split_calls(text)[1]
        assert (call.name, call.arguments) == (name, {"x": "a"})
