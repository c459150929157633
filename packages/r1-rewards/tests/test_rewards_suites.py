"""Cases of each benchmark suite, written by hand or taken from another tool's tests, and what the graders say."""

import importlib
import json
from collections import Counter
from pathlib import Path

import pytest

from r1_rewards import RewardInput, answer, choice, ifeval, load, math
from r1_rewards.reading.instructions import RULES
from r1_rewards.reading.sentences import capital_words, count_sentences, is_language
from r1_rewards.verifiers import columns_of

FOLDER = Path(__file__).parent / "suite_cases"
SUITES = {path.stem: [json.loads(line) for line in path.read_text("utf-8").splitlines()] for path in FOLDER.iterdir()}
PEERS = ("lighteval", "lm-evaluation-harness", "evalscope", "inspect_ai", "tinker-cookbook", "ms-swift")
MEGABYTE = {text: text * (1_000_000 // len(text)) for text in ("1 ", "x", "[", "a.b. ")}
ODD = ("", " ", "\ud800", "NaN", "\\boxed{NaN}", "\\boxed{\\infty}", "١٤", "Answer: \u202e14", "\x00", "𝟙𝟜")


@pytest.mark.parametrize("suite", sorted(SUITES))
def test_each_case_gets_its_verdict(suite):
    wrong = []
    for case in SUITES[suite]:
        verifier = importlib.import_module(f"r1_rewards.verifiers.{case['verifier']}")
        found = verifier.score(case["response"], case["ground_truth"], **case.get("options", {}))
        if found.value != pytest.approx(case["value"]):
            wrong.append((case, found.value, found.extracted, found.reason))
    assert wrong == []


def test_each_suite_has_twenty_cases_of_its_own_right_and_wrong_ones():
    for suite, cases in SUITES.items():
        own = [case for case in cases if "from" not in case]
        assert len({(case["response"], case["ground_truth"], str(case.get("options"))) for case in own}) >= 20, suite
        assert min(Counter(case["value"] > 0.5 for case in own).values()) >= 4, suite
        assert all(case["why"] for case in cases)


def test_each_other_tool_has_three_cases():
    taken = Counter(case["from"] for cases in SUITES.values() for case in cases if "from" in case)
    assert set(taken) == set(PEERS)
    assert min(taken.values()) >= 3


def test_each_rule_of_ifeval_has_a_case_that_follows_it():
    ids = [case["options"]["instruction_id_list"] for case in SUITES["ifeval"] if case["value"] == 1.0]
    assert {rule for names in ids for rule in names} == set(RULES)
    assert len(RULES) == 25


@pytest.mark.parametrize(
    ("names", "arguments", "message"),
    [
        (["length:words"], [{}], "there is no rule 'length:words'; IFEval has change_case"),
        (["keywords:frequency"], [{"keyword": "a", "relation": "at least"}], "frequency = None; it needs a number"),
        (["keywords:frequency"], [{"keyword": "a", "frequency": float("nan"), "relation": "at least"}], "= nan"),
        (["keywords:frequency"], [{"keyword": "a", "frequency": 1, "relation": "over"}], "one of less than, at least"),
        (["keywords:existence"], [{"keywords": None}], "keywords = None; it needs a value"),
        ([], [], "0 rules and 0 kwargs"),
        (["punctuation:no_comma"], [{}, {}], "1 rules and 2 kwargs"),
        (None, None, "no column 'instruction_id_list'"),
    ],
)
def test_rules_that_cannot_be_checked_are_named(names, arguments, message):
    assert message in ifeval.truth_problem("x", instruction_id_list=names, kwargs=arguments)
    with pytest.raises(ValueError, match=r"rule|column"):
        ifeval.score("x", "x", instruction_id_list=names, kwargs=arguments)


def test_ifeval_counts_rules_strictly_and_loosely():
    rules = {"instruction_id_list": ["startend:quotation", "punctuation:no_comma"], "kwargs": [{}, {}]}
    found = ifeval.score('Well,\n"Yes, it is"', json.dumps(rules))
    assert found.parts == {
        "overall": 0.0, "accuracy": 0.0, "strict": 0.0, "loose": 0.0, "instructions": 2.0, "followed": 0.0,
        "followed_loose": 1.0,
    }  # fmt: skip
    assert found.reason == "not followed: startend:quotation, punctuation:no_comma"
    assert ifeval.score('Well:\n"Yes it is"', json.dumps(rules)).parts["loose"] == 1.0


def test_rules_are_read_from_columns_in_a_pool():
    columns = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"num_words": None}]}
    assert columns_of("ifeval") == set(columns)
    with load("ifeval") as verifier:
        scores = verifier([RewardInput(text, "rules", metadata=columns) for text in ("No", "No, no")])
    assert [score.value for score in scores] == [1.0, 0.0]


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_megabyte_is_checked_by_every_rule(rule):
    given = {
        "keywords": ["zebra"], "keyword": "zebra", "forbidden_words": ["x"], "letter": "q", "relation": "at least",
        "let_relation": "at least", "capital_relation": "at least", "language": "de", "first_word": "zebra",
        "section_spliter": "Section", "postscript_marker": "P.S.", "prompt_to_repeat": "zebra", "end_phrase": "zebra",
        **dict.fromkeys(("frequency", "let_frequency", "capital_frequency", "nth_paragraph"), 2000000),
        **{f"num_{name}": 2_000_000 for name in ("sentences", "words", "paragraphs", "placeholders", "bullets")},
        "num_highlights": 2_000_000, "num_sections": 2_000_000,
    }  # fmt: skip
    arguments = {name: given[name] for name in RULES[rule][1]}
    text = "[* a.b, C\n" * 100_000
    assert ifeval.score(text, "", instruction_id_list=[rule], kwargs=[arguments]).value == float("forbidden" in rule)


