"""What `from r1_rewards import …` gives: the names that users and their files build on."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import r1_rewards

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
