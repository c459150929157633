"""Tests of the probe: what chat templates do with turns, tools and pictures, and which are refused and why."""

from typing import Any

import pytest
from turn_templates import BLIND_TOOLS, LLAMA3_1, QWEN2_5, TEXT_TEMPLATES, VISION_TEMPLATES, merging_tokenizer

from r1_data.render import Renderer
from r1_data.turns import TemplateInfo, TurnRenderer, probe_template
from r1_data.types import DataError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return merging_tokenizer()


def probe(tokenizer: Any, template: str, **options: Any) -> TemplateInfo:
    return probe_template(Renderer(tokenizer, chat_template=template), **options)


#        results, call format, shows tools, keeps: tool, user, user after <think>; prefill, reads system messages
FACTS = {
    "qwen2_5": ("message", "hermes", True, (True, True, True), "", True),
    "qwen3": ("message", "hermes", True, (True, True, False), "", True),
    "qwen3_5": ("message", "qwen3_coder", True, (True, False, False), "<think>\n", True),
    "llama3_1": ("message", "llama3_json", True, (True, True, True), "", True),
    "gemma": ("user", "", False, (True, True, True), "", False),
    "deepseek": ("user", "", False, (False, False, False), "<think>\n", True),
    "lfm2": ("message", "pythonic", True, (True, True, True), "", True),
    "gpt_oss": ("call", "", False, (True, False, False), "", True),
    "glm": ("message", "", False, (True, True, True), "", True),
    "idefics3": ("message", "", False, (True, True, True), "", True),
}


@pytest.mark.parametrize("name", FACTS)
def test_the_probe_finds_what_a_template_does(tokenizer, name):
    info = probe(tokenizer, TEXT_TEMPLATES[name])
    kept = (info.keeps_tool, info.keeps_user, info.keeps_thoughts)
    found = (info.results, info.call_format, info.shows_tools, kept, info.prefill, info.reads_system)
    assert found == FACTS[name]
    assert info.content_parts == (name == "idefics3")
    assert not info.tool_pictures
    assert not info.user_pictures


def test_thoughts_do_not_count_where_the_prompt_closes_them(tokenizer):
    silent = TEXT_TEMPLATES["qwen3_5"].replace("assistant\n<think>\n' }}", "assistant\n<think>\n\n</think>\n\n' }}")
    info = probe(tokenizer, silent)
    assert (info.prefill, info.keeps_tool, info.keeps_user) == ("", True, False)


def test_what_stands_behind_a_turn_is_shown_with_the_end_token(tokenizer):
    info = probe(tokenizer, QWEN2_5)
    assert (info.end_tokens, info.end_token_ids) == (("<|im_end|>",), (tokenizer.eos_token_id,))
    assert info.before_user == "<|im_end|>\n<|im_start|>user\n"
    assert info.before_tool == "<|im_end|>\n<|im_start|>user\n<tool_response>\n"
    assert probe(tokenizer, TEXT_TEMPLATES["gpt_oss"]).end_tokens == ("<|end|>", "<|call|>")


def test_results_are_not_written_behind_calls_that_change_when_one_follows(tokenizer):
    changing = TEXT_TEMPLATES["gpt_oss"].replace(
        "tojson + '<|call|>'", "tojson + ('<|call|>' if loop.last else '!<|call|>')"
    )
    assert probe(tokenizer, changing).results == "user"


@pytest.mark.parametrize("family", VISION_TEMPLATES)
def test_pictures_of_tools_are_looked_for(fresh_processor, family):
    info = probe(fresh_processor(family), VISION_TEMPLATES[family])
    assert (info.tool_pictures, info.user_pictures) == (True, True)
    assert (info.shows_tools, info.call_format) == ((True, "hermes") if family == "qwen3_vl" else (False, ""))
    blind = probe(fresh_processor(family), BLIND_TOOLS)
    assert (blind.tool_pictures, blind.user_pictures) == (False, True)


def test_there_is_a_line_for_each_fact(tokenizer, processor):
    lines = "\n".join(probe(tokenizer, QWEN2_5).lines())
    assert lines.splitlines() == [
        r"a turn ends with <|im_end|>; before a user's text stands '<|im_end|>\n<|im_start|>user\n'",
        "tool results are the template's tool messages; before one's text stands "
        r"'<|im_end|>\n<|im_start|>user\n<tool_response>\n'",
        "the template shows the tools' schemas",
        "calls are written as hermes",
        "the template keeps turns as they were sampled",
    ]
    gemma = "\n".join(probe(tokenizer, TEXT_TEMPLATES["gemma"]).lines())
    assert "results are user messages in <tool_response>" in gemma
    assert "r1 writes their schemas into the first user message" in gemma
    assert "hermes is used unless multi_turn.format names another" in gemma
    thinking = "\n".join(probe(tokenizer, TEXT_TEMPLATES["qwen3_5"]).lines())
    assert r"the generation prompt begins each turn with '<think>\n'" in thinking
    assert "when a user or a user, after <think>, answers, the template changes the turn before" in thinking
    assert "behind their calls" in "\n".join(probe(tokenizer, TEXT_TEMPLATES["gpt_oss"]).lines())
    assert "pictures of tools stand in tool messages" in probe(processor, VISION_TEMPLATES["qwen2_5_vl"]).lines()
    assert "pictures of tools stand in user messages in <tool_response>" in probe(processor, BLIND_TOOLS).lines()


