"""What `from r1_rewards import …` gives: the names that users and their files build on."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import r1_rewards
from r1_rewards.main import main
from r1_rewards.verifiers import BUILTINS, columns_of, truth_is_answer, truth_problem

README = Path(__file__).resolve().parents[1] / "README.md"
NAMES = [
    "Cause", "Failure", "FailurePolicy", "OpenVerifier", "PooledVerifier", "RewardFailure", "RewardInput",
    "RewardSpecError", "Score", "Verifier", "load", "__version__",
]  # fmt: skip
MODULES = [
    "answer", "box", "choice", "code", "combine", "dapo", "extract", "format", "geo3k", "gsm8k", "gsm8k_verl",
    "ifeval", "language", "length", "lmm_r1", "math", "math_dapo", "math_easyr1", "math_verl", "numeric", "point",
    "prime_math", "r1v", "r1v_easyr1", "reference_probability", "repetition", "search_r1", "text",
]  # fmt: skip
DOTTED = ["r1_rewards.main", "r1_rewards.types", "r1_rewards.load", "r1_rewards.spec", "r1_rewards.sandbox"]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_there(name):
    assert getattr(r1_rewards, name)


@pytest.mark.parametrize("name", MODULES)
def test_a_verifier_is_imported_from_the_package_root(name):
    if name == "extract":
        assert callable(r1_rewards.extract.final_answer)
    elif name != "reference_probability":
        assert callable(getattr(r1_rewards, name).score)
    else:
        assert callable(r1_rewards.reference_probability.ReferenceProbability)


def test_nothing_else_is_public():
    assert sorted(r1_rewards.__all__) == sorted(set(NAMES) - {"__version__"})
    assert set(MODULES) <= set(dir(r1_rewards))
    with pytest.raises(AttributeError, match="no attribute 'maths'"):
        r1_rewards.maths  # noqa: B018


@pytest.mark.parametrize("reward", ["text", "http://127.0.0.1:9/score"])
def test_a_verifier_says_what_it_takes_when_it_is_given_something_else(reward):
    right = r1_rewards.RewardInput("a", "a")
    cases = {
        "input 1 is a tuple, .*RewardInput\\(response=": [right, ("a", "a")],
        "input 0 is a dict, .*RewardInput\\(response=": [{"response": "a", "ground_truth": "a"}],
        "a list of RewardInput, got one RewardInput: write \\[RewardInput": right,
        "a list of RewardInput, got one str": "a",
        "the response of input 0 is a NoneType; it must be a str": [r1_rewards.RewardInput(None, "a")],
    }
    with r1_rewards.load(reward) as verifier:
        for message, inputs in cases.items():
            with pytest.raises(TypeError, match=message):
                verifier(inputs)


@pytest.mark.parametrize("path", DOTTED)
def test_a_dotted_path_that_users_write_is_importable(path):
    assert importlib.import_module(path)


def test_the_readme_lists_the_public_names():
    named = set(re.findall(r"`(\w+)`", README.read_text(encoding="utf-8")))
    assert named >= set(NAMES) | set(MODULES)


def test_looking_at_the_package_imports_no_verifier():
    code = "import sys, r1_rewards; print([name for name in sys.modules if name.endswith(('.math', '.code'))])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_file_is_scored_line_by_line_with_reasons(tmp_path, capsys):
    rows = [
        {"response": r"\\boxed{18.0}", "ground_truth": "18", "level": 3},
        {"response": "no\u2028\ud800", "ground_truth": "18", "images": ["a.png"], "response_length": 2},
        {"response": "18", "ground_truth": "none"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n\n".join(json.dumps(row).replace("\\u2028", "\u2028") for row in rows), "utf-8")
    assert main(["score", "gsm8k", str(file)]) == 0
    told = capsys.readouterr()
    right, wrong, unusable = map(json.loads, told.out.splitlines())
    assert (right["value"], right["extracted"], wrong["value"], wrong["extracted"]) == (1.0, "18", 0.0, None)
    assert (right["level"], right["reason"], wrong["reason"]) == (3, "the same number", "there is no final number")
    assert "no number" in unusable["truth_problem"]
    assert "3 responses, mean 0.3333, 0 failed, 1 with a truth of no use" in told.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("{}", "line 1 needs 'response'"),
        ('\n{"response": 5, "ground_truth": "5"}', "line 2: 'response' is 5, a int; write it as text"),
        ('{"response": "5", "ground_truth": null}', "line 1: 'ground_truth' is None"),
    ],
)
def test_a_line_that_cannot_be_scored_is_named(tmp_path, capsys, line, message):
    (tmp_path / "rows.jsonl").write_text(line)
    assert main(["score", "gsm8k", str(tmp_path / "rows.jsonl")]) == 2
    assert message in capsys.readouterr().err


UNUSABLE = [
    ("math", "", "18"), ("math", "9^{9^{9^9}}", "18"), ("math", "1e9999", "18"), ("gsm8k", "none", "18"),
    ("numeric", "many", "5 m"), ("choice", "none of these", "B. Paris"), ("text", " ", "A"),
    ("box", "here", "[0,0,1,1]"),
    ("box", "[5, 5, 5, 9]", "[0,0,1,1]"), ("point", "(3, 4)", "[0,0,1,1]"), ("r1v", "<answer></answer>", "5"),
    ("geo3k", "cm", "5"), ("math_easyr1", "", "5"), ("r1v_easyr1", "%", "5"), ("prime_math", " ", "5"),
    ("dapo", "5\n6", "5"), ("math_dapo", "", "5"), ("math_verl", " ", "5"), ("gsm8k_verl", "1,200", "1200"),
    ("gsm8k_verl", "a #### 18", "18"), ("search_r1", "A", "nile"), ("lmm_r1", "", "5"),
    ("code", "print(5)", "assert f()"), ("code", '{"inputs": ["5"], "outputs": [""]}', "assert f()"),
    ("answer", " ", "5"), ("ifeval", "no rules", '{"instruction_id_list": ["punctuation:no_comma"]}'),
    ("geo3k", "None", "no"), ("math_easyr1", "none", "no"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "truth", "usable"), UNUSABLE)
def test_a_truth_that_no_response_can_meet_is_named_before_a_run(name, truth, usable):
    assert truth_problem(name, truth)
    assert truth_problem(name, usable) is None


def test_every_verifier_that_compares_with_a_truth_can_say_of_one_that_it_is_of_no_use():
    told = {name for name, _, _ in UNUSABLE} | {"combine", "reference_probability"}
    assert told >= {name for name in BUILTINS if name == "code" or truth_is_answer(name)}


def test_options_and_columns_decide_whether_a_truth_is_of_use():
    assert truth_problem("choice", "Paris", {}, {"choices": ["London", "Paris"], "id": 3}) is None
    assert truth_problem("gsm8k_verl", "1,200", {"method": "flexible"}) is None
    parts = {"parts": {"choice": 1.0, "format": 0.1}}
    assert columns_of("combine", parts) == {"choices"}
    assert truth_problem("combine", "Paris", parts, {"choices": ["London", "Paris"]}) is None
    assert "choice: the truth 'Rome'" in str(truth_problem("combine", "Rome", parts, {"choices": ["London", "Paris"]}))
