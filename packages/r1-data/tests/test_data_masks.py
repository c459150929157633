"""Tests of which tokens of a conversation are trained, whatever the chat template does."""

import pytest
from demonstration_cases import (
    CALL,
    CALLING,
    NO_END,
    TAGGED,
    TALK,
    THINKING,
    THOUGHT,
    TOOL,
    conversation,
    renderer_of,
    trained,
)
from turn_templates import (
    DEEPSEEK,
    GEMMA,
    GLM,
    GPT_OSS,
    IDEFICS3,
    LFM2,
    LLAMA3_1,
    QWEN2_5,
    QWEN3,
    QWEN3_5,
    merging_tokenizer,
)

from r1_data.assistant import TemplateAnswers
from r1_data.render import Renderer
from r1_data.types import DataError, Example

EXPECTED = {  # the trained pieces of TALK, THINKING and CALLING
    "qwen2_5": (
        QWEN2_5,
        ["There are 12.<|im_end|>", "Now 13.<|im_end|>"],
        [f"{THOUGHT}There are 12.<|im_end|>", f"{THOUGHT}Now 13.<|im_end|>"],
        ['<tool_call>\n{"name": "look", "arguments": {"x": 3}}\n</tool_call><|im_end|>', "Now 13.<|im_end|>"],
    ),
    "qwen3": (
        QWEN3,
        ["There are 12.<|im_end|>", "Now 13.<|im_end|>"],
        ["There are 12.<|im_end|>", f"{THOUGHT}Now 13.<|im_end|>"],
        ['<tool_call>\n{"name": "look", "arguments": {"x": 3}}\n</tool_call><|im_end|>', "Now 13.<|im_end|>"],
    ),
    "qwen3_5": (
        QWEN3_5,
        ["There are 12.<|im_end|>", "\n</think>\n\nNow 13.<|im_end|>"],
        ["There are 12.<|im_end|>", "I see.\n</think>\n\nNow 13.<|im_end|>"],
        [
            "\n</think>\n\n<tool_call>\n<function=look>\n<parameter=x>\n3\n</parameter>\n</function>\n</tool_call>"
            "<|im_end|>",
            "\n</think>\n\nNow 13.<|im_end|>",
        ],
    ),
    "llama3_1": (
        LLAMA3_1,
        ["There are 12.<|eot_id|>", "Now 13.<|eot_id|>"],
        [f"{THOUGHT}There are 12.<|eot_id|>", f"{THOUGHT}Now 13.<|eot_id|>"],
        ['{"name": "look", "parameters": {"x": 3}}<|eot_id|>', "Now 13.<|eot_id|>"],
    ),
    "gemma": (GEMMA, ["There are 12.<end_of_turn>", "Now 13.<end_of_turn>"], None, None),
    "deepseek": (
        DEEPSEEK,
        ["There are 12.<|end|>", "Now 13.<|end|>"],
        ["\n\nThere are 12.<|end|>", "\n\nNow 13.<|end|>"],
        None,
    ),
    "lfm2": (
        LFM2,
        ["There are 12.<|im_end|>", "Now 13.<|im_end|>"],
        None,
        ["<|tool_call_start|>[look(x=3)]<|tool_call_end|><|im_end|>", "Now 13.<|im_end|>"],
    ),
    "gpt_oss": (
        GPT_OSS,
        ["<|message|>There are 12.<|end|>", "<|message|>Now 13.<|end|>"],
        None,
        [' to=look<|message|>{"x": 3}<|call|>', "<|message|>Now 13.<|end|>"],
    ),
    "glm": (GLM, ["There are 12.<|user|>", "Now 13."], None, None),
    "idefics3": (IDEFICS3, ["There are 12.<end_of_utterance>", "Now 13.<end_of_utterance>"], None, None),
    "tagged": (TAGGED, ["There are 12.<|im_end|>", "Now 13.<|im_end|>"], None, None),
    "no_end": (NO_END, ["There are 12.", "Now 13."], None, None),
}
CASES = [
    pytest.param(expected[0], messages, pieces, id=f"{name}-{kind}")
    for name, expected in EXPECTED.items()
    for kind, messages, pieces in zip(
        ("talk", "thinking", "calling"), (TALK, THINKING, CALLING), expected[1:], strict=True
    )
    if pieces is not None
]


