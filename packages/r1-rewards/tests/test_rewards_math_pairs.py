"""764 pairs of a response and a truth, most written before the verifier's code was read: what `math` makes of them."""

import json
from collections import Counter
from pathlib import Path

import pytest

from r1_rewards import load, math
from r1_rewards.types import RewardInput

PAIRS = [json.loads(line) for line in (Path(__file__).parent / "math_pairs.jsonl").read_text("utf-8").splitlines()]
MOST_WRONG = 5  # that may be accepted
MOST_MISSED = 25  # that may be refused


@pytest.fixture(scope="module")
def verdicts():
    with load("math", timeout=120.0, workers=2) as verifier:
        scores = verifier([RewardInput(pair["response"], pair["ground_truth"]) for pair in PAIRS])
    assert [score.error for score in scores if score.error] == []
    return [score.value == 1.0 for score in scores]


def test_hardly_a_wrong_answer_is_taken(verdicts):
    taken = [pair for pair, right in zip(PAIRS, verdicts, strict=True) if right and not pair["correct"]]
    assert len(taken) <= MOST_WRONG, taken


def test_hardly_a_right_answer_is_missed(verdicts):
    missed = [pair for pair, right in zip(PAIRS, verdicts, strict=True) if pair["correct"] and not right]
    assert len(missed) <= MOST_MISSED, missed


def test_no_answer_is_right_for_many_truths(verdicts):
    right = Counter(
        pair["response"] for pair, taken in zip(PAIRS, verdicts, strict=True) if taken and not pair["correct"]
    )
    asked = Counter(pair["response"] for pair in PAIRS)
    assert [response for response, count in right.items() if count > 1 or asked[response] > 1] == []


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("0.0", "6.6e-34"), ("0.0000001", "0.0000002"), ("5(7)", "12"), (r"\frac12 m", r"\frac12 cm"),
        (r"\frac12\text{ apples}", r"\frac12\text{ pears}"), ("18 cents", r"\$18"), (r"18 \text{ cents}", "$18"),
        (r"5\%", "$5"), ("€5", "$5"), ("(A)(B)(C)", "A"), ("A. B. C.", "A"), (r"5 \text{ is wrong}", "5"),
        (r"\infty<i/0", "5"), ("1e400", "5"), ("e^{e^{e^{e^{e}}}}", "5"), ("10^{|10^9|}", "5"),
        (r"9^{\frac{9^9}{1}}", "5"), (r"\sqrt[10^{-9}]{9}", "5"), (r"(10^{9999})^{9999}", "5"), (r"\cancel{5}", "5"),
        (r"\binom{10^6}{10^5}", "5"), (r"(1+\sqrt{2})^{9999}", "5"),
        (r"\phantom{6}5?", "5"), ("5 dozen", "5"), ("5 hundred", "5"), ("half of 5", "5"), ("4 = 5", "5"),
        ("(0,1)", r"\{0,1\}"), (r"\{0,1\}", "(0,1)"), ("(1,0)", r"\{0,1\}"), ("(1,2,3)", r"\{1,2,3\}"),
        (r"x \in \left(0,1\right)", r"\left\{0,1\right\}"), (r"\{(0,1)\}", "(0,1)"),
        ("7%8", "78"), ("7{8}", "78"), ("7$8", "78"), (r"7\ 8", "78"), (r"2\ 3/4", "23/4"), (r"2\ 3/4", "1.5"),
        (r"\frac{3\pm 1}{2}", "1"), (r"\frac{3\pm 1}{2}", "1, 3"), (r"\frac{1\pm\sqrt5}{2}", r"\frac{1\pm\sqrt6}{2}"),
        (r"\frac{3\pm 1}{2}", "(1, 2)"), (r"\frac{1+\sqrt5}{2}", r"\frac{1\pm\sqrt5}{2}"),
        ("70k", "70"), ("70k", "7000"), ("2000", "2k"), ("70 K", "70000"), ("3k", "3000k"), ("70kg", "70000"),
        ("10 hours 30 minutes", "10"), ("10 hours 30 minutes", "30"), ("10 hours 30 minutes", "40"),
        ("10 minutes 30 seconds", "10.5 hours"), ("5 m 30 s", "5.5"), ("10 hours 30 meters", "10.5"),
        ("2 minutes 30 seconds", "150 m"), ("1 hour 30 m", "60.5 minutes"),
        ("1 hour 20 minutes", "1.2"), ("30 minutes 10 hours 5 minutes", "10.5 hours"),
        (r"\vec{a}", r"\mathbf{b}"), (r"\vec{a}", "a"), (r"\hat{i}", "i"), (r"|\vec{a}|", r"\mathbf{a}"),
        (r"3\vec{i}+4\vec{j}", r"4\mathbf{i}+3\mathbf{j}"),
    ],
)  # fmt: skip
def test_what_once_passed_or_never_ended_is_wrong_and_says_why(answer, truth):
    score = math.score(rf"\boxed{{{answer}}}", truth)
    assert score.value == 0.0
    assert score.reason


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("5(7)", "35"), ("5 dozen", "60"), ("1800 cents", "$18"), ("$5", "5"), (r"2+2=4", "4"), ("$18$", "$18"),
        (r"x = \frac72 = 3.5", "3.5"),
        ("(0,1)", "(0,1)"), (r"\{1,0\}", r"\{0,1\}"), (r"1\,000", "1000"), (r"1\ 000", "1000"), ("1{,}000", "1000"),
        (r"2\ 3/4", r"2\frac{3}{4}"), (r"2\frac34", r"2\ 3/4"), (r"-2\,3/4", "-2.75"), ("2 3/4", r"2\ 3/4"),
        (r"\frac{1\pm\sqrt{5}}{2}", r"\boxed{\frac{1+\sqrt{5}}{2}} and \boxed{\frac{1-\sqrt{5}}{2}}"),
        (r"\frac{1+\sqrt5}{2}} or \boxed{\frac{1-\sqrt5}{2}", r"\frac{1\pm\sqrt{5}}{2}"),
        (r"x = \dfrac{1 \mp \sqrt{5}}{2}", r"\frac{1 \pm \sqrt{5}}{2}"), (r"\frac{3\pm 1}{2}", "2, 1"),
        ("70k", "70000"), (r"\$1.5k", "1,500"), ("3k", "3k"), ("2k", "k+k"), ("70 kg", "70"),
        ("10 hours 30 minutes", "10.5 hours"), ("10 hours 30 minutes", "630 minutes"), ("630", "10 hours 30 minutes"),
        (r"10\text{ hours and }30\text{ minutes}", "10.5"), ("10 h 30 min", "10 hours, 30 minutes"),
        ("5 ft 3 in", "63 inches"), ("5 dollars 30 cents", r"\$5.30"),
        (r"3\vec{i}+4\vec j", r"3\mathbf{i}+4\mathbf{j}"), (r"3\mathbf{i}-\mathbf{j}", r"3\hat{\imath}-\hat{j}"),
        (r"\overrightarrow{a}", r"\boldsymbol{a}"),
    ],
)  # fmt: skip
def test_the_like_that_is_right_is_taken(answer, truth):
    assert math.score(rf"\boxed{{{answer}}}", truth).value == 1.0


