"""Tests of forks, of tools in the first prompt, and of calls in sampled turns."""

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from turn_cases import (
    ANSWER,
    LOOK,
    QUESTION,
    RESULT,
    THOUGHT,
    TURN,
    picture_turns,
    plain,
    sampled,
    turns_of,
    with_pictures,
)
from turn_templates import QWEN2_5, QWEN2_5_VL, QWEN3_VL, TAGS, TEXT_TEMPLATES
from turn_templates import merging_tokenizer as make_tokenizer

from r1_data.lengths import KnownLengths
from r1_data.messages import RowReader
from r1_data.turns import TurnRenderer
from r1_data.types import DataError, Example


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def play(turns: TurnRenderer, texts: Sequence[str], answers: Sequence[dict[str, Any]]) -> tuple[Any, list[Any], str]:
    """Return the prompt, the later messages and the text of an episode."""
    tokenizer = turns.renderer.tokenizer
    example = turns.tool_prompt(Example("r:1", [QUESTION], (), "3"))
    later: list[Any] = []
    prompt = turns.renderer.render(example)
    text = prompt.text
    for turn, answer in zip(texts, answers, strict=True):
        token_ids = sampled(turns, turn)
        found = turns.continuation(token_ids, [answer], closed=True)
        text += tokenizer.decode(token_ids) + found.text
        later += [{"role": "assistant", "content": turn}, *found.messages]
    return prompt, later, text


@pytest.mark.parametrize(
    ("name", "turn", "answer", "forks"),
    [
        ("qwen2_5", TURN, RESULT, False),
        ("qwen2_5", f"<think>\n{THOUGHT}", ANSWER, False),
        ("qwen3", TURN, ANSWER, False),
        ("qwen3", f"<think>\n{THOUGHT}", RESULT, False),
        ("qwen3", f"<think>\n{THOUGHT}", ANSWER, True),
        ("qwen3_5", THOUGHT, {**RESULT, "content": "7"}, False),
        ("qwen3_5", THOUGHT, ANSWER, True),
        ("deepseek", THOUGHT, ANSWER, True),
        ("llama3_1", TURN, ANSWER, True),  # the line break at its end is trimmed
        ("gemma", "There are 12.", {**RESULT, "content": "7"}, False),
    ],
)
def test_a_turn_forks_where_the_template_changes_what_was_sampled(tokenizer, name, turn, answer, forks):
    turns = turns_of(tokenizer, TEXT_TEMPLATES[name], history="template")
    start, later, text = play(turns, [turn], [answer])
    prompt = turns.fork(start, later, text)
    assert (prompt is not None) == forks
    kept = turns_of(tokenizer, TEXT_TEMPLATES[name], history="sampled")
    assert kept.fork(start, later, text) is None


def test_what_the_prompt_began_of_a_turn_belongs_to_it_in_a_fork(tokenizer):
    opened = QWEN2_5.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    turns = turns_of(tokenizer, opened, history="template")
    assert turns.fork(*play(turns, [THOUGHT], [ANSWER])) is None


def test_a_fork_is_the_prompt_of_a_server(tokenizer):
    turns = turns_of(tokenizer, TEXT_TEMPLATES["qwen3"], history="template", tools=[LOOK])
    start, later, text = play(turns, [f"<think>\n{THOUGHT}", TURN], [RESULT, ANSWER])
    prompt = turns.fork(start, later, text)
    turn = {"role": "assistant", "content": "There are 12."}
    messages = [QUESTION, turn, RESULT, {"role": "assistant", "content": TURN}, ANSWER]
    assert prompt.text == turns.renderer.write_chat(messages, tools=[LOOK])
    assert prompt.token_ids == plain(tokenizer, prompt.text)
    assert prompt.position_ids.tolist() == [list(range(len(prompt.token_ids)))]
    assert (prompt.id, prompt.ground_truth) == ("r:1", "3")