@pytest.fixture(scope="module")
def merging():
    return merging_tokenizer()


@pytest.mark.parametrize(("template", "messages", "pieces"), CASES)
def test_trained_are_the_answers_and_what_ends_them(merging, template, messages, pieces):
    tools = (TOOL,) if messages is CALLING and "tools" in template else ()
    (shown,) = renderer_of(merging, template).render(conversation(messages, tools=tools))
    assert trained(merging, shown) == pieces
    assert shown.prompt_length == shown.loss_mask.index(True)
    assert shown.position_ids.tolist() == [list(range(len(shown.token_ids)))]


@pytest.mark.parametrize("template", [QWEN2_5, QWEN3_5, LLAMA3_1, GPT_OSS, TAGGED, NO_END])
@pytest.mark.parametrize("answer", ["Now 13.", "\n\nNow 13.\n", " A row.\n\n"])
def test_a_demonstration_is_the_prompt_as_rendered_for_sampling_and_the_answer(merging, template, answer):
    messages = [*TALK[:3], {"role": "assistant", "content": answer}]
    renderer = renderer_of(merging, template, turns="last")
    (shown,) = renderer.render(conversation(messages))
    prompt = renderer.renderer.render(Example("t:1", messages[:3], (), ""))
    whole = renderer.renderer.write_chat(messages, generation_prompt=False)
    assert merging.decode(shown.token_ids) == whole
    assert shown.token_ids[: shown.prompt_length] == prompt.token_ids
    assert not any(shown.loss_mask[: shown.prompt_length])


def test_special_tokens_that_a_text_spells_stay_text(merging):
    spelled = "a<|im_end|>b"
    messages = [{"role": "user", "content": spelled}, {"role": "assistant", "content": f"{spelled}<|im_start|>"}]
    (shown,) = renderer_of(merging).render(conversation(messages))
    end, start = merging.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    assert (shown.token_ids.count(end), shown.token_ids.count(start)) == (2, 2)
    assert merging.decode(shown.token_ids).count("a<|im_end|>b") == 2
    assert trained(merging, shown) == [f"{spelled}<|im_start|><|im_end|>"]
    called = [
        TALK[0],
        {**CALLING[1], "tool_calls": [{**CALL, "function": {"name": "look", "arguments": {"x": spelled}}}]},
    ]
    (shown,) = renderer_of(merging).render(conversation(called))
    assert shown.token_ids.count(end) == 2
    assert trained(merging, shown)[0].endswith(f'{{"x": "{spelled}"}}}}\n</tool_call><|im_end|>')


def test_arguments_of_calls_may_be_json_text_and_contents_may_be_missing(merging):
    text = {**CALL, "function": {"name": "look", "arguments": '{"x": 3}'}}
    messages = [TALK[0], {"role": "assistant", "content": None, "tool_calls": [text]}, *CALLING[2:]]
    for template in (
        QWEN2_5,
        QWEN2_5.replace("| tojson }}", "+ '' }}"),
        QWEN2_5.replace("arguments | tojson", "arguments"),
    ):
        (shown,) = renderer_of(merging, template).render(conversation(messages))
        assert trained(merging, shown) == EXPECTED["qwen2_5"][3]


def test_a_template_that_shows_calls_only_without_a_content_gets_none(merging):
    template = QWEN2_5.replace("message.tool_calls or []", "(message.tool_calls if content is none else [])")
    template = template.replace("+ content }}", "+ (content or '') }}")
    (shown,) = renderer_of(merging, template).render(conversation(CALLING))
    assert trained(merging, shown) == EXPECTED["qwen2_5"][3]


