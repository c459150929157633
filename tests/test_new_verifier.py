"""A new verifier is one new file and edits no other."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import r1_rewards

SHOUT = '''
"""Score how loud a response is."""

from r1_rewards.types import Score


def score(response: str, ground_truth: str, *, loudest: float = 1.0) -> Score:
    """Return `loudest` for the truth in capital letters."""
    return Score(loudest * (ground_truth.upper() in response and response.isupper()))
'''
LOAD = """
from r1_rewards import RewardInput, load, shout
with load("shout", {"loudest": 2.0}) as verifier:
    print(shout.score("YES", "yes").value, [score.value for score in verifier([RewardInput("YES", "yes")])])
"""
CONFIG = """
from r1_cli.config import load_config
words = ["data.train_files=owner/rows@train", "worker.actor.model.model_path=owner/model"]
config, _ = load_config([*words, "worker.reward.reward_function=shout"])
print(config.worker.reward.reward_function)
load_config([*words, "worker.reward.reward_function=shout", "worker.reward.reward_function_kwargs={louder: 1}"])
"""
REWARD_TEST = "from r1_cli.main import main; main(['reward', 'test', 'shout'])"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a process that sees a copy of the package with one file more."""
    copy = tmp_path_factory.mktemp("copy") / "r1_rewards"
    shutil.copytree(Path(r1_rewards.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "verifiers" / "shout.py").write_text(SHOUT)
    return {**os.environ, "PYTHONPATH": str(copy.parent), "COLUMNS": "160"}


def run(environment: dict[str, str], code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    return ran.stdout + ran.stderr


def test_it_is_found_by_name_and_scores_in_a_pool(environment: dict[str, str]) -> None:
    assert run(environment, LOAD) == "1.0 [2.0]\n"


def test_a_configuration_names_it_and_its_options_are_checked(environment: dict[str, str]) -> None:
    told = run(environment, CONFIG)
    assert told.startswith("shout\n")
    assert "takes no 'louder'; did you mean 'loudest'?" in told


def test_the_reward_test_tries_it(environment: dict[str, str]) -> None:
    assert "shout: built-in verifier" in run(environment, REWARD_TEST)
