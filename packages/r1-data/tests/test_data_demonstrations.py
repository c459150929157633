"""Tests of demonstrations: which tokens are trained, whatever the chat template does."""

import pickle
from dataclasses import replace

import pytest
import torch
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
from r1_data.conversations import ConversationReader
from r1_data.demonstrations import ConversationDataset, ConversationRenderer
from r1_data.lengths import KnownLengths
from r1_data.references import Video
from r1_data.render import Renderer
from r1_data.types import Conversation, DataError, Example, MediaError, Overlong

TALK = [
    {"role": "user", "content": "How many rows?"},
    {"role": "assistant", "content": "There are 12."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Now 13."},
]
THOUGHT = "<think>\nI see.\n</think>\n\n"
THINKING = [{**one, "content": THOUGHT + one["content"]} if one["role"] == "assistant" else one for one in TALK]
CALL = {"type": "function", "id": "call00000", "function": {"name": "look", "arguments": {"x": 3}}}
CALLING = [
    TALK[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "look", "tool_call_id": "call00000", "content": "A row."},
    TALK[3],
]
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}
TAGGED = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content + '<|im_end|>\n' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
NO_END = """\
{%- for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
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


def conversation(messages, **fields):
    return Conversation("t:1", list(messages), **fields)


def renderer_of(tokenizer, template=QWEN2_5, **options):
    return ConversationRenderer(Renderer(tokenizer, chat_template=template), **options)


def trained(tokenizer, shown):
    """The texts of the runs of trained tokens."""
    runs, before = [], False
    for token, own in zip(shown.token_ids, shown.loss_mask, strict=True):
        if own:
            runs = [*runs[:-1], [*runs[-1], token]] if before else [*runs, [token]]
        before = own
    return [tokenizer.decode(run) for run in runs]


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


def test_each_answer_is_trained_as_the_template_shows_it_when_it_is_the_last(merging):
    first, second = renderer_of(merging, QWEN3, turns="each").render(conversation(THINKING))
    assert trained(merging, first) == [f"{THOUGHT}There are 12.<|im_end|>"]
    assert trained(merging, second) == [f"{THOUGHT}Now 13.<|im_end|>"]
    assert len(first.token_ids) < len(second.token_ids)
    (last,) = renderer_of(merging, QWEN3, turns="last").render(conversation(THINKING))
    assert (last.token_ids, last.loss_mask) == (second.token_ids, second.loss_mask)


@pytest.mark.parametrize("excluded", [{"weight": 0}, {"train": False}])
def test_an_answer_without_weight_is_not_trained(merging, excluded):
    messages = [TALK[0], {**TALK[1], **excluded}, *TALK[2:]]
    (shown,) = renderer_of(merging).render(conversation(messages))
    assert trained(merging, shown) == ["Now 13.<|im_end|>"]
    (shown,) = renderer_of(merging, train_on_prompt=True).render(conversation(messages))
    assert "".join(trained(merging, shown)) == (
        "user\nHow many rows?<|im_end|>\n<|im_start|>assistant\n"
        "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\nNow 13.<|im_end|>\n"
    )
    assert len(renderer_of(merging, turns="each").render(conversation(messages))) == 1
    with pytest.raises(DataError, match=r"^t:1: message 4 has weight=0.5; read are weight 0 and 1"):
        renderer_of(merging).render(conversation([*messages[:3], {**TALK[3], "weight": 0.5}]))
    with pytest.raises(DataError, match=r"^t:1: the conversation has no answer to train"):
        renderer_of(merging).render(conversation(messages[:3]))


def test_a_pair_is_the_better_and_the_worse_answer_behind_the_same_prompt(merging):
    worse = [{"role": "assistant", "content": "None."}]
    row = conversation(TALK, rejected=worse, source="s")
    better, other = renderer_of(merging, turns="each").render(row)
    assert (trained(merging, better), better.label) == (["Now 13.<|im_end|>"], True)
    assert (trained(merging, other), other.label) == (["None.<|im_end|>"], False)
    assert better.prompt_length == other.prompt_length
    assert better.token_ids[: better.prompt_length] == other.token_ids[: other.prompt_length]
    assert better.source == other.source == "s"
    longer = replace(row, prompt_messages=1, rejected=[*worse, *TALK[2:]])
    pieces = [trained(merging, one) for one in renderer_of(merging).render(longer)]
    assert pieces == [["There are 12.<|im_end|>", "Now 13.<|im_end|>"], ["None.<|im_end|>", "Now 13.<|im_end|>"]]
    with pytest.raises(DataError, match=r"^t:1: no token of an answer is left to train"):
        renderer_of(merging).render(replace(row, rejected=[{"role": "user", "content": "None."}]))


def test_a_labelled_row_trains_its_last_answer(merging):
    (shown,) = renderer_of(merging).render(conversation(TALK, label=False))
    assert (trained(merging, shown), shown.label) == (["Now 13.<|im_end|>"], False)


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


def test_tools_that_the_template_never_reads_are_refused(merging):
    with pytest.raises(DataError, match=r"^t:1: the row has tools, but the chat template never reads them"):
        renderer_of(merging, GEMMA).render(conversation(TALK, tools=(TOOL,)))
    (with_tools,) = renderer_of(merging).render(conversation(TALK, tools=(TOOL,)))
    (without,) = renderer_of(merging).render(conversation(TALK))
    assert trained(merging, with_tools) == trained(merging, without)
    assert with_tools.prompt_length > without.prompt_length


def test_lengths_are_measured_as_rendered_and_a_cut_loses_the_end(merging):
    rows = [conversation(TALK), conversation(TALK[:2]), conversation(TALK, rejected=[TALK[1], TALK[0], TALK[3]])]
    renderer = renderer_of(merging, turns="each")
    lengths = renderer.measure(rows)
    assert lengths == [max(len(one.token_ids) for one in renderer.render(row)) for row in rows]
    (whole,) = renderer_of(merging).render(rows[0])
    cut = renderer_of(merging, max_length=whole.prompt_length + 2, truncation="right")
    assert cut.measure(rows[:1]) == [len(whole.token_ids)]
    (shown,) = cut.render(rows[0])
    assert shown.token_ids == whole.token_ids[: whole.prompt_length + 2]
    assert sum(shown.loss_mask) == 2
    (refused,) = renderer_of(merging, max_length=whole.prompt_length, truncation="right").measure(rows[:1])
    assert str(refused).startswith("t:1: no token of an answer is left to train within the first ")
    (refused,) = renderer.measure([conversation([{"role": "user", "content": "x " * 10**6}, TALK[1]])], 100)
    assert isinstance(refused, Overlong)
    assert "max_length is 100" in str(refused)


def test_it_pickles_for_workers_and_its_fingerprint_tells_settings_apart(merging):
    renderer = renderer_of(merging, turns="each")
    again = pickle.loads(pickle.dumps(renderer))
    assert again.render(conversation(TALK))[0].loss_mask == renderer.render(conversation(TALK))[0].loss_mask
    others = [
        renderer_of(merging),
        renderer_of(merging, QWEN3, turns="each"),
        renderer_of(merging, max_length=9, truncation="right"),
    ]
    assert len({one.fingerprint() for one in (renderer, *others)}) == 4
    assert again.fingerprint() == renderer.fingerprint()


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


# Pictures and videos


def shown_media(*kinds, text="How many?"):
    return {"role": "user", "content": [*({"type": kind} for kind in kinds), {"type": "text", "text": text}]}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_tokens_and_inputs_of_pictures_and_videos_are_the_processors_own(fresh_processor, picture, movie, family):
    processor = fresh_processor(family)
    renderer = Renderer(processor, max_pixels=112 * 112)
    media = (picture(60, 40), Video(movie(64, 48, 8)), picture(90, 120))
    messages = [
        shown_media("image", "video"),
        {"role": "assistant", "content": "Three."},
        shown_media("image", text="And <|here|>?"),
        {"role": "assistant", "content": "Four."},
    ]
    conversations = ConversationRenderer(renderer)
    row = conversation(messages, media=media)
    (shown,) = conversations.render(row)
    assert trained(processor.tokenizer, shown) == ["Three.<|im_end|>", "Four.<|im_end|>"]
    assert conversations.measure([row]) == [len(shown.token_ids)]
    whole = renderer.write_chat(messages, generation_prompt=False)
    inputs = renderer.require_vision().process(whole, renderer.load(row))
    assert inputs["input_ids"][0].tolist() == shown.token_ids
    assert {"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"} <= set(shown.model_inputs)
    for name, value in shown.model_inputs.items():
        assert torch.equal(value, inputs[name])
    assert torch.equal(shown.position_ids, renderer.position_ids(inputs["input_ids"][0], inputs))
    first, second = ConversationRenderer(renderer, turns="each").render(row)
    assert (second.token_ids, second.model_inputs.keys()) == (shown.token_ids, shown.model_inputs.keys())
    assert first.token_ids == shown.token_ids[: len(first.token_ids)]
    assert len(first.model_inputs["image_grid_thw"]) == 1


def test_a_pair_with_pictures_has_them_in_both_and_spelled_placeholders_stay_text(processor, picture):
    renderer = ConversationRenderer(Renderer(processor))
    row = conversation(
        [shown_media("image", text="<|image_pad|>?"), TALK[1]], media=(picture(60, 40),), rejected=[TALK[3]]
    )
    better, worse = renderer.render(row)
    prompt = Renderer(processor).render(Example("t:1", [shown_media("image")], row.media, ""))
    assert better.token_ids.count(processor.image_token_id) == prompt.token_ids.count(processor.image_token_id)
    for name, value in prompt.model_inputs.items():
        assert torch.equal(better.model_inputs[name], value)
        assert torch.equal(worse.model_inputs[name], value)
    assert torch.equal(better.position_ids[:, : better.prompt_length], worse.position_ids[:, : worse.prompt_length])


def test_placeholders_are_never_trained_and_pictures_are_never_cut(processor, picture):
    row = conversation([TALK[0], TALK[1], shown_media("image"), TALK[3]], media=(picture(60, 40),))
    (shown,) = ConversationRenderer(Renderer(processor), train_on_prompt=True).render(row)
    untrained = {token for token, own in zip(shown.token_ids[1:], shown.loss_mask[1:], strict=True) if not own}
    assert untrained == {processor.image_token_id}
    cut = ConversationRenderer(
        Renderer(processor), max_length=shown.token_ids.index(processor.image_token_id) + 1, truncation="right"
    )
    with pytest.raises(DataError, match=r"^t:1: cut at \d+ tokens, the conversation loses a picture"):
        cut.render(row)


def test_media_that_cannot_be_used_name_the_row(tokenizer, processor):
    row = conversation([shown_media("image"), TALK[1]], media=(b"junk",))
    with pytest.raises(DataError, match=r"^t:1: the row has pictures or videos, but the model reads text only"):
        ConversationRenderer(Renderer(tokenizer)).render(row)
    (refused,) = ConversationRenderer(Renderer(processor)).measure([row])
    assert isinstance(refused, MediaError)
    assert str(refused).startswith("t:1: ")
    (refused,) = ConversationRenderer(Renderer(processor)).measure([conversation(TALK, media=(b"",))])
    assert str(refused).startswith("t:1: 0 picture placeholders in the prompt for 1 pictures")


# Datasets


def read(row_id, row):
    if "messages" not in row:
        raise DataError(f"{row_id}: no messages")
    return Conversation(row_id, row["messages"], source="s")


def dataset_of(tokenizer, *rows, **options):
    settings = {"bad_rows": options.pop("bad_rows", "refuse"), "known_lengths": options.pop("known_lengths", None)}
    return ConversationDataset([*rows], renderer_of(tokenizer, **options), read, **settings)


def test_a_dataset_renders_rows_and_names_those_that_cannot_be_used(merging):
    rows = [{"messages": TALK}, {"messages": TALK[:1]}, {"messages": TALK[:2]}]
    dataset = dataset_of(merging, *rows, turns="each", bad_rows="skip", max_length=100)
    assert [len(dataset[index]) for index in range(len(dataset))] == [2, 1]
    assert [trained(merging, one) for one in dataset[0]] == [["There are 12.<|im_end|>"], ["Now 13.<|im_end|>"]]
    assert (dataset.summary.read, dataset.summary.kept, dataset.has_media) == (3, 2, False)
    assert "no answer to train" in dataset.summary.bad[0]
    assert dataset.digest != dataset_of(merging, *rows[2:]).digest
    with pytest.raises(DataError, match="1 of 3 rows cannot be used"):
        dataset_of(merging, *rows, max_length=100)


def test_what_is_over_the_limit_is_refused_left_out_or_cut(merging):
    rows = [{"messages": TALK[:2]}, {"messages": TALK}]
    (short,), (whole,) = (renderer_of(merging).render(conversation(row["messages"])) for row in rows)
    limit = len(whole.token_ids) - 3
    message = rf"1 of 2 rows are over data.max_length={limit} tokens \(the longest has {limit + 3} or more\)"
    for bad_rows in ("refuse", "skip"):
        with pytest.raises(DataError, match=message):
            dataset_of(merging, *rows, max_length=limit, bad_rows=bad_rows)
    dropped = dataset_of(merging, *rows, max_length=limit, truncation="drop")
    assert (len(dropped), dropped.summary.overlong, dropped.summary.cut) == (1, 1, 0)
    assert dropped[0][0].token_ids == short.token_ids
    assert len(list(dropped.left_out())) == 1
    cut = dataset_of(merging, *rows, max_length=limit, truncation="right")
    assert (len(cut), cut.summary.overlong, cut.summary.cut, cut.summary.longest) == (2, 0, 1, limit)
    assert cut[1][0].token_ids == whole.token_ids[:limit]
    assert not list(cut.left_out())


def test_lengths_of_conversations_are_cached_apart(merging, tmp_path):
    rows = [{"messages": TALK}] * 1000
    first = dataset_of(merging, *rows, max_length=100, known_lengths=tmp_path)
    again = dataset_of(merging, *rows, max_length=100, known_lengths=tmp_path)
    each = dataset_of(merging, *rows, max_length=100, known_lengths=tmp_path, turns="each")
    assert (first.summary, first.digest) == (again.summary, again.digest) == (each.summary, each.digest)
    row = conversation(TALK)
    known = KnownLengths(tmp_path / "x.sqlite", "")
    others = [replace(row, rejected=[TALK[1]]), replace(row, label=True), replace(row, template_kwargs={"a": 1})]
    assert len({known.key(one) for one in (row, *others)}) == 4
    assert known.key(replace(row, id="t:2")) == known.key(row)


def test_a_pair_of_several_turns_is_split_where_its_row_was(merging):
    chosen, rejected = list(TALK), [TALK[0], {"role": "assistant", "content": "None."}, *TALK[2:]]
    row = ConversationReader()("t:1", {"chosen": chosen, "rejected": rejected})
    better, worse = renderer_of(merging).render(row)
    assert trained(merging, better) == ["There are 12.<|im_end|>", "Now 13.<|im_end|>"]
    assert trained(merging, worse) == ["None.<|im_end|>", "Now 13.<|im_end|>"]


def test_a_text_that_is_a_special_token_stays_text_and_a_greeting_is_not_trained(merging):
    messages = [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "<|im_end|>"}, TALK[3]]
    (shown,) = renderer_of(merging).render(conversation(messages))
    assert shown.token_ids.count(merging.convert_tokens_to_ids("<|im_end|>")) == 3
    assert trained(merging, shown) == ["Now 13.<|im_end|>"]
    with pytest.raises(DataError, match=r"^t:1: the conversation has no answer to train"):
        renderer_of(merging).render(conversation(messages[:1]))
