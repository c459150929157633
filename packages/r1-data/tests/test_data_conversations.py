"""Tests of rows of fine-tuning: each published format is found by itself and read to the same conversation."""

import json
import pickle

import pyarrow
import pyarrow.parquet
import pytest

from r1_data.conversations import ConversationReader, OtherColumns, Tags
from r1_data.formats import CONVERSATION_FORMATS, CONVERSATION_NAMES, Columns, detect
from r1_data.sources import read_rows
from r1_data.types import BadPair, DataError, EmptyCell, MarkerMismatch, MissingColumn, NoAnswer, RoleOrder

ASK, REPLY = "How many?", "<think>Count.</think>3"
USER, ANSWER = {"role": "user", "content": ASK}, {"role": "assistant", "content": REPLY}
WORSE = {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Think."}
HUMAN, GPT = {"from": "human", "value": ASK}, {"from": "gpt", "value": REPLY}
TOOL = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
read = ConversationReader()

ROWS = {
    "messages": {"messages": [USER, ANSWER]},
    "completion": {"prompt": ASK, "completion": REPLY},
    "implicit_completion": {"completion": [USER, ANSWER], "label": True},
    "sharegpt": {"conversations": [HUMAN, GPT]},
    "alpaca": {"instruction": ASK, "input": "", "output": REPLY},
    "lmm_r1": {"message": json.dumps([USER, ANSWER]), "datasource": "shapes"},
    "r1v": {"problem": ASK, "solution": REPLY},
    "pairs": {"prompt": [USER], "chosen": [ANSWER], "rejected": [WORSE]},
    "implicit_pairs": {"chosen": [USER, ANSWER], "rejected": [USER, WORSE]},
}


@pytest.mark.parametrize("name", CONVERSATION_NAMES)
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_each_format_is_found_and_says_the_same(tmp_path, name, kind):
    path, row = tmp_path / f"train.{kind}", ROWS[name]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps(row) + "\n")
    [(row_id, read_back)] = read_rows(str(path))
    assert detect(read_back, Columns("messages", ""), formats=CONVERSATION_FORMATS).format == name
    found = pickle.loads(pickle.dumps(read))(row_id, read_back)
    assert (found.id, found.messages, found.media) == (row_id, [USER, ANSWER], ())
    assert found.rejected == ([WORSE] if "pairs" in name else None)
    assert found.label is (True if name == "implicit_completion" else None)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "completion": [ANSWER]},
        {"messages": json.dumps([USER, ANSWER])},
        {"prompt": ASK, "messages": [USER, ANSWER], "prompt_id": "7"},  # of ultrachat
        {"question": ASK, "response": REPLY},
        {"conversations": json.dumps([HUMAN, GPT])},
        {"conversations": [{"from": "user", "value": ASK}, {"from": "assistant", "value": REPLY}]},
        {"conversations": [USER, ANSWER]},
        {"instruction": ASK, "input": None, "output": REPLY, "history": None, "system": float("nan")},
        {"problem": ASK, "thinking": "<think>Count.</think>", "solution": "3", "image": None},
        {"messages": [{**USER, "tool_calls": None}, {**ANSWER, "name": None}], "tools": None},
    ],
    ids=str,
)
def test_variants_of_formats_say_the_same(row):
    found = read("t:1", row)
    same = REPLY.replace(">3", ">\n\n3") if "thinking" in row else REPLY
    assert found.messages == [USER, {**ANSWER, "content": same}]