@pytest.mark.parametrize("text", MEGABYTE)
def test_a_megabyte_is_a_wrong_answer(text):
    assert answer.score(MEGABYTE[text], "15", relative=0.05).value == 0.0


@pytest.mark.parametrize("response", ODD, ids=range(len(ODD)))
def test_odd_responses_are_wrong_answers_and_no_failures(response):
    assert answer.score(response, "15", relative=0.05).value == 0.0
    assert answer.score(response, "C", choices=["a", "b", "c"]).value == 0.0
    assert answer.score(response, '["Paris", "the capital"]').value == 0.0
    assert choice.score(response, "C").value == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"error": "much"}, "error is 'much'; it must be a number, 0 or more"),
        ({"precision": -1}, "precision is -1; it must be"),
        ({"error": float("inf")}, "error is inf"),
        ({"choices": "A, B"}, "choices is 'A, B'; it must be a list of texts"),
    ],
)
def test_options_of_answer_that_are_of_no_use_are_named(options, message):
    assert message in answer.truth_problem("14", **options)
    with pytest.raises(ValueError, match=message):
        answer.score("14", "14", **options)


def test_a_missing_tolerance_of_a_row_is_none():
    for missing in (None, "", float("nan"), "0.1,0.2"):
        assert answer.score("Answer: 14.2", "14", error=missing, precision=missing).value == 0.0


@pytest.mark.parametrize(
    ("extracted", "truth", "right"),
    [
        ("2", "2 a t", False), (r"x + \omega", r"x + \omega t", False), (r"\omega t + x", r"x + \omega t", True),
        ("a_1 t", "t a_1", True), (r"3 \pi m", r"3\pi", True), ("5 m", "5", True), (r"\sin x", r"\sin(x)", True),
    ],
)  # fmt: skip
def test_a_last_letter_is_a_factor_behind_a_letter_and_a_unit_behind_a_number(extracted, truth, right):
    assert math.equal(extracted, truth) is right


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("Answer: for sure D, it can't be A or B", "D"), ("Answer: D, but it is not D", None),
        ("I think A cat sat", None),
        ("Answer: B, but that is wrong", None), ("I'd say E.", "E"), ("Answer: (b)", "B"), ("Answer: NOT", None),
    ],
)  # fmt: skip
def test_letters_beside_denials_and_opinions(response, letter):
    right = [one for one in "ABCDEFGHIJ" if choice.score(response, one).value == 1.0]
    assert right == ([letter] if letter else [])


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three?", 3), ("Dr. Smith met J. K. Rowling.", 1), ("He said \"Go.\" Then he left.", 2),
        ("No sign at the end", 1), ("Wait... what?", 2), ("It is 3.5 km. Far!", 2), ("E.g. cats, i.e. pets.", 1),
        ("He lives in the U.S. She does not.", 2), ("- one\n- two\n- three", 1), ("Really?! Yes.", 2), ("", 0),
        ("It ended at 5 p.m. on Monday.", 1), ("That is I. You know.", 2),
    ],
)  # fmt: skip
def test_sentences_are_counted(text, count):
    assert count_sentences(text) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("I AM here", 2),
        ("COVID-19 and U.S. news", 2),
        ("DON'T STOP", 3),
        ("(NASA), [ESA]!", 2),
        ("a B c", 1),
        ("1 2", 0),
    ],
)
def test_words_in_capitals_are_counted_as_by_treebank_rules(text, count):
    assert capital_words(text) == count


def test_a_language_that_is_not_known_is_named():
    with pytest.raises(ValueError, match="language is 'xx'; known are af ar bg"):
        is_language("Hallo", "xx")
    assert is_language("123", "de")
