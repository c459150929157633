"""Tests of messages: layouts, format prompts, markers, and rows that must be refused."""

from pathlib import Path

import pytest
from PIL import Image

from r1_data.formats import Columns, detect_columns
from r1_data.messages import compile_format_prompt, to_example
from r1_data.references import Video
from r1_data.types import DataError

EASYR1 = Columns("problem", "answer", "images", "videos")
IMAGE, ROW = {"type": "image"}, "train.jsonl:17"


def text(value: str) -> dict:
    return {"type": "text", "text": value}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["problem", "answer", "images"], Columns("problem", "answer")),
        (["question", "answer"], Columns("question", "answer")),
        (["prompt", "answer"], Columns("prompt", "answer")),
        (["prompt", "problem", "answer"], Columns("prompt", "answer")),
        (["problem", "answer", "image"], Columns("problem", "answer", images="image")),
        (["prompt", "answer", "video"], Columns("prompt", "answer", videos="video")),
        (["text", "label"], Columns()),
    ],
)
def test_known_layouts_are_detected(keys, expected):
    assert detect_columns(keys, Columns(), explicit=False) == expected


def test_explicit_prompt_and_answer_columns_are_never_replaced():
    configured = Columns("ask", "reply")
    assert detect_columns(["problem", "answer", "image"], configured, explicit=True) == Columns(
        "ask", "reply", images="image"
    )


def test_easyr1_row_becomes_content_items_with_media_in_order():
    row = {"problem": "<image>Left or <image> right?", "answer": "left", "images": [b"1", b"2"], "source": "s"}
    example = to_example(ROW, row, EASYR1)
    assert example.messages == [{"role": "user", "content": [IMAGE, text("Left or "), IMAGE, text(" right?")]}]
    assert (example.id, example.media, example.ground_truth) == (ROW, (b"1", b"2"), "left")
    assert example.metadata == {"source": "s"}


def test_gsm8k_row_keeps_its_answer_as_published():
    row = {"question": "How many?", "answer": "9 + 9 = <<9+9=18>>18\n#### 18"}
    example = to_example(ROW, row, detect_columns(row, Columns(), explicit=False))
    assert example.messages == [{"role": "user", "content": "How many?"}]
    assert example.ground_truth == row["answer"]


@pytest.mark.parametrize(
    ("answer", "expected"), [("007", "007"), (18, "18"), (0, "0"), (0.5, "0.5"), (["é", 2], '["é", 2]'), ("", "")]
)
def test_answers_become_text(answer, expected):
    assert to_example(ROW, {"prompt": "?", "answer": answer}, Columns()).ground_truth == expected


@pytest.mark.parametrize("images", [[b"1"], b"1", {"bytes": b"1", "path": None}])
def test_pictures_without_marker_come_first(images):
    example = to_example(ROW, {"problem": "How many?", "answer": "3", "images": images}, EASYR1)
    assert example.messages[0]["content"] == [IMAGE, text("How many?")]
    assert example.media == (b"1",)


@pytest.mark.parametrize("images", [None, [], "absent"])
def test_row_without_pictures_is_text(images):
    row = {"problem": "1+1?", "answer": "2", "images": images}
    if images == "absent":
        del row["images"]
    example = to_example(ROW, row, EASYR1)
    assert (example.messages[0]["content"], example.media) == ("1+1?", ())


def test_openai_messages_keep_their_turns_and_system_message():
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "name": None},
        {"role": "user", "content": [text("What is "), {"type": "text", "text": "this?", "image": None}]},
    ]
    example = to_example(ROW, {"prompt": turns, "answer": "x"}, Columns(), system_prompt="Ignored.")
    assert [m["role"] for m in example.messages] == ["system", "user", "assistant", "user"]
    assert example.messages[3]["content"] == "What is this?"
    assert example.messages[0]["content"] == "Be brief."
    assert "name" not in example.messages[2]