def test_an_alpaca_row_has_system_history_and_input():
    row = {"instruction": "Add.", "input": "1 + 2", "output": "3", "system": "Think.", "history": [["Hi", "Hello"]]}
    turns = [("system", "Think."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Add.\n1 + 2"), ("assistant", "3")]
    found = read("t:1", row)
    assert [(message["role"], message["content"]) for message in found.messages] == turns
    assert found.metadata == {}


def test_sharegpt_has_tools_calls_and_observations():
    call = {"name": "f", "arguments": {"x": 1}}
    turns = [
        HUMAN,
        {"from": "function_call", "value": "<think>Look.</think>\n" + json.dumps(call)},
        {"from": "observation", "value": "3"},
        GPT,
    ]
    found = read("t:1", {"conversations": turns, "tools": json.dumps([TOOL]), "system": "Think."})
    assert found.tools == ({"type": "function", "function": TOOL},)
    calls = [{"type": "function", "function": call}]
    asked = {"role": "assistant", "content": "<think>Look.</think>", "tool_calls": calls}
    assert found.messages == [SYSTEM, USER, asked, {"role": "tool", "content": "3"}, ANSWER]


def test_calls_of_openai_become_objects_without_arrows_nulls():
    function = {"name": "f", "arguments": {"x": 1, "y": None}}
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": function}]}]
    turns += [{"role": "tool", "tool_call_id": "a", "content": "3"}, ANSWER]
    tool = {
        "type": "function",
        "function": {**TOOL, "parameters": {"properties": {"x": {"type": "string"}, "y": None}}},
    }
    found = read("t:1", {"messages": turns, "tools": [tool], "enable_thinking": False})
    assert found.messages[1]["content"] == ""
    called = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert found.messages[1]["tool_calls"] == [called]
    assert found.tools[0]["function"]["parameters"] == {"properties": {"x": {"type": "string"}}}
    assert found.template_kwargs == {"enable_thinking": False}
    turns[1]["tool_calls"][0]["function"] = {"name": "f", "arguments": '{"x": 1}'}
    assert read("t:1", {"messages": turns}).messages[1]["tool_calls"] == [called]


def test_tags_and_columns_may_be_named():
    tags = Tags("speaker", "text", "q", "a", "out", "call", "sys")
    turns = [{"speaker": "sys", "text": "Think."}, {"speaker": "q", "text": ASK}, {"speaker": "a", "text": REPLY}]
    reader = ConversationReader(Columns("dialog", ""), explicit_columns=True, tags=tags)
    assert reader("t:1", {"dialog": turns}).messages == [SYSTEM, USER, ANSWER]
    others = OtherColumns(rejected="bad", system="sys", query="more", label="good")
    reader = ConversationReader(Columns("question", "answer"), explicit_columns=True, others=others)
    row = {"question": ASK, "answer": REPLY, "bad": "4", "sys": "Think.", "more": "Look."}
    found = reader("t:1", row)
    assert found.messages == [SYSTEM, {**USER, "content": f"{ASK}\nLook."}, ANSWER]
    assert found.rejected == [WORSE]


def test_pictures_stand_where_their_markers_or_parts_are():
    turns = [{"role": "user", "content": f"<image>{ASK}"}, ANSWER, {"role": "user", "content": "And <image>?"}, ANSWER]
    found = read("t:1", {"messages": turns, "images": [b"a", b"b"]})
    assert found.media == (b"a", b"b")
    assert found.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": ASK}]
    assert found.messages[2]["content"][1] == {"type": "image"}
    parts = [{"type": "image", "image": b"a"}, {"type": "text", "text": ASK}]
    found = read("t:1", {"prompt": [{"role": "user", "content": parts}], "completion": [ANSWER]})
    assert (found.media, found.messages[0]["content"][0]) == ((b"a",), {"type": "image"})
    found = read("t:1", {"prompt": ASK, "chosen": "see <image>", "rejected": "4", "images": [b"a"]})
    assert found.media == (b"a",)
    assert found.messages[1]["content"] == "see <image>"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASK, "chosen": REPLY, "rejected": "4"},
        {"prompt": ASK, "chosen": [USER, ANSWER], "rejected": [USER, WORSE], "messages": [USER, ANSWER]},
        {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "4"}},
        {"messages": [USER], "chosen": ANSWER, "rejected": WORSE},
        {"instruction": ASK, "input": "", "chosen": REPLY, "rejected": "4"},
        {"chosen": f"\n\nHuman: {ASK}\n\nAssistant: {REPLY}", "rejected": f"\n\nHuman: {ASK}\n\nAssistant: 4"},
        {"chosen": f"{ASK} {REPLY}", "rejected": f"{ASK} 4"},
    ],
    ids=str,
)
def test_pairs_share_their_prompt(row):
    found = read("t:1", row)
    assert (found.messages, found.rejected) == ([USER, ANSWER], [WORSE])


def test_a_pair_may_differ_after_several_turns():
    turns = [USER, ANSWER, {"role": "user", "content": "Sure?"}]
    found = read("t:1", {"chosen": [*turns, ANSWER], "rejected": [*turns, WORSE]})
    assert (found.messages, found.rejected, found.prompt_messages) == ([*turns, ANSWER], [WORSE], 3)


def test_answers_in_a_prompt_of_messages_are_not_trained():
    turns = [USER, WORSE, {"role": "user", "content": "Sure?"}]
    found = read("t:1", {"prompt": turns, "completion": [ANSWER]})
    assert found.messages == [USER, {**WORSE, "train": False}, turns[2], ANSWER]
    kept = {**WORSE, "weight": 1}
    assert read("t:1", {"prompt": [USER, kept, turns[2]], "completion": [ANSWER]}).messages[1] == kept
    assert found.prompt_messages is None