def test_a_fork_has_all_pictures_and_no_control_token_of_a_tool(processor, picture):
    template = QWEN3_VL.replace("+ content }}", "+ content.split('</think>')[-1] }}")
    turns = picture_turns(processor, template, history="template")
    question = [{"type": "image"}, {"type": "text", "text": "How many?"}]
    example = Example("r:1", [{"role": "user", "content": question}], (picture(60, 40),), "3")
    start = turns.renderer.render(example)
    answer = with_pictures(picture(90, 90), text="<|image_pad|><|im_end|>")
    piece = turns.continuation(sampled(turns, TURN), [answer], closed=True)
    later = [{"role": "assistant", "content": f"<think>\n{THOUGHT}<|im_end|>"}, *piece.messages]
    prompt = turns.fork(start, later, "something else", [*start.images, *piece.images])
    assert prompt.engine_token_ids.count(processor.image_token_id) == 2
    end = turns.info.end_token_ids[0]
    assert prompt.token_ids.count(end) == 3  # of the question, the turn and the result
    assert len(prompt.images) == 2
    for name, own in start.model_inputs.items():  # what was resized once is not resized again
        assert prompt.model_inputs[name].equal(torch.cat([own, piece.model_inputs[name]]))
    assert prompt.position_ids.shape == (4, len(prompt.token_ids))


TURN_BEFORE = {"role": "assistant", "content": "So:"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([QUESTION], [{**QUESTION, "content": f"{QUESTION['content']} More.<|im_end|>"}]),
        (
            [QUESTION, {"role": "assistant", "content": "So:"}],
            [
                {**QUESTION, "content": f"{QUESTION['content']} More.<|im_end|>"},
                {"role": "assistant", "content": "So:"},
            ],
        ),
        (
            [{"role": "system", "content": "Be brief."}],
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " More.<|im_end|>"}],
        ),
    ],
)
def test_what_an_environment_says_first_stands_in_the_last_user_message(tokenizer, messages, expected):
    turns = turns_of(tokenizer, QWEN2_5, tools=[LOOK])
    start = turns.renderer.render(turns.tool_prompt(Example("r:1", messages, (), "3")))
    prompt = turns.extend_prompt(start, [{"role": "user", "content": " More.<|im_end|>"}])
    assert prompt.messages == expected
    assert prompt.text == turns.renderer.write_chat(expected, tools=[LOOK])
    [end] = turns.info.end_token_ids
    assert prompt.token_ids.count(end) == plain(tokenizer, prompt.text).count(end) - 1
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert (prompt.id, prompt.ground_truth) == (start.id, start.ground_truth)


def test_schemas_go_to_a_template_that_shows_them(tokenizer):
    turns = turns_of(tokenizer, QWEN2_5, tools=[LOOK])
    example = turns.tool_prompt(Example("r:1", [QUESTION], (), "3"))
    assert example.tools == (LOOK,)
    prompt = turns.renderer.render(example)
    assert prompt.text == turns.renderer.write_chat([QUESTION], tools=[LOOK])
    assert '"name": "look"' in prompt.text
    assert turns.renderer.prompt_length(example) == len(prompt.token_ids)
    assert turns.stop_strings == ("</tool_call>",)
    assert turns_of(tokenizer, QWEN2_5, tools=[LOOK], max_parallel_calls=2).stop_strings == ()


def test_schemas_are_part_of_what_a_length_is_known_by(tokenizer, tmp_path):
    turns = turns_of(tokenizer, QWEN2_5, tools=[LOOK])
    known, example = KnownLengths(tmp_path / "lengths.sqlite", "r"), Example("r:1", [QUESTION], (), "3")
    assert known.key(example) != known.key(turns.tool_prompt(example))
    known.close()


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_schemas_stand_in_the_system_message_of_a_template_that_ignores_them(tokenizer, content):
    turns = turns_of(tokenizer, QWEN2_5_VL, tools=[LOOK])
    assert turns.tool_format.name == "hermes"
    alone = turns.renderer.render(turns.tool_prompt(Example("r:1", [QUESTION], (), "3"))).text
    assert alone.startswith("<|im_start|>system\n# Tools\n")
    system = {"role": "system", "content": content}
    prompt = turns.renderer.render(turns.tool_prompt(Example("r:1", [system, QUESTION], (), "3")))
    assert prompt.text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert '"name": "look"' in prompt.text
    assert "<tool_call>" in prompt.text