def test_image_parts_take_pictures_from_the_column_or_bring_their_own():
    parts = [IMAGE, text("Same as "), {"type": "image", "image": None}]
    row = {"prompt": [{"role": "user", "content": parts}], "answer": "x", "images": [b"1", b"2"]}
    assert to_example(ROW, row, Columns()).media == (b"1", b"2")
    image = Image.new("RGB", (2, 2))
    own = [{"type": "image", "image": image}, {"type": "image_url", "image_url": {"url": "a.png"}}, text("?")]
    example = to_example(ROW, {"prompt": [{"role": "user", "content": own}], "answer": "x"}, Columns(), image_dir="/p")
    assert example.messages[0]["content"] == [IMAGE, IMAGE, text("?")]
    assert (example.media[0], str(example.media[1])) == (image, "/p/a.png")


def test_system_prompt_is_put_in_front():
    example = to_example(ROW, {"prompt": "Hi", "answer": "x"}, Columns(), system_prompt="Think.")
    assert example.messages[0] == {"role": "system", "content": "Think."}


def test_format_prompt_sees_content_and_every_column_and_may_move_the_marker():
    template = compile_format_prompt("{{ content | trim }} ({{ unit }})\nRow: {{ problem }}\n\n")
    row = {"problem": "<image>How long? ", "answer": "3", "images": [b"1", b"2"], "unit": "cm"}
    example = to_example(ROW, row, EASYR1, format_prompt=template)
    assert example.messages[0]["content"] == [IMAGE, text("How long? (cm)\nRow: "), IMAGE, text("How long? ")]


def test_format_prompt_applies_to_the_last_user_message_only():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    template = compile_format_prompt("[{{ content }}]")
    example = to_example(ROW, {"prompt": turns, "answer": "x"}, Columns(), format_prompt=template)
    assert [message["content"] for message in example.messages] == ["a", "b", "[c]"]


def test_rows_are_not_changed():
    turns = [{"role": "user", "content": "a"}]
    row = {"prompt": turns, "answer": "x", "images": [b"1"]}
    to_example(ROW, row, Columns(), format_prompt=compile_format_prompt("{{ content }}!"), system_prompt="s")
    assert row == {"prompt": [{"role": "user", "content": "a"}], "answer": "x", "images": [b"1"]}


USER = {"role": "user", "content": "?"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "?", "solution": "2"}, "no answer column 'answer'; columns found: prompt, solution"),
        ({"answer": "2", "text": "?"}, "no prompt column 'prompt'; columns found: answer, text"),
        ({"prompt": "?", "answer": None}, "the answer column 'answer' is empty"),
        ({"prompt": None, "answer": "2"}, "the prompt column 'prompt' is empty"),
        ({"prompt": 5, "answer": "2"}, "a prompt must be text or a list of messages, found 5"),
        ({"prompt": [], "answer": "2"}, "an empty list: no messages"),
        ({"prompt": ["hi"], "answer": "2"}, "a message must have 'role' and 'content', found 'hi'"),
        ({"prompt": [{"role": "user"}], "answer": "2"}, "the content of a message must be text or a list"),
        ({"prompt": [{"role": "user", "content": [{"type": "audio"}]}], "answer": "2"}, "a content part must be"),
        ({"prompt": [USER, {"role": "assistant", "content": "!"}], "answer": "2"}, "last message is the assistant's"),
        ({"prompt": "<image><image>?", "answer": "2", "images": [b"1"]}, "2 <image> markers but 1 pictures"),
        ({"prompt": "<image>?", "answer": "2", "images": [b"1", b"2"]}, "1 <image> markers but 2 pictures"),
        ({"prompt": "<image>?", "answer": "2", "images": []}, "1 <image> markers but 0 pictures in column 'images'"),
        ({"prompt": "?", "answer": "2", "images": [None]}, "a picture must be bytes"),
        ({"prompt": "?", "answer": "2", "images": ["../x.png"]}, "leads out of the picture folder"),
        ({"prompt": "<video>?", "answer": "2", "videos": None}, "1 <video> markers but 0 videos in column 'videos'"),
        ({"prompt": "<video>?", "answer": "2", "videos": ["a.mp4", "b.mp4"]}, "1 <video> markers but 2 videos"),
        ({"prompt": "?", "answer": "2", "videos": [[]]}, "a video of no frames"),
        (
            {
                "prompt": [{"role": "user", "content": [{"type": "image", "image": b"1"}]}],
                "answer": "2",
                "images": [b"1"],
            },
            "pictures stand both in the messages and in column 'images'",
        ),
    ],
)
def test_rows_that_cannot_be_used_are_named_with_the_reason(row, message):
    with pytest.raises(DataError, match=rf"^train\.jsonl:17: .*{message}"):
        to_example(ROW, row, Columns(), image_dir="/pictures")


