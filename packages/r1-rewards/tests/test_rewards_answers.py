"""Verifiers of texts, choices, numbers, boxes and points."""

import pytest

from r1_rewards import box, choice, gsm8k, numeric, point, text


@pytest.mark.parametrize(
    ("response", "truth", "options", "value"),
    [
        ("<answer>The Eiffel Tower.</answer>", "eiffel tower", {}, 1),
        ("so, Answer: PARIS", "paris", {}, 1),
        ("Paris", ["London", "Paris"], {}, 1),
        ("Paris", "paris", {"exact": True}, 0),
        (" Paris\n", "Paris", {"exact": True}, 1),
        ("Not Paris", "Paris", {}, 0),
        ("1,500", "1500", {}, 1),
        ("E-mail", "email", {}, 1),
        ("It's C#.", "its C#", {}, 1),
        ("\\boxed{A}", "A", {}, 1),
        ("Answer: five", '["5", "five"]', {}, 1),
        ("Answer: six", '["5", "five"]', {}, 0),
        ("naïve café", "Naïve Café!", {}, 1),
    ],
)
def test_text_compares_normalised_or_exact_text(response, truth, options, value):
    assert text.score(response, truth, **options).value == value


@pytest.mark.parametrize("truth", ["A", "%", "the", "a the", "...", "Ω"])
@pytest.mark.parametrize("response", ["", " \n", "<answer></answer>", r"\boxed{}", "?", "Answer: an"])
def test_text_never_rewards_an_answer_that_says_nothing(truth, response):
    assert text.score(response, truth).value == 0.0
    assert text.score(rf"\boxed{{{truth}}}", truth).value == 1.0


@pytest.mark.parametrize(
    ("response", "truth"),
    [("15", "1.5"), ("5", "-5"), ("−5", "5"), ("C#", "C++"), ("NET", ".NET"), ("C", "C#"), ("12", "1/2"),
     ("330", "3:30"), ("1,2", "12"), ("x > 5", "x < 5"), ("x+5", "x-5"), (".5", "5"), ("2^3", "23"), ("-.5", ".5")],
)  # fmt: skip
def test_text_keeps_the_signs_that_make_a_difference(response, truth):
    assert text.score(response, truth).value == 0.0
    assert text.score(response, response).value == 1.0


@pytest.mark.parametrize("truth", ["", " ", [], ["", " "]])
def test_a_truth_that_is_blank_is_an_error_of_the_data(truth):
    with pytest.raises(ValueError, match="is blank"):
        text.score("5", truth)


CITIES = ["London", "Paris", "Rome"]


@pytest.mark.parametrize(
    ("response", "truth", "options", "value"),
    [
        ("The answer is (B) Paris.", "B", {}, 1),
        ("**B**", "(B)", {}, 1),
        ("b", "B. Paris", {}, 1),
        (r"\boxed{\text{(D)}}", "D", {}, 1),
        ("<answer>Paris</answer>", "B", {"choices": CITIES}, 1),
        ("<answer>B</answer>", "Paris", {"choices": CITIES}, 1),
        ("<answer>rome</answer>", "X", {"choices": {"X": "Rome", "Y": "Oslo"}}, 1),
        ("I think option C is right", "C", {}, 1),
        ("so it must be\nD", "D", {}, 1),
        ("A cat sat there", "A", {}, 0),
        ("A, B, C or D", "A", {}, 0),
        ("Answer: A or B", "A", {}, 0),
        ("Answer: C and A", "A, C", {}, 1),
        ("Answer: AC", "A, C", {}, 1),
        ("Answer: A", "A, C", {}, 0),
        ("Answer: A", "A, C", {"partial": True}, 0.5),
        ("Answer: A, B", "A, C", {"partial": True}, 0),
        ("", "A", {}, 0),
    ],
)
def test_choice_reads_letters_texts_and_lists(response, truth, options, value):
    assert choice.score(response, truth, **options).value == value


def test_choice_refuses_a_truth_that_is_no_option():
    with pytest.raises(ValueError, match="no letter"):
        choice.score("A", "Paris")