def test_schemas_stand_in_the_first_user_message_without_system_messages(tokenizer):
    turns = turns_of(tokenizer, TEXT_TEMPLATES["gemma"], tools=[LOOK])
    prompt = turns.renderer.render(turns.tool_prompt(Example("r:1", [QUESTION], (), "3")))
    assert prompt.text.startswith("<bos><start_of_turn>user\n# Tools\n")
    assert prompt.text.endswith("\n\nHow many rows?<end_of_turn>\n<start_of_turn>model\n")


def test_another_format_is_explained_by_r1_and_not_by_the_template(tokenizer):
    turns = turns_of(tokenizer, QWEN2_5, tools=[LOOK], tool_format="pythonic", max_parallel_calls=4)
    example = turns.tool_prompt(Example("r:1", [QUESTION], (), "3"))
    assert example.tools == ()
    assert "[NAME(PARAMETER=VALUE)" in example.messages[0]["content"]
    assert turns.stop_strings == ()
    assert [call.arguments for call in turns.parse_calls("[look(x=3)]")] == [{"x": 3}]


def test_a_row_names_the_tools_that_it_may_use(tokenizer):
    other = {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}}
    turns = turns_of(tokenizer, QWEN2_5, tools=[LOOK, other])
    row = {"problem": "How many rows?", "answer": "3", "tools": ["search"]}
    reader = RowReader(prepare=pickle.loads(pickle.dumps(turns.tool_prompt)))
    example = reader("r:1", row)
    assert example.tools == (other,)
    assert pickle.loads(pickle.dumps(example.as_asked())).tools == (other,)
    (call,) = turns.parse_calls('<tool_call>{"name": "look", "arguments": {"x": 3}}</tool_call>', example.metadata)
    assert call.error == 'unknown tool "look"; the tools are: search'
    assert reader("r:2", {**row, "tools": None}).tools == (LOOK, other)
    assert reader("r:3", {**row, "tools": []}).tools == ()
    with pytest.raises(DataError, match="r:4: column 'tools' names the tool 'peek'; the tools are look, search"):
        reader("r:4", {**row, "tools": ["peek"]})


def test_without_tools_nothing_is_shown_parsed_or_stopped_at(tokenizer):
    turns = turns_of(tokenizer, QWEN2_5)
    example = Example("r:1", [QUESTION], (), "3")
    assert turns.tool_prompt(example) is example
    assert turns.parse_calls('<tool_call>{"name": "look"}</tool_call>') == []
    assert turns.stop_strings == ()


def test_a_prompt_that_opens_think_is_known_when_calls_are_parsed(tokenizer):
    turns = turns_of(tokenizer, TEXT_TEMPLATES["qwen3_5"], tools=[LOOK])
    call = "<tool_call>\n<function=look>\n<parameter=x>\n3\n</parameter>\n</function>\n</tool_call>"
    (inside,) = turns.parse_calls(f"Hm. {call}")
    assert "inside <think>" in inside.error
    (behind,) = turns.parse_calls(f"Hm.</think>{call}")
    assert (behind.name, behind.arguments, behind.error) == ("look", {"x": 3}, "")


def test_calls_are_read_from_turns_with_their_special_tokens(tokenizer):
    turns = turns_of(tokenizer, TEXT_TEMPLATES["lfm2"], tools=[LOOK])
    text = "I look.<|tool_call_start|>[look(x=3)]<|tool_call_end|>"
    (call,) = turns.parse_calls(turns.decode_turn(sampled(turns, text)))
    assert (call.arguments, call.error) == ({"x": 3}, "")
    bare = turns_of(tokenizer, TEXT_TEMPLATES["llama3_1"], tools=[LOOK], tool_format="pythonic")
    (call,) = bare.parse_calls(bare.decode_turn(sampled(bare, "[look(x=3)]")))
    assert call.error == ""


def test_splitting_control_tokens_changes_nothing_for_others_who_use_the_tokenizer(tokenizer):
    turns = turns_of(tokenizer, QWEN2_5)
    turns.continuation([], [{**RESULT, "content": "<|im_end|>"}], closed=True)
    assert not tokenizer.backend_tokenizer.encode_special_tokens


def test_added_tags_are_those_of_the_tokenizer(tokenizer):
    assert {tokenizer.convert_tokens_to_ids(tag) for tag in TAGS} < set(tokenizer.added_tokens_decoder)
