"""Rendered prompts become messages again, with pictures where they stand, whatever template wrote them."""

import pytest

from r1_cli.runs.rendered import common_ends, place_media, question, split_messages

SYSTEM, ASKED, TOLD, LATER = "Be brief.", "How many?", "Five.", "Sure?"
FORMS = {
    "im": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\nFive."
    "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n",
    "header": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHow many?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "Five.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nSure?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "turn": "<bos><start_of_turn>system\nBe brief.<end_of_turn>\n<start_of_turn>user\nHow many?<end_of_turn>\n"
    "<start_of_turn>model\nFive.<end_of_turn>\n<start_of_turn>user\nSure?<end_of_turn>\n<start_of_turn>model\n",
    "brackets": "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]How many?[/INST]Five.</s>[INST]Sure?[/INST]",
    "bars": "<\uff5cbegin\u2581of\u2581sentence\uff5c>Be brief.<\uff5cUser\uff5c>How many?<\uff5cAssistant\uff5c>Five."
    "<\uff5cend\u2581of\u2581sentence\uff5c><\uff5cUser\uff5c>Sure?<\uff5cAssistant\uff5c>",
    "names": "<|system|>\nBe brief.<|end|>\n<|user|>\nHow many?<|end|>\n<|assistant|>\nFive.<|end|>\n<|user|>\nSure?"
    "<|end|>\n<|assistant|>\n",
    "words": "Be brief.\nUser: How many?\nAssistant: Five.\nUser: Sure?\nAssistant:",
}


@pytest.mark.parametrize("form", FORMS)
def test_roles_are_read_from_a_rendered_prompt(form: str) -> None:
    expected = [("system", SYSTEM), ("user", ASKED), ("assistant", TOLD), ("user", LATER)]
    assert [(role, text.strip()) for role, text in split_messages(FORMS[form])] == expected
    assert question(split_messages(FORMS[form])) == LATER


def test_a_prompt_without_roles_is_one_message() -> None:
    assert split_messages("Once upon <b>a</b> time") == [("prompt", "Once upon <b>a</b> time")]


@pytest.mark.parametrize(
    ("text", "media", "parts"),
    [
        (
            "A<image><image>B",
            ["a.png", "b.png"],
            [{"text": "A"}, {"media": "a.png"}, {"media": "b.png"}, {"text": "B"}],
        ),
        ("[IMG][IMG][IMG_BREAK][IMG][IMG][IMG_END]Q", ["a.png"], [{"media": "a.png"}, {"text": "Q"}]),
        ("<|vision_start|><|image_pad|><|vision_end|>Q", [], [{"media": None}, {"text": "Q"}]),
        (
            "<|vision_start|><|video_pad|><|vision_end|>Q<|vision_start|><|image_pad|><|vision_end|>",
            ["a.png", "v.webp"],
            [{"media": "v.webp"}, {"text": "Q"}, {"media": "a.png"}],
        ),
        ("no place for it", ["a.png"], [{"media": "a.png"}, {"text": "no place for it"}]),
        ("the tag <image> in a text", [], [{"text": "the tag <image> in a text"}]),
        ("<img src=x onerror=1>", [], [{"text": "<img src=x onerror=1>"}]),
        ("", [], [{"text": ""}]),
    ],
)
def test_pictures_stand_where_their_placeholders_do(text: str, media: list[str], parts: list[dict[str, str]]) -> None:
    assert place_media([("user", text)], media) == [{"role": "user", "parts": parts}]


def test_questions_share_whole_sentences_only() -> None:
    asked = ["Solve it.\nWhat is 10 plus 2? Think first. End.", "Solve it.\nWhat is 1 plus 3? Think first. End."]
    before, after = common_ends(asked)
    assert asked[0][before : len(asked[0]) - after] == "What is 10 plus 2? "
    shared = ["Tom has 3 pens. How many are there? Think.", "Ann has 5 hats. How many are there? Think."]
    assert common_ends(shared) == (0, len(" Think.")), "the question is shown, though all rows end with it"
    assert common_ends(asked[:1] * 2) == (0, 0)
    assert common_ends(["Same. ", "Same. "]) == common_ends([]) == (0, 0)
    assert common_ends(["Think. A", "Think. "]) == (0, 0)  # nothing would be left of the second