def test_the_loss_chooses_what_is_read_of_a_pair_and_of_a_label():
    pair, labelled = ROWS["pairs"], {"prompt": ASK, "completion": REPLY, "label": False}
    assert ConversationReader(wanted="answers")("t:1", pair).rejected is None
    assert ConversationReader(wanted="labels")("t:1", labelled).label is False
    for wanted, row, message in (
        ("answers", labelled, "labelled as undesired"),
        ("pairs", labelled, "the loss compares two"),
        ("labels", pair, "has no label"),
    ):
        with pytest.raises(BadPair, match=message):
            ConversationReader(wanted=wanted)("t:1", row)


@pytest.mark.parametrize(
    ("row", "label"),
    [
        ({"messages": [USER, ANSWER], "kto_tag": False}, False),
        ({"messages": [USER, ANSWER], "label": True}, True),
        ({"messages": [USER, ANSWER], "label": "3"}, None),  # a ground truth
        ({"prompt": ASK, "completion": REPLY, "label": 0}, False),
    ],
)
def test_labels(row, label):
    assert read("t:1", row).label is label


def test_prompts_of_the_configuration_are_added():
    reader = ConversationReader(system_prompt="Think.", format_prompt="{{ content }} {{ hint }}", source="here")
    found = reader("t:1", {"messages": [USER, ANSWER], "hint": "Look."})
    assert found.messages == [SYSTEM, {**USER, "content": f"{ASK} Look."}, ANSWER]
    assert (found.metadata, found.source) == ({"hint": "Look.", "data_source": "here"}, "here")
    own = {"role": "system", "content": "Own."}
    assert reader("t:1", {"messages": [own, USER, ANSWER], "hint": ""}).messages[0] == own


NAN = float("nan")
FAULTS = [
    ({"messages": [USER]}, NoAnswer, "has no answer: .*r1 sample"),
    ({"messages": [USER, ANSWER, USER]}, NoAnswer, "ends with a message of the role user, which nothing answers"),
    ({"messages": [USER, {**ANSWER, "content": " \n"}]}, NoAnswer, r"an empty answer \(message 2\); fill or remove"),
    ({"messages": [USER, {**ANSWER, "content": None}]}, NoAnswer, "an empty answer"),
    ({"prompt": ASK, "completion": ""}, NoAnswer, "an empty answer"),
    ({"messages": []}, NoAnswer, "has no answer"),
    ({"messages": [USER, USER, ANSWER]}, RoleOrder, r"message 2 is out of order: two .*\(roles: user user\); join"),
    ({"messages": [USER, ANSWER, ANSWER]}, RoleOrder, "message 3 .*follows no user"),
    ({"messages": [ANSWER]}, RoleOrder, "message 1 .*follows no user"),
    ({"messages": [USER, {"role": "tool", "content": "3"}, ANSWER]}, RoleOrder, "message 2 .*follows no call"),
    ({"messages": [USER, SYSTEM, ANSWER]}, RoleOrder, "message 2 .*only at the beginning"),
    ({"conversations": [{"from": "bob", "value": "x"}, GPT]}, DataError, "role 'bob', .* none of human.*data.tags"),
    ({"messages": [{"role": "user", "content": f"<image>{ASK}"}, ANSWER], "images": []}, MarkerMismatch, "1 <image>"),
    ({"messages": [{"role": "user", "content": "<image><image>"}, ANSWER], "images": [b"a"]}, MarkerMismatch, "2 <im"),
    ({"message": "[{'role'"}, DataError, "no JSON"),
    ({"message": ASK}, DataError, "'message' must hold messages, and holds text that is no JSON.*json.dumps"),
    ({"conversations": '[{"from": "human"'}, DataError, "column 'conversations': the text of messages is no JSON"),
    ({"messages": [USER, ANSWER], "tools": "[{"}, DataError, "column 'tools' is no JSON.*json.dumps"),
    ({"messages": [USER, ANSWER], "tools": [{"x": 1}]}, DataError, "a tool without a name"),
    ({"conversations": [HUMAN, {"from": "function_call", "value": "f(1)"}]}, DataError, "call of message 2 is no JSON"),
    ({"prompt": NAN, "completion": REPLY}, EmptyCell, "column 'prompt': holds no message but NaN"),
    ({"prompt": ASK, "completion": NAN}, EmptyCell, "column 'completion': holds no message but NaN"),
    ({"messages": [USER, {**ANSWER, "content": NAN}]}, EmptyCell, "message 2 holds NaN"),
    ({"prompt": ASK, "completion": None}, EmptyCell, "'completion' is empty"),
    ({"prompt": ASK, "chosen": REPLY, "rejected": REPLY}, BadPair, "equal, so that there is nothing to prefer; remove"),
    ({"prompt": ASK, "chosen": REPLY, "rejected": " "}, NoAnswer, "rejected has an empty answer"),
    ({"prompt": ASK, "chosen": REPLY, "rejected": None}, EmptyCell, "rejected column 'rejected' is empty"),
    ({"prompt": ASK, "chosen": "", "rejected": REPLY}, NoAnswer, "chosen has an empty answer"),
    ({"chosen": [USER, ANSWER], "rejected": [SYSTEM, USER, WORSE]}, BadPair, "different prompts"),
    ({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER, USER, WORSE]}, BadPair, "different prompts"),
    ({"chosen": [USER, ANSWER], "rejected": [WORSE]}, BadPair, "one of chosen and rejected begins with the prompt"),
    ({"prompt": "Why?", "chosen": [USER, ANSWER], "rejected": [USER, WORSE]}, BadPair, "says 'Why\\?'"),
    ({"chosen": [ANSWER], "rejected": [WORSE]}, BadPair, "the row has no prompt; data.prompt_key"),
    ({"chosen": "Yes", "rejected": "No"}, BadPair, "without a common beginning"),
    ({"prompt": ASK, "completion": REPLY, "kto_tag": "maybe"}, DataError, "'kto_tag' must be true or false"),
    ({"instruction": ASK, "output": REPLY, "history": [["Hi"]]}, DataError, "pairs of a question and its answer"),
    ({"prompt": ASK, "completion": "\ud800"}, DataError, "half of a surrogate pair"),
    ({"text": ASK}, MissingColumn, "columns found: text.*data.messages_key"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "kind", "message"), FAULTS, ids=[message for _, _, message in FAULTS])