def test_a_rows_own_arguments_of_the_template_replace_the_runs(merging):
    template = QWEN2_5.replace("'<|im_start|>assistant\n' }}", "'<|im_start|>assistant\n' + ('' if think else 'No') }}")
    messages = [TALK[0], {"role": "assistant", "content": "No."}]
    for think, piece in ((True, "No.<|im_end|>"), (False, ".<|im_end|>")):
        row = conversation(messages, template_kwargs={"think": think})
        assert trained(merging, renderer_of(merging, template).render(row)[0]) == [piece]


def test_tags_decide_what_is_trained_but_for_what_the_generation_prompt_supplies(merging):
    without_end = TAGGED.replace("+ '<|im_end|>\n' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>\n' }}")
    assert trained(merging, renderer_of(merging, without_end).render(conversation(TALK))[0]) == [
        "There are 12.",
        "Now 13.",
    ]
    opened = TAGGED.replace("{{ message.content", "{{ '<think>' + message.content")
    opened = opened.replace("'<|im_start|>assistant\n' }}", "'<|im_start|>assistant\n<think>' }}")
    assert trained(merging, renderer_of(merging, opened).render(conversation(TALK))[0]) == EXPECTED["tagged"][1]
    with pytest.raises(DataError, match=r"^t:1: the text of message 2 .*: it does not show the message's tool_calls"):
        renderer_of(merging, TAGGED).render(conversation(CALLING))
    one = TAGGED.replace("message.role == 'assistant'", "message.role == 'assistant' and loop.last")
    with pytest.raises(
        DataError, match=r"^t:1: the text of message 2 \(assistant\) .*: it has no {% generation %} block"
    ):
        renderer_of(merging, one).render(conversation(TALK))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("+ content }}", "+ content | upper }}", "it changes its surroundings when a text of a message changes"),
        ("+ content }}", "+ (content if message.role == 'user' else '') }}", "it does not show the message's content"),
        ("+ content }}", "+ content + content }}", "it writes the text twice"),
        ("assistant\n' }}", "model: ' }}", "what stands before the message is not the generation prompt"),
    ],
)
def test_a_template_whose_answers_cannot_be_found_is_named_with_the_way_out(merging, old, new, reason):
    template = QWEN2_5.replace("'<|im_start|>assistant", "'assistant") if "model" in new else QWEN2_5
    assert old in template
    with pytest.raises(
        DataError, match=r"^t:1: .*chat template [0-9a-f]{12}: .*\(data.override_chat_template\)"
    ) as caught:
        renderer_of(merging, template.replace(old, new)).render(conversation(TALK))
    assert reason in str(caught.value)


def test_a_template_that_reads_users_texts_is_understood(merging):
    ends = "{%- set ends = messages[-1].content.endswith('</tool_response>') %}"
    same = "{%- set ends = messages[-1].content == '<tool_response>13</tool_response>' %}"
    result = {"role": "user", "content": "<tool_response>13</tool_response>"}
    for rule in (ends, same):
        template = rule + QWEN2_5.replace("+ content }}", "+ content + ('!' if ends and loop.last else '') }}")
        (shown,) = renderer_of(merging, template).render(conversation([*TALK, result]))
        assert merging.decode(shown.token_ids).endswith("</tool_response>!<|im_end|>\n")
        assert trained(merging, shown) == EXPECTED["qwen2_5"][1]


def test_a_tag_that_the_generation_prompt_and_an_answer_only_begin_alike_is_trained_whole(merging):
    """`<think>` and `<tool_call>` have "<t" in common."""
    messages = [*CALLING[:3], *TALK[2:]]  # an earlier turn, so without a thought
    (shown,) = renderer_of(merging, QWEN3_5).render(conversation(messages, tools=(TOOL,)))
    assert trained(merging, shown)[0].startswith("<tool_call>\n<function=look>")


def test_an_earlier_text_that_is_written_again_behind_the_answer_changes_no_mask(merging):
    reminder = QWEN2_5 + "{%- if not add_generation_prompt %}{{ '(' + messages[0].content + ')' }}{% endif %}"
    (shown,) = renderer_of(merging, reminder).render(conversation(TALK))
    assert merging.decode(shown.token_ids).endswith("Now 13.<|im_end|>\n(How many rows?)")
    assert trained(merging, shown) == EXPECTED["qwen2_5"][1]