@pytest.mark.parametrize(
    ("response", "truth", "options", "value"),
    [
        ("about 9.8 m/s", "35.4 km/h", {"relative": 0.01}, 1),
        ("about 9.8 m/s", "35.4 km/h", {}, 0),
        ("150 cm", "1.5 m", {}, 1),
        (r"\boxed{5\ \mathrm{m/s}}", "18 km/h", {}, 1),
        ("3 m^2", "30000 cm²", {}, 1),
        (r"3\times 10^4 km", "30000 km", {}, 1),
        ("5 kg", "5 m", {}, 0),
        ("5", "5 m", {}, 1),
        ("5", "5 m", {"unit_required": True}, 0),
        ("50%", "0.5", {}, 1),
        ("it is 50 percent.", "50", {}, 1),
        ("50", "0.5", {}, 0),
        ("0.1", "1/10", {}, 1),
        ("$1,200.50", "1200.5", {}, 1),
        ("9.9", "10", {"absolute": 0.1}, 1),
        ("9.89", "10", {"absolute": 0.1}, 0),
        ("it is -5", "5", {}, 0),
        ("5 apples", "5", {}, 1),
        ("no idea", "5", {}, 0),
        ("1e400", "5", {}, 0),
        ("nan", "5", {"relative": 0.5}, 0),
    ],
)
def test_numeric_knows_tolerance_units_and_percent(response, truth, options, value):
    assert numeric.score(response, truth, **options).value == value


def test_numeric_refuses_a_truth_that_is_no_number():
    with pytest.raises(ValueError, match="not a number"):
        numeric.score("5", "five")


@pytest.mark.parametrize(
    ("response", "truth", "iou"),
    [
        ("<answer>[0, 0, 10, 10]</answer>", "[0, 0, 10, 5]", 0.5),
        ('```json\n[{"bbox_2d": [0, 0, 10, 10], "label": "cat"}]\n```', "[0,0,10,10]", 1.0),
        ("first [1, 1, 2, 2], no: (0,0),(10,10)", "(0, 0, 10, 10)", 1.0),
        ("[20, 20, 30, 30]", "[0, 0, 10, 10]", 0.0),
        ("[10, 10, 0, 0]", "[0, 0, 10, 10]", 0.0),
        ("[0, 0, 0, 0]", "[0, 0, 10, 10]", 0.0),
        ("[1, 2, 3]", "[0, 0, 10, 10]", 0.0),
        ("[nan, 0, 10, 10]", "[0, 0, 10, 10]", 0.0),
        ("no box", "[0, 0, 10, 10]", 0.0),
    ],
)
def test_box_is_worth_its_overlap(response, truth, iou):
    assert box.score(response, truth).value == pytest.approx(iou)
    assert box.score(response, truth, threshold=0.5).value == float(iou >= 0.5)


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("Click at (5, 3).", 1),
        ("[10, 10]", 1),
        ("(11, 3)", 0),
        ("[0, 0, 10, 10]", 0),
        ("(1,1) or (50, 50)", 0),
        ("", 0),
    ],
)
def test_point_must_lie_in_the_box(response, value):
    assert point.score(response, "[0, 0, 10, 10]").value == value


@pytest.mark.parametrize("verifier", [box, point])
def test_a_truth_without_a_box_is_an_error(verifier):
    with pytest.raises(ValueError, match="no box"):
        verifier.score("[0, 0, 1, 1]", "left")


@pytest.mark.parametrize("answer", ["2 million", r"2\pi", "2!", "not 2", "2^5", "2 + 3", "2(3)", "2x", "2 dozen", "√2"])
def test_numeric_reads_the_whole_number_or_none(answer):
    for response in (rf"\boxed{{{answer}}}", f"<answer>{answer}</answer>", f"Answer: {answer}"):
        assert numeric.score(response, "2").value == 0.0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("2 million", "2000000"), (r"\frac12", "0.5"), (r"\frac{1}{2}\text{ m}", "50 cm"), (r"-\frac{3}{4}", "-0.75"),
     ("3 dozen", "36"), ("5 times", "5"), ("9.8 m/s", "9.8 m/s"), ("2.5 thousand", "2500")],
)  # fmt: skip
def test_numeric_reads_fractions_scales_and_money(answer, truth):
    assert numeric.score(rf"\boxed{{{answer}}}", truth).value == 1.0


