"""Verifiers of a response's manner: format, length, repetition and language; and sums of verifiers."""

import sys

import pytest

from r1_rewards import RewardSpecError, combine, language, length, repetition
from r1_rewards import format as response_format
from r1_rewards.spec import check_options

GOOD = "<think>1+1</think> <answer>2</answer>"


@pytest.mark.parametrize(
    ("mode", "good", "bad"),
    [
        ("r1", GOOD + " bye", " " + GOOD),
        ("r1", "<think></think>so<answer></answer>", GOOD + GOOD),
        ("r1", GOOD, "<answer>2</answer><think>1+1</think>"),
        ("r1_nothink", "so <answer>2</answer>", "</answer>2<answer>"),
        ("r1v", GOOD, GOOD + "\n"),
        ("think", "<think>a</think> b", "<think><think>a</think>"),
        ("think_box", r"< think >a< / think > \boxed{2}", r"\boxed{2} <think>a</think>"),
        ("box", r"\boxed{\{2}", r"\boxed{2"),
    ],
)
def test_format_modes_accept_the_form_and_nothing_else(mode, good, bad):
    assert response_format.score(good, mode=mode).value == 1.0
    assert response_format.score(bad, mode=mode).value == 0.0


def test_format_takes_a_regular_expression_for_the_whole_response():
    assert response_format.score("a\nb", pattern="a.b").value == 1.0
    assert response_format.score("a\nb c", pattern="a.b").value == 0.0
    with pytest.raises(ValueError, match="not a regular expression"):
        response_format.score("a", pattern="(")
    with pytest.raises(ValueError, match="one of mode, pattern and schema"):
        response_format.score("a", pattern="a", mode="r1")
    with pytest.raises(ValueError, match="it must be one of r1, r1_nothink"):
        response_format.score("a", mode="R1")


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ('{"answer": 5}', 1),
        ('<think>{}</think><answer>{"answer": 5}</answer>', 1),
        ('Here:\n```json\n{"answer": 5}\n```\nDone.', 1),
        ('{"answer": "5"}', 0),
        ('{"answer": NaN}', 0),
        ('{"answer": 5', 0),
        ("[" * 100_000, 0),
        ("", 0),
    ],
)
def test_format_takes_a_json_schema(response, value):
    pytest.importorskip("jsonschema")
    schema = {"type": "object", "properties": {"answer": {"type": "number"}}, "required": ["answer"]}
    assert response_format.score(response, schema=schema).value == value


def test_a_wrong_schema_and_a_missing_library_are_errors_that_say_so(monkeypatch):
    pytest.importorskip("jsonschema")
    with pytest.raises(ValueError, match="schema: "):
        response_format.score("{}", schema={"type": "objet"})
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ImportError, match=r"r1-rewards\[json\]"):
        response_format.score("{}", schema={"type": "array"})


@pytest.mark.parametrize(("tokens", "value"), [(0, 0.0), (80, 0.0), (90, -1.0), (100, -2.0), (500, -2.0)])
def test_length_falls_in_the_buffer_down_to_the_factor(tokens, value):
    assert length.score("", max_length=100, buffer=20, factor=2.0, response_length=tokens).value == value


def test_length_counts_words_where_it_has_no_tokens_and_refuses_an_impossible_buffer():
    assert length.score("a b c", max_length=3, buffer=2).parts == {"overall": -1.0, "length": 3.0}
    with pytest.raises(ValueError, match="buffer must be above 0"):
        length.score("", max_length=3, buffer=4)


@pytest.mark.parametrize(
    ("text", "options", "value"),
    [
        ("a b a b a b", {"ngram": 2}, -0.6),
        ("a b c d", {"ngram": 2}, 0.0),
        ("a", {"ngram": 2}, 0.0),
        ("", {}, 0.0),
        ("好的好的好的", {"ngram": 2}, -0.6),
        ("x y " * 10, {"ngram": 2, "limit": 10, "factor": 0.5}, -0.5),
        ("x y " * 9, {"ngram": 2, "limit": 10}, 0.0),
        ("a_b a_b", {"ngram": 2, "limit": 2}, -1.0),
    ],
)
def test_repetition_punishes_repeated_runs_of_words(text, options, value):
    assert repetition.score(text, **options).value == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "code", "share"),
    [
        ("Die Antwort ist Köln.", "de", 1.0),
        ("答案 is 五", "zh", 0.6),
        ("これは本です", "ja", 1.0),
        ("это $x^2$ и \\frac{}{}", "ru", 1.0),
        ("<think>да</think>", "ru", 1.0),
        ("12 + 3 = 15", "th", 1.0),
        ("hello", "han", 0.0),
    ],
)
def test_language_is_the_share_of_letters_of_its_script(text, code, share):
    assert language.score(text, language=code).value == pytest.approx(share)
    assert language.score(text, language=code, minimum=0.7).value == float(share >= 0.7)


def test_an_unknown_language_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match="known are ar, "):
        language.score("a", language="xx")


def test_combine_adds_weighted_parts_and_keeps_each():
    parts = {"math": 0.9, "tags": {"reward": "format", "weight": 0.1, "mode": "box"}, "length": {"weight": 0.5} | ROOM}
    score = combine.score(r"\boxed{5}", "5", parts=parts, response_length=90)
    assert score.value == pytest.approx(0.75)
    assert dict(score.parts) == {
        "overall": score.value, "math": 1.0, "math/accuracy": 1.0, "math/format": 1.0, "tags": 1.0, "tags/format": 1.0,
        "length": -0.5, "length/length": 90.0,
    }  # fmt: skip


ROOM = {"max_length": 100, "buffer": 20}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "must map 1 to 32 names"),
        ({"mth": 1.0}, "parts.mth: .*did you mean 'math'"),
        ({"math": "much"}, "parts.math: the weight is 'much'"),
        ({"math": 0}, "a number other than 0"),
        ({"math": {"digit": 3}}, "parts.math: .*takes no 'digit'"),
        ({"x": {"reward": "combine"}}, "name a verifier"),
        ({"x": {"reward": "./no.py:f"}}, "parts.x: .*there is no file"),
    ],
)
def test_combine_refuses_what_it_cannot_add_by_name(parts, message):
    with pytest.raises(RewardSpecError, match=message):
        check_options("combine", {"parts": parts})
