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
from r1_rewards.spec import truth_problem

README = Path(__file__).resolve().parents[1] / "README.md"
NAMES = [
    "Cause", "Failure", "FailurePolicy", "OpenVerifier", "PooledVerifier", "RewardFailure", "RewardInput",
    "RewardSpecError", "Score", "Verifier", "load", "__version__",
]  # fmt: skip
MODULES = [
    "box", "choice", "code", "combine", "dapo", "extract", "format", "geo3k", "gsm8k", "gsm8k_verl", "language",
    "length", "lmm_r1", "math", "math_dapo", "math_easyr1", "math_verl", "numeric", "point", "prime_math", "r1v",
    "r1v_easyr1", "reference_probability", "repetition", "search_r1", "text",
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
    rows = [{"response": r"\\boxed{18.0}", "ground_truth": "18", "level": 3}, {"response": "no", "ground_truth": "18"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert main(["score", "gsm8k", str(file)]) == 0
    told = capsys.readouterr()
    right, wrong = map(json.loads, told.out.splitlines())
    assert (right["value"], right["extracted"], wrong["value"], wrong["extracted"]) == (1.0, "18", 0.0, None)
    assert "2 responses, mean 0.5, 0 failed" in told.err


@pytest.mark.parametrize(("line", "message"), [("{", "line 1 is not JSON"), ("{}", "line 1 needs 'response'")])
def test_a_line_that_cannot_be_scored_is_named(tmp_path, capsys, line, message):
    (tmp_path / "rows.jsonl").write_text(line)
    assert main(["score", "gsm8k", str(tmp_path / "rows.jsonl")]) == 2
    assert message in capsys.readouterr().err


UNUSABLE = [("math", ""), ("math", "9^{9^{9^9}}"), ("math", "1e9999"), ("gsm8k", "none")]


@pytest.mark.parametrize(("name", "truth"), UNUSABLE)
def test_a_truth_that_no_response_can_meet_is_named_before_a_run(name, truth):
    assert truth_problem(name, truth)
    assert truth_problem(name, "18") is None
