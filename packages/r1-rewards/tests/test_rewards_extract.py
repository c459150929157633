"""Extraction finds the final answer and stays linear."""

import pytest

from r1_rewards.reading import extract
from r1_rewards.reading.number import parse_number


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"<think>\boxed{4}</think> so \boxed{5}", "5"),
        (r"\boxed{\frac{1}{\sqrt{2}}} done", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{4} and then \boxed{5", "4"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{ }", ""),
        (r"a } stray \boxed{5}}", "5"),
        (r"\\boxed{5}", "5"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        ("<answer>1</answer> no <answer> 2 </answer>", "2"),
        ("It is 4.\n#### 18\n", "18"),
        ("Answer: 4\n**Answer:** $x=5$", "$x=5$"),
        ("Answer:\n5", "5"),
        ("The answer is 3.14. That was easy.", "3.14"),
        ("so 7 apples, minus 3", "3"),
        ("it falls to -1,234.5 degrees", "-1,234.5"),
        ("ten - 3/4", "3/4"),
        ("no idea", None),
        ("", None),
    ],
)
def test_final_answer_is_the_last_and_most_explicit_one(response, answer):
    assert extract.final_answer(response) == answer


@pytest.mark.parametrize(
    "unit", [r"\boxed{", "{", "}", "<answer>", "#### ", "answer is ", "answer" + " " * 50, "1,", "- ", "\n", "😀"]
)
def test_a_megabyte_of_anything_is_searched(unit):
    response = unit * (1_000_000 // len(unit)) + r"\boxed{7}"
    assert extract.final_answer(response) == "7"
    extract.final_answer(response[: -len(r"\boxed{7}")])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("18.0", "18"),
        ("$1,234.50", "1234.5"),
        ("50%", "50"),
        ("7.", "7"),
        (".5", "1/2"),
        ("1.2e3", "1200"),
        ("−3", "-3"),
    ],
)
def test_numbers_written_differently_are_equal(left, right):
    assert parse_number(left) == parse_number(right) is not None


@pytest.mark.parametrize("text", ["12,34", "", ".", "x", "1/0", "1e9999", "9" * 401, "1 or 2", "٥"])
def test_what_is_not_a_plain_number_is_none(text):
    assert parse_number(text) is None


def test_an_answer_is_written_with_the_first_of_several_ground_truths():
    assert extract.write_answer("<think> <answer>", '["red", "scarlet"]').endswith("<answer>red</answer>")
    assert extract.write_answer("nothing around it", "[1, 2]") == "[1, 2]"
    assert extract.write_answer("nothing around it", "") == ""
