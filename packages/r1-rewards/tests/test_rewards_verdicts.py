"""Verdicts by name: what a published grader says, right or wrong, and without its dangers."""

import pytest

from r1_rewards import (
    dapo,
    geo3k,
    gsm8k_verl,
    lmm_r1,
    math_dapo,
    math_easyr1,
    math_verl,
    prime_math,
    r1v_easyr1,
    search_r1,
)
from r1_rewards.reading import expression, prm800k
from r1_rewards.reading.guards import refusal


def test_dapo_pays_one_or_minus_one_and_punishes_length():
    options = {"max_response_length": 1000, "overlong_buffer_length": 200, "overlong_penalty_factor": 1.0}
    assert dapo.score("so\nAnswer: 5 cm", "5", response_length=850, **options).parts == {
        "overall": 0.75, "accuracy": 1.0, "overlong": -0.25, "accuracy_normalized": 1.0,
    }  # fmt: skip
    assert dapo.score("Answer: 4", "5").value == -1.0
    assert dapo.score("Answer: 5\n" + "x" * 300, "5").value == -1.0


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        (r"x = \text{5 cm}", "5"),
        (r"$\frac12$", r"\frac{1}{2}"),
        ("10,000", "10000"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"the $x$ of $y$", "x"),
        (r"\boxed{\textbf{A}}", "A"),
        (r"\text{a" * 3, r"\text{a" * 3),
    ],
)
def test_dapo_normalises_as_minerva_does(answer, normal):
    assert dapo.normalise(answer) == normal


def test_verdicts_keep_the_errors_that_figures_were_published_with():
    assert math_dapo.score("Answer: 12,34", "1234").value == 1.0
    assert math_dapo.score("Answer: 0.5", r"\frac{1}{2}").value == -1.0
    assert math_dapo.score(r"Answer: 4 \boxed{5}", "5", strict_box=True).value == 1.0
    assert math_verl.score(r"\boxed{0.5}", r"\frac12").value == 1.0
    assert math_verl.score(r"\boxed{0.25}", r"\frac14").value == 0.0
    assert math_easyr1.score(r"<think>a</think> \boxed{2^{10}}", "1024").value == pytest.approx(0.1)
    assert math_easyr1.score(r"<think>a</think> \boxed{x+1}", "1+x").value == 1.0
    assert geo3k.score(r"<think>a</think> \boxed{12\sqrt{2}}", r"12 \sqrt 2").value == 1.0
    assert geo3k.score(r"\boxed{12}", "12").value == 0.9
    assert r1v_easyr1.score("<think>a</think><answer>0.5</answer>", r"\frac{1}{2}").value == 1.0
    assert prime_math.score("The answer is 3.1416", r"\pi").value == 1.0
    assert prime_math.score("The answer is x*2", "2x+1").value == 0.0
    assert gsm8k_verl.score("#### 1,200", "1200").value == 1.0
    assert gsm8k_verl.score("so 5.", "5", method="flexible").value == 0.0
    assert search_r1.score("<answer>The Nile</answer>", "nile").value == 1.0
    assert search_r1.score("<answer>Nile</answer>" * 11, "nile").value == 0.25
    assert lmm_r1.score(r"<think>1+1</think><answer>$\boxed{2}$</answer>", "2").value == 1.5
    assert lmm_r1.score("", "2").value == 0.0
    assert lmm_r1.score("so $2$", "2").value == 0.0
    assert lmm_r1.score("the answer is $2$.", "2").value == 1.0


@pytest.mark.parametrize("number", ["1e400", "9" * 310, "-1e999", "1e400, 2", "inf_3", r"1e400\\pi"])
def test_a_number_beyond_floats_is_wrong_and_keeps_its_format(number):
    for verifier in (geo3k, math_easyr1, prime_math):
        assert verifier.score(rf"<think>a</think> \boxed{{{number}}}", "5").parts.get("format", 1.0) == 1.0
        assert verifier.score(r"<think>a</think> \boxed{5}", number).value < 1.0
        assert verifier.score(rf"<think>a</think> \boxed{{{number}}}", number).value == 1.0
    assert r1v_easyr1.score(f"<think>a</think><answer>{number}</answer>", "5").parts["format"] == 1.0


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("2x", "x*2", True),
        (r"\frac{2}{4}", r"\frac{1}{2}", False),  # it wants fractions reduced
        ("5 cm", "5", True),
        ("(1, 2)", "(1,2)", True),
        ("(1,2]", "(1,2)", False),
        ("3 million", "3*10^6", True),
        ("sqrt(8)", r"2\sqrt{2}", True),
        ("6", "5", False),
        ("", "5", False),
    ],
)
def test_prm800k_grades_strings_and_simple_algebra(answer, truth, right):
    assert prm800k.grade(answer, truth) is right


@pytest.mark.parametrize("grade", [prm800k.grade, lambda a, t: prime_math.score(rf"\boxed{{{a}}}", t).value])
@pytest.mark.parametrize(
    "answer", ["9**9**9**9", "99999999!", "7**99999999", "__import__('os').system('x')", "(" * 5_000, r"\frac" * 50_000]
)
def test_hostile_answers_are_wrong_for_every_verdict(grade, answer):
    assert not grade(answer, "1/3")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2*3+4", 10),
        ("2(3)(4)", 24),
        ("-2^2", -4),
        ("2^-1", 0.5),
        ("6/2/3", 1),
        ("3!", 6),
        ("sqrt 4", 2),
        ("sqrt(4)2", 4),
        ("2 pi", 6.283185307179586),
        ("1.5e3", 1500),
        ("|3|", None),
        ("lambda: 1", None),
        ("f(", None),
        ("1 +", None),
        ("a.b", None),
        ("'x'", None),
        ("(" * 30 + "1" + ")" * 30, None),
    ],
)
def test_expressions_are_read_and_never_evaluated(text, value):
    assert value is None or refusal(text) is None
    if value is None:
        with pytest.raises(expression.Unreadable):
            expression.parse(text)
    else:
        assert float(expression.parse(text)) == pytest.approx(value)
