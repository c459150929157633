"""The built-in verifiers: what is right, what is wrong, and what cannot hang them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from r1_rewards import gsm8k, math, numeric, r1v
from r1_rewards.reading.guards import refusal
from r1_rewards.verifiers.format import has_r1v

MODEL_SOLUTIONS = Path(__file__).resolve().parents[4] / "shared/data/gsm8k/model_solutions.json"
EQUAL = [
    ("0.5", r"\frac{1}{2}"),
    ("1,234,567", "1234567"),
    ("2**10", "1024"),
    (r"0.\overline{3}", r"\frac{1}{3}"),
    ("x > 3", r"(3, \infty)"),
    ("½", "1/2"),
    ("√2", r"\sqrt{2}"),
    ("∞", r"\infty"),
    ("2·3", "6"),
    ("5\u200b", "5"),
    ("5 million", "5000000"),
    ("10 km/h", "10"),
    ("5 cm", "5cm"),
    ("A.", "A"),
    ("Monday", "monday"),
    ("an apple", "apple"),
    ("(x+1)^2", "x^2+2x+1"),
    ("x=5", "5"),
    (r"\{3,2,1\}", r"\{1,2,3\}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    ("[[1,2],[3,4]]", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"e^{i\pi}", "-1"),
    ("x²+1", "x^2+1"),
    ("x⁴", "x^4"),
    ("5 metres", "5 m"),
    ("150 cm", "1.5 m"),
    ("5 apples", "5"),
    (r"3.5\text{ cm}^2", "3.5 cm^2"),
    ("2 1/2", "2.5"),
    ("1 000", "1000"),
    ("1,22", "1.22"),
    ("6.02e23", r"6.02\times 10^{23}"),
    ("3 x 10^8", r"3\times10^8"),
    (r"\sin 30^\circ", r"\frac12"),
    (r"\approx 3.5", "3.5"),
    ("A. Paris", "A"),
    ("101_2", "5_{10}"),
    ("２５", "25"),
    ("5!", "120"),
    ("6,8", r"6 \text{ and } 8"),
    ("0.33333333", r"\frac{1}{3}"),
]
DIFFERENT = [
    ("12,34", "1234"),
    ("3.1416", r"\pi"),
    ("5 m", "5 cm"),
    ("-42", "42"),
    ("tac", "cat"),
    ("", "0"),
    ("(1,2)", "(2,1)"),
    ("0.333", r"\frac{1}{3}"),
    ("32, 349", "32349"),
    ("12 34", "1234"),
    ("5m", "5cm"),
    ("5 apples", "5 euros"),
    (r"99i,^{2}\sqrt\log]\frac{1}{2}\frac{1}{2},", r"\frac{1}{2}"),
    ("3.5 cm^3", "3.5 cm^2"),
    ("101_2", "101_3"),
    ("B. Paris", "A"),
    ("x^2-1", "x^2+1"),
    ("[1,2)", "[1,2]"),
    ("I can see that there are 3 red and 4 blue", "4"),
]
HOSTILE = [
    "9**9**9**9",
    "9^{9^{9^9}}",
    "7**99999999",
    "2^(99999999/3)",
    "(((9^{999})^{999})^{999})",
    r"7^{9999 \cdot 9999}",
    "7**(9999*9999)",
    "7^{9999(9999)}",
    "9²²²²",
    "99999999!",
    "((9!)!)!",
    "9!!!",
    "(10^6)!",
    r"10^{1000!}",
    "1E999999999",
    r"\binom{99999999}{4999999}",
    r"\sin(x)^{100}\cos(x)^{100}",
    "(a+b+c+d+e+f)^{200}",
    "(x+y+z+w)^{50}",
    "(x+y+z)^{20}(x-y+z)^{20}",
    r"\Gamma(10^9)",
    r"\gamma\left(10^{7}\right)",
    r"\Gamma(99999999)",
    r"\Gamma(\Gamma(20))",
    r"\left(\Gamma(12)\right)!",
    r"{10^9 \choose 10^8}",
    "|{-10^{9}}|!",
    r"\lfloor 10^9 \rfloor!",
    r"\int \frac{1}{x^{50}+1} dx",
    r"\left|\begin{matrix}a&b&c&d\\e&f&g&h\\i&j&k&l\\m&n&o&p\end{matrix}\right|^{20}",
    "1" * 1_000_000,
    "{" * 20_000 + "1" + "}" * 20_000,
    "(" * 500 + "1" + ")" * 500,
    "-" * 5_001 + "1",
    "1," * 20_000 + "1",
    r"\frac{1}{1+" * 300 + "1" + "}" * 300,
    "__import__('os').system('exit')",
]


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_math_accepts_what_is_equal(answer, truth):
    score = math.score(rf"<think>so</think> it is \boxed{{{answer}}}.", truth)
    assert score.value == 1.0
    assert score.parts == {"overall": 1.0, "accuracy": 1.0, "format": 1.0}


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_math_rejects_what_differs(answer, truth):
    assert math.score(rf"\boxed{{{answer}}}", truth).value == 0.0


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda answer: answer[:24])
def test_a_hostile_answer_is_wrong_and_is_never_computed(answer):
    assert refusal(answer) or "__import__" in answer or "²" in answer
    assert math.score(rf"\boxed{{{answer}}}", r"\frac{1}{2}").value == 0.0
    assert math.score(r"\boxed{\frac{1}{2}}", answer).value == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "10^6",
        "2^{100}",
        "5!",
        "(n+1)!",
        "e^{i\\pi}",
        "x^{2023}",
        r"\binom{10}{3}",
        "1.5e-3",
        r"\Gamma(\frac{1}{2})",
        r"{10 \choose 3}",
        r"\gamma = 2000",
        "|x|!",
        r"\int_0^1 x^2 dx",
        "(x+1)^{10}(y-1)^{10}",
    ],
)
def test_ordinary_mathematics_passes_the_guards(answer):
    assert refusal(answer) is None


def test_math_without_a_box_has_accuracy_but_no_format():
    assert math.score("The answer is 5.", "5").parts == {"overall": 1.0, "accuracy": 1.0, "format": 0.0}


@pytest.mark.parametrize(
    ("response", "truth", "value"),
    [
        (r"\boxed{2}", r"We add 1 and 1, so \boxed{2}", 1),
        (r"\boxed{2}", "We add 1 and 1, which is $2$.", 1),
        (r"\boxed{1} and \boxed{2}", "1, 2", 1),
        (r"\boxed{4}, wait: \boxed{5}", "4, 5", 0),
        ("Therefore $x \\geq 5$.", r"$x \ge 5$", 1),
        ("It costs $5 and then $7", "7", 1),
        ("5 m", "5 cm", 0),
        ("x > 3", r"(3, \infty)", 1),
        ("Final Answer: The largest $n$ is 34.", "34", 1),
        ("The code is AZYUK2A", "2", 0),
        (r"so $\frac{1+\sqrt{5}}{2}$", "2", 0),
    ],
)
def test_math_finds_the_answer_and_the_truth_in_their_texts(response, truth, value):
    assert math.score(response, truth).value == value


def test_a_list_of_many_blanks_is_compared_in_linear_time():
    assert not math.equal("1,  " * 200 + "1,,", "1, 2")


def test_math_rounds_to_the_digits_asked_for():
    assert math.score(r"\boxed{2.6667}", r"\frac{8}{3}").value == 0.0
    assert math.score(r"\boxed{2.6667}", r"\frac{8}{3}", digits=2).value == 1.0


def test_math_hands_nothing_to_a_parser_that_evaluates(monkeypatch):
    from math_verify import parser

    def refuse(text, *args, **kwargs):
        raise AssertionError(f"parse_expr was given {text!r}")

    monkeypatch.setattr(parser, "parse_expr", refuse)
    parser.parse_expr_cached.cache_clear()
    for answer, truth in EQUAL + DIFFERENT:
        math.score(answer, truth)
        math.score(rf"\boxed{{{answer}}}", truth)


@pytest.mark.parametrize(
    ("response", "truth", "accuracy", "format_score"),
    [
        ("<think>a</think>\n<answer> 3 </answer>", "<answer> 3 </answer>", 1, 1),
        (r"<think>a</think><answer>\frac{1}{2}</answer>", "<answer> 0.5 </answer>", 1, 1),
        ("<think>3 red, 4 blue</think><answer>7</answer>", "4", 0, 1),
        ("<think>5 apples</think><answer>no</answer>", "5", 0, 1),
        ("<think>a</think> so <answer>3</answer>", "3", 1, 0),
        (" <think>a</think><answer>3</answer>", "3", 1, 0),
        ("<think>a</think><answer>3</answer>\n", "3", 1, 0),
        ("<think>a</think></think><answer>3</answer>", "3", 1, 1),
        ("<think>a<answer>3</answer>", "3", 1, 0),
        ("<think>a</think> 5", "5", 0, 0),
        ("5", "5", 1, 0),
        ("<think>a</think><answer>left\nright</answer>", "<answer>left\nright</answer>", 1, 1),
    ],
)
def test_r1v_scores_the_tag_and_the_format(response, truth, accuracy, format_score):
    score = r1v.score(response, truth)
    assert score.parts == {
        "overall": 0.5 * accuracy + 0.5 * format_score,
        "accuracy": accuracy,
        "format": format_score,
    }
    assert score.value == score.parts["overall"]


@pytest.mark.parametrize("unit", ["<think>", "</think>", "</think><answer>", "<think></think> "])
def test_r1v_format_is_linear_in_repeated_tags(unit):
    assert not has_r1v("<think>" + unit * 50_000 + "x")
    has_r1v("<think>" + unit * 50_000 + "</answer>")


@pytest.mark.parametrize(
    ("response", "truth", "value"),
    [
        ("She makes 9 * 2 = <<9*2=18>>18 a day.\n#### 18", "9 * 2 = 18\n#### 18", 1),
        ("so \\boxed{18\\text{ dollars}}", "18", 1),
        ("#### $1,200.00", "#### 1200", 1),
        ("The answer is 18 dollars for 3 days.", "18", 1),
        ("it is 5 + 13 = 18.", "18", 1),
        ("The answer is 4 + 5 = 18 dollars for 3 days.", "18", 1),
        ("A: 18", "16 + 2\nA: 18", 1),
        ("#### 18.5", "18", 0),
        ("18 then 19", "18", 0),
        ("", "18", 0),
        ("no number", "no number", 0),
        ("#### " + "9" * 1_000_000, "18", 0),
    ],
)
def test_gsm8k_compares_the_final_numbers(response, truth, value):
    assert gsm8k.score(response, truth).value == value


@pytest.mark.skipif(not MODEL_SOLUTIONS.exists(), reason="the published model solutions are not beside the repository")
def test_gsm8k_agrees_with_the_labels_of_published_model_solutions():
    cases = json.loads(MODEL_SOLUTIONS.read_text())
    wrong = [
        case["id"]
        for case in cases
        if bool(gsm8k.score(case["response"], case["ground_truth"]).value) != case["is_correct"]
    ]
    assert cases
    assert not wrong


def test_importing_the_package_loads_neither_torch_nor_sympy():
    code = (
        "import sys, r1_rewards; from r1_rewards import math, r1v, gsm8k; "
        "print([m for m in ('torch', 'sympy', 'math_verify', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_missing_math_verify_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"r1-rewards\[math\]"):
        math.score(r"\boxed{x+1}", "1+x")


@pytest.mark.parametrize("verifier", [gsm8k, math, numeric])
@pytest.mark.parametrize("answer", ["7{8}", "7%8", "$7 $8", r"7\ 8", "7. 8", "7 8"])
def test_digits_that_something_separates_are_no_one_number(verifier, answer):
    assert [verifier.score(rf"\boxed{{{answer}}}", truth).value for truth in ("78", "7", "8")] == [0.0, 0.0, 0.0]