@pytest.mark.parametrize(
    "response",
    ["The answer is not A", "Answer: not A", r"\boxed{\text{not }A}", "It cannot be option A", "A is wrong: not A.",
     "It is neither A nor B"],
)  # fmt: skip
def test_choice_takes_no_letter_that_is_denied(response):
    assert choice.score(response, "A").value == 0.0


def test_choice_takes_what_is_left_when_others_are_denied():
    assert choice.score("It is not B. So option A is right.", "A").value == 1.0
    assert choice.score("Not B, not C.\nAnswer: A", "A").value == 1.0


DENIED = [
    "Answer: anything but 7",
    "#### every number except 7",
    "<answer>other than 7</answer>",
    r"\boxed{\text{anything other than }7}",
    "It can be any value but 7",
    "After all these steps I am sure that it is not 7",
]


@pytest.mark.parametrize("verifier", [gsm8k, numeric], ids=["gsm8k", "numeric"])
@pytest.mark.parametrize("response", DENIED)
def test_an_answer_that_excludes_the_truth_is_wrong(verifier, response):
    assert verifier.score(response, "7").value == 0.0


@pytest.mark.parametrize("answer", ["7+k", "7 - k", r"7 \pm k", "7±1", "7*x"])
def test_a_number_with_a_variable_beside_it_is_no_number(answer):
    assert numeric.score(rf"\boxed{{{answer}}}", "7").value == 0.0


@pytest.mark.parametrize(("answer", "truth"), [("7-day", "7"), ("7 m/s", "7 m/s"), ("7 s^{-1}", "7"), ("7/s", "7")])
def test_a_unit_or_a_word_beside_a_number_leaves_it(answer, truth):
    assert numeric.score(rf"\boxed{{{answer}}}", truth).value == 1.0


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The answer is (A). Wait, B.", "B"),
        ("(A) no, (B)", "B"),
        ("A. Wait, B. Wait, C", "C"),
        ("\\boxed{A} Wait, actually it should be (B).", "B"),
        ("\\boxed{A. Wait, B}", "B"),
        ("<answer>A. No, the correct answer is B.</answer>", "B"),
        ("Answer: A\nSorry, I meant C.", "C"),
        ("Answer: A. Wait, B.\nAnswer: C", "C"),
        ("答案是A。不对，应该是B", "B"),
        ("Wait, A is wrong. The answer is B.", "B"),
        ("The answer is B. No, wait: A is not possible.", "B"),
        ("There is no A. The answer is B.", "B"),
        ("答案不是A，而是B", "B"),
        ("No, a cat is no dog. The answer is B.", "B"),
        ("Actually, A cat sat. Answer: B", "B"),
        ("Wait, the answer is A because it fits. So, \\boxed{B}", "B"),
    ],
)
def test_a_letter_behind_a_retraction_replaces_what_was_said(response, letter):
    right = [one for one in "ABCD" if choice.score(response, one).value == 1.0]
    assert right == [letter]


THOUGHT = [(numeric, "5"), (choice, "B"), (text, "Paris"), (gsm8k, "5")]


@pytest.mark.parametrize(("verifier", "truth"), THOUGHT, ids=["numeric", "choice", "text", "gsm8k"])
def test_what_stands_in_a_thought_is_no_answer(verifier, truth):
    for thought in (f"<think>\\boxed{{{truth}}}</think> I do not know.", f"<think>Answer: {truth}"):
        assert verifier.score(thought, truth).value == 0.0
    assert verifier.score(f"<think>Hm, \\boxed{{7}}</think> \\boxed{{{truth}}}", truth).value == 1.0