def test_broken_format_prompt_names_itself_and_the_line():
    with pytest.raises(DataError, match=r"math\.jinja, line 2"):
        compile_format_prompt("Solve\n{% if %}", "math.jinja")


@pytest.mark.parametrize("template", ["{{ problm }}", "{{ answer + 1 }}", "{{ ''.__class__.__mro__[1] }}"])
def test_format_prompt_that_cannot_be_filled_names_the_row(template):
    with pytest.raises(DataError, match=r"^train\.jsonl:17: the format prompt cannot be filled"):
        to_example(ROW, {"prompt": "?", "answer": "2"}, Columns(), format_prompt=compile_format_prompt(template))


def test_format_prompt_without_a_user_message_is_refused():
    row = {"prompt": [{"role": "system", "content": "s"}], "answer": "2"}
    with pytest.raises(DataError, match="no user message"):
        to_example(ROW, row, Columns(), format_prompt=compile_format_prompt("{{ content }}"))


def test_pictures_and_videos_stand_where_their_markers_do():
    row = {"prompt": "a<video>b<image>c<video>", "answer": "1", "images": [b"p"], "videos": ["v.mp4", [b"f", b"g"]]}
    example = to_example("t:1", row, Columns())
    assert example.media == (Video(Path("v.mp4")), b"p", Video((b"f", b"g")))
    kinds = [item.get("text", item["type"]) for item in example.messages[0]["content"]]
    assert kinds == ["a", "video", "b", "image", "c", "video"]


def test_a_marker_of_a_kind_without_a_column_is_text_beside_pictures():
    example = to_example("t:1", {"prompt": "<image><video>", "answer": "1", "images": [b"p"]}, Columns())
    assert example.messages[0]["content"] == [IMAGE, text("<video>")]


def test_media_without_markers_come_first_pictures_before_videos():
    example = to_example("t:1", {"prompt": "?", "answer": "1", "images": [b"p"], "videos": "v.mp4"}, Columns())
    assert example.media == (b"p", Video(Path("v.mp4")))


def test_video_parts_of_messages_are_read_where_they_stand():
    parts = [
        {"type": "video_url", "video_url": {"url": "file:///v.mp4"}},
        {"type": "video", "video": [b"f"], "fps": 2.0},
        {"type": "text", "text": "?"},
    ]
    example = to_example("t:1", {"prompt": [{"role": "user", "content": parts}], "answer": "1"}, Columns())
    assert example.media == (Video(Path("/v.mp4")), Video((b"f",), 2.0))


def test_a_prompt_that_says_it_is_formatted_is_not_formatted_again() -> None:
    template = compile_format_prompt("{{ content }}!")
    for marked, shown in ((True, "?"), (False, "?!"), (None, "?!"), ("yes", "?!")):
        row = {"prompt": "?", "answer": "2", "prompt_is_formatted": marked}
        (message,) = to_example(ROW, row, Columns(), format_prompt=template).messages
        assert message["content"] == shown
