"""Tests of mathematical equality on pairs as people and models write them: no true answer missed, none wrong taken."""

import pytest

from r1_rewards import math

WRITTEN = ["{}", r"<think>so</think> The answer is \boxed{{{}}}.", "so\nAnswer: {}", "<answer>{}</answer>"]
EQUAL = [
    (r"\dfrac{7}{8}", "0.875"), ("7/8", r"\frac78"), (r"-\frac{3}{4}", "-0.75"), (r"\frac{-3}{4}", r"-\frac{3}{4}"),
    (r"\frac34", "75/100"), (r"1\frac{3}{4}", r"\frac{7}{4}"), ("1 3/4", "1.75"), (r"1 \frac{1}{3}", r"\frac43"),
    ("1e3", "1000"), ("1.2e-3", "0.0012"), ("1.2 × 10^3", "1200"), (r"3\cdot 10^{2}", "300"), ("12,345", "12345"),
    ("12 345", "12345"), (r"1\,000", "1000"), ("1,000,000", "10^6"), ("007", "7"), ("-0", "0"), ("7.000", "7"),
    ("2^{-1}", "0.5"), ("4^{1/2}", "2"), (r"\sqrt{8}", r"2\sqrt{2}"), (r"\sqrt[4]{16}", "2"),
    ("sqrt(2)", r"\sqrt{2}"), ("sqrt{2}", r"\sqrt{2}"), (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt3}"),
    (r"e^{i\pi}", "-1"), (r"\ln e^2", "2"), (r"\log_{10} 100", "2"), (r"\sin(\pi/6)", "0.5"), (r"\cos 0", "1"),
    (r"\binom{5}{2}", "10"), ("3!", "6"), ("|{-5}|", "5"), (r"\lfloor 2.5 \rfloor", "2"), (r"\lceil 2.1 \rceil", "3"),
    ("25%", "25"), (r"25\%", "25"), ("25%", "25%"), ("0.25", "25%"), ("€20", "20"), ("£20", "20"), ("20 euros", "20"),
    ("3 apples", "3"), (r"3\text{ apples}", "3"), ("12 cm^2", "12"), (r"12\text{ cm}^2", "12"),
    (r"12 \text{ cm}^{2}", "12"), ("45°", "45"), ("45 °", r"45^\circ"), ("5 kg", "5 kg"), ("100 cm", "1 m"),
    ("60 minutes", "1 hour"), ("2 thousand", "2000"), ("3 billion", "3000000000"), ("1.5 million", "1500000"),
    ("YES", "yes"), (r"\text{yes}", "Yes"), ("True", "true"), ("(B)", "B"), ("B)", "B"), (r"\text{B}", "B"),
    ("B: 42", "B"), ("east", "East"), (r"(0,\infty)", "x>0"), (r"x \ge 2", r"[2,\infty)"),
    (r"x\leq 3", r"(-\infty,3]"), ("[1,2]", r"1\le x\le 2"), (r"(1,2)\cup(3,4)", r"(3,4)\cup(1,2)"),
    (r"\{2,1\}", "1,2"), ("1,2", "2,1"), ("x=1, x=2", "1,2"), ("x=1 or x=2", r"\{1,2\}"), (r"\pm 2", "2,-2"),
    (r"x=\pm 2", "-2, 2"), (r"x\in\{1,2\}", r"\{1,2\}"), (r"\varnothing", r"\emptyset"), ("2x+3", "3+2x"),
    ("x(x+1)", "x^2+x"), ("(a+b)(a-b)", "a^2-b^2"), ("y=2x+1", "2x+1"), ("y = 2x+1", "y=1+2x"), ("f(x)=x^2", "x^2"),
    (r"\frac{x+1}{2}", "0.5x+0.5"), ("2x", "x*2"), ("x**2", "x^2"), ("ab", "ba"), (r"\sin^2 x+\cos^2 x", "1"),
    (r"\begin{bmatrix}1 & 0\\0 & 1\end{bmatrix}", r"\begin{pmatrix}1&0\\0&1\end{pmatrix}"), ("1011_2", "1011_{2}"),
    ("FF_{16}", "FF_{16}"), ("2:3", "2:3"), ("2 : 3", "2:3"), ("9:05", "9:05"), ("¼", "0.25"), ("¾", "3/4"),
    ("π", r"\pi"), ("2π", r"2\pi"), ("x²", "x^2"), ("−5", "-5"), ("3×4", "12"), ("12÷4", "3"), ("∅", r"\emptyset"),
    ("x≥3", r"[3,\infty)"), ("５", "5"), ("\ufeff5", "5"), ("1/3", r"0.\overline{3}"), (r"0.1\overline{6}", "1/6"),
    ("0.(3)", "1/3"), ("3.5", "≈3.5"), ("~3.5", "3.5"), ("about 12", "12"), ("3+4i", "4i+3"), ("i^2", "-1"),
    (r"\frac{1}{i}", "-i"), (r"$\frac{1}{2}$", "0.5"), (r"\(5\)", "5"), (r"\[5\]", "5"), ("$$5$$", "5"),
    ("**5**", "5"), ("5.", "5"), ("\"5\"", "5"), ("2+2=4", "4"), (r"\frac{\pi}{6}+2k\pi", r"2\pi k+\frac{\pi}{6}"),
    ("n(n+1)/2", r"\frac{n^2+n}{2}"), (r"\sum_{i=1}^{3} i", "6"), (r"\int_0^1 x dx", "1/2"), ("1000 m", "1 km"),
    ("two", "2"), ("Twelve", "12"),
]  # fmt: skip
DIFFERENT = [
    ("0.67", r"\frac{2}{3}"), (r"\frac{2}{3}", "0.667"), ("12,34", "1234"), ("7.001", "7"), ("25", "0.25"),
    ("5 kg", "5 g"), ("5 km", "5 miles"), ("true", "false"), ("C", "B"), ("x<3", r"(-\infty,3]"), ("(1,2)", "[1,2]"),
    ("(1,2)", "(2,1)"), ("x^2", "x^3"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"), ("101_2", "101_3"),
    ("2:3", "3:2"), ("🙂", "1"), ("12 or 13", "12"), ("5, 6", "5"), ("5", "5,6"), ("3+4i", "3-4i"), ("", "5"),
    ("unknown", "5"), ("nan", "5"), ("inf", "5"), ("5 != 6", "5"), ("2+2=5", "4"), ("1", "1.0001"), ("10", "100"),
    ("x", "y"),
]  # fmt: skip


@pytest.mark.parametrize("written", WRITTEN)
def test_equal_answers_are_right_however_they_are_presented(written):
    wrong = [pair for pair in EQUAL if math.score(written.format(pair[0]), pair[1]).value != 1.0]
    assert wrong == []


@pytest.mark.parametrize("written", WRITTEN)
def test_different_answers_are_wrong(written):
    taken = [pair for pair in DIFFERENT if math.score(written.format(pair[0]), pair[1]).value != 0.0]
    assert taken == []