BEHIND = "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "error"),
    [
        (BEHIND.replace("m.content", "('' if m.role == 'assistant' else m.content)"), "does not write the content"),
        (BEHIND.replace("+ m.content", "+ m.content + m.content"), "content twice"),
        (
            BEHIND.replace("'<|im_end|>'", "'[' + (m.content | length) | string + ']<|im_end|>'"),
            r"depends on what.*TEXT",
        ),
        (BEHIND.replace("'<|im_end|>'", "'\n<|im_end|>'"), "begins with no end token of the model.*eos_token_id"),
        (BEHIND.replace("m.role", "loop.index | string"), "depends on the conversation before it.*a longer one"),
        (BEHIND.replace("m.content", "(m.content if loop.index < 3 else '')"), "without the user's text"),
        ("{{ raise_exception('never') }}", "cannot go on behind an assistant's turn.*never"),
    ],
)
def test_templates_that_cannot_go_on_are_refused_with_what_was_found(tokenizer, template, error):
    with pytest.raises(DataError, match=f"(?s){error}.*override_chat_template"):
        probe(tokenizer, template)


def test_the_end_token_must_be_one_at_which_the_engine_stops(tokenizer):
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert probe(tokenizer, QWEN2_5, end_token_ids=[other, tokenizer.eos_token_id]).end_tokens == ("<|im_end|>",)
    with pytest.raises(DataError, match=r"begins with no end token of the model \(<\|endoftext\|>\)"):
        probe(tokenizer, QWEN2_5, end_token_ids=[other])


def test_a_template_that_counts_pictures_over_the_conversation_is_refused(processor):
    plain = VISION_TEMPLATES["qwen2_5_vl"]
    counting = "{%- set n = namespace(i=0) %}" + plain.replace(
        "parts(message.content)", "parts(message.content) + n.i | string"
    ).replace(
        "{{- '<|im_start|>'",
        "{% if message.content is not string %}{% set n.i = n.i + 1 %}{% endif %}{{- '<|im_start|>'",
    )
    with pytest.raises(DataError, match=r"depends on the conversation before it.*data\.chat_template_kwargs"):
        probe(processor, counting)


def test_schemas_are_given_again_where_they_change_what_stands_behind_a_turn(tokenizer):
    reading = LLAMA3_1.replace(
        "<|start_header_id|>ipython", "<|start_header_id|>' + ('env' if tools else 'ipython') + '"
    )
    info = probe(tokenizer, reading)
    assert info.reads_tools_later
    assert not probe(tokenizer, LLAMA3_1).reads_tools_later
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    turns = TurnRenderer(Renderer(tokenizer, chat_template=reading), info, tools=[tool])
    assert ">env<" in turns.continuation([], [{"role": "tool", "content": "7"}], closed=True).text


def test_formats_are_chosen_by_name_or_by_the_template(tokenizer):
    renderer = Renderer(tokenizer, chat_template=QWEN2_5)
    info, tool = probe_template(renderer), {"type": "function", "function": {"name": "look", "parameters": {}}}
    assert TurnRenderer(renderer, info, tools=[tool]).tool_format.name == "hermes"
    with pytest.raises(DataError, match=r"'xml'; choose one of hermes, llama3_json, pythonic, qwen3_coder"):
        TurnRenderer(renderer, info, tool_format="xml")
    strange = QWEN2_5.replace("<tool_call>\n{", "<fn>{")
    renderer = Renderer(tokenizer, chat_template=strange)
    info = probe_template(renderer)
    assert (info.call_format, info.writes_calls) == ("", True)
    assert "no format of r1 reads the calls" in "\n".join(info.lines())
    with pytest.raises(DataError, match=r"set multi_turn\.format to one of hermes"):
        TurnRenderer(renderer, info, tools=[tool])
    assert TurnRenderer(renderer, info, tools=[tool], tool_format="hermes").tool_format.name == "hermes"


def test_the_history_of_a_template_that_writes_results_behind_calls_is_kept_as_sampled(tokenizer):
    renderer = Renderer(tokenizer, chat_template=TEXT_TEMPLATES["gpt_oss"])
    info = probe_template(renderer)
    with pytest.raises(DataError, match="history=template"):
        TurnRenderer(renderer, info, history="template")