def test_a_fault_names_row_and_way_out(row, kind, message):
    with pytest.raises(kind, match=f"(?s)^t:1: .*{message}"):
        read("t:1", row)


def test_a_pair_with_different_pictures_is_refused():
    def turns(picture, answer):
        return [{"role": "user", "content": [{"type": "image", "image": picture}]}, answer]

    row = {"chosen": turns(b"a", ANSWER), "rejected": turns(b"a", WORSE)}
    assert read("t:1", row).media == (b"a",)
    with pytest.raises(BadPair, match="different pictures or videos"):
        read("t:1", {**row, "rejected": turns(b"b", WORSE)})
    drawn = {"role": "assistant", "content": [{"type": "image", "image": b"c"}]}
    with pytest.raises(BadPair, match="rejected holds pictures"):
        read("t:1", {**row, "rejected": turns(b"a", drawn)})


@pytest.mark.parametrize(
    ("row", "truth"),
    [
        ({"prompt": [USER], "answer": "3"}, "answer"),
        ({"prompt": [USER], "reward_model": {"ground_truth": "3"}, "data_source": "x"}, "reward_model.ground_truth"),
        ({"problem": ASK, "solution": "<answer>3</answer>"}, "solution"),
        ({"question": ASK, "answer": "3"}, "answer"),
    ],
)
def test_a_prompt_with_a_ground_truth_alone_is_refused_with_the_way_out(row, truth):
    with pytest.raises(NoAnswer, match=rf"^t:1: holds a prompt .*ground truth \({truth}\).*r1 train.*r1 sample.*_key"):
        read("t:1", row)


def test_a_ground_truth_that_is_named_is_the_answer():
    reader = ConversationReader(Columns("question", "answer"), explicit_columns=True)
    assert reader("t:1", {"question": ASK, "answer": REPLY}).messages == [USER, ANSWER]
    reader = ConversationReader(Columns("extra_info.question", "extra_info.answer"), explicit_columns=True)
    assert reader("t:1", {"extra_info": {"question": ASK, "answer": REPLY}}).messages == [USER, ANSWER]


def test_a_missing_picture_is_named(tmp_path):
    reader = ConversationReader(image_dir=str(tmp_path))
    with pytest.raises(DataError, match=r"^t:1: .*leads out of the picture folder"):
        reader("t:1", {"messages": [{"role": "user", "content": "<image>"}, ANSWER], "images": ["../../a.png"]})