def test_a_score_says_what_was_extracted_and_why():
    score = math.score(r"<think>\boxed{4}</think> So \boxed{\frac{2}{4}}.", "0.5")
    assert (score.extracted, score.reason) == (r"\frac{2}{4}", "as numbers")
    assert math.score("no idea", "5").reason == "there is no final answer"
    assert "'wrong'" in math.score(r"\boxed{5 \text{ is wrong}}", "5").reason
    assert "an exponent" in math.score(r"\boxed{9^{9^{9^9}}}", "5").reason


@pytest.mark.parametrize("truths", [["5", "five apples"], '["5", "five apples"]'])
def test_math_takes_several_truths(truths):
    assert math.score(r"\boxed{5.0}", truths).value == 1.0
    assert math.score(r"\boxed{\text{five apples}}", truths).value == 1.0
    assert math.score(r"\boxed{6}", truths).value == 0.0


def test_a_truth_that_is_no_text_is_a_type_error_that_says_so():
    with pytest.raises(TypeError, match="the ground truth is 5, a int; write it as text"):
        math.score(r"\boxed{5}", 5)


def test_a_truth_that_nothing_can_meet_is_named():
    assert math.truth_problem("5") is None
    assert "blank" in math.truth_problem(" ")
    assert "an exponent" in math.truth_problem("9^{9^{9^9}}")