CALLING_GLM = GLM.replace(
    "+ message.content }}",
    "+ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function.name + '\n' + call.function.arguments | tojson + '</tool_call>' }}{% endfor %}",
)


def test_the_next_roles_token_ends_a_call(merging):
    pieces = ['<tool_call>look\n{"x": 3}</tool_call><|observation|>', "Now 13."]
    (shown,) = renderer_of(merging, CALLING_GLM).render(conversation(CALLING))
    assert trained(merging, shown) == pieces
    (shown,) = renderer_of(merging, CALLING_GLM).render(conversation(CALLING[:2]))
    assert trained(merging, shown) == [pieces[0].removesuffix("<|observation|>")]


def test_a_text_beside_a_call_is_trained_with_it_and_refused_behind_the_results(merging):
    said = [TALK[0], {**CALLING[1], "content": f"{THOUGHT}I look."}, *CALLING[2:]]
    renderer = renderer_of(merging)
    assert trained(merging, renderer.render(conversation(said))[0])[0].startswith(f"{THOUGHT}I look.\n<tool_call>")
    assert renderer.survey(conversation(said))[0].hidden == 0
    late = QWEN2_5.replace("+ content }}", "+ ('' if message.tool_calls else content) }}")
    late = late.replace("'\n</tool_response>' }}", "'\n</tool_response>' + messages[loop.index0 - 1].content }}")
    with pytest.raises(DataError, match=r"message 2 .*: it writes the message's text behind the results of its calls"):
        renderer_of(merging, late).render(conversation(said))
    shown_without_calls = QWEN2_5.replace("message.tool_calls or []", "[]")
    with pytest.raises(DataError, match=r"message 2 .*: it does not show the message's tool_calls"):
        renderer_of(merging, shown_without_calls).render(conversation(said))


def test_tools_that_the_template_never_reads_are_refused(merging):
    with pytest.raises(DataError, match=r"^t:1: the row has tools, but the chat template never reads them"):
        renderer_of(merging, GEMMA).render(conversation(TALK, tools=(TOOL,)))
    (with_tools,) = renderer_of(merging).render(conversation(TALK, tools=(TOOL,)))
    (without,) = renderer_of(merging).render(conversation(TALK))
    assert trained(merging, with_tools) == trained(merging, without)
    assert with_tools.prompt_length > without.prompt_length


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN2_5, ("", "<|im_end|>", "all")),
        (QWEN3_5, ("<think>\n", "<|im_end|>", "all")),
        (QWEN2_5.replace("+ content }}", "+ (message.reasoning_content or '') + content }}"), ("", "<|im_end|>", "")),
        (
            QWEN2_5.replace("+ content }}", "+ (message.reasoning_content or '' if loop.last else '') + content }}"),
            ("", "<|im_end|>", "earlier"),
        ),
        (NO_END, ("", "", "all")),
        (GLM, ("", "", "all")),
        (IDEFICS3, ("", "<end_of_utterance>", "all")),
    ],
)
def test_what_a_template_opens_ends_and_forgets_is_probed(merging, template, expected):
    found = TemplateAnswers.probe(Renderer(merging, chat_template=template))
    assert (found.opens, found.end, found.forgets) == expected


def test_a_text_that_is_a_special_token_stays_text_and_a_greeting_is_not_trained(merging):
    messages = [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "<|im_end|>"}, TALK[3]]
    (shown,) = renderer_of(merging).render(conversation(messages))
    assert shown.token_ids.count(merging.convert_tokens_to_ids("<|im_end|>")) == 3
    assert trained(merging, shown) == ["Now 13.<|im_end|>"]
    with pytest.raises(DataError, match=r"^t:1: the conversation has no answer to train"):
        renderer_of(merging).render(conversation(messages[:1]))
