"""The commands of EasyR1's users on two ranks."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from easyr1_runs import COMMANDS, NAMES, family_of, main, words_of
from endtoend import R1


def test_all_commands_but_those_with_what_is_refused_are_run() -> None:
    assert set(COMMANDS) - set(NAMES) == {
        "qwen3_14b_dapo17k_dapo", "qwen3_4b_math_grpo_lora", "qwen3_vl_4b_geo3k_grpo_lora",
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_accepts_each_command_with_two_ranks(name: str, r1: R1, tmp_path: Path) -> None:
    result = r1("train", *words_of(name, "owner/model", tmp_path), "--dry-run")
    assert "learner-0 … learner-1" in result.output
    assert "not available" not in result.output


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("ray"), reason="ray is not installed")
@pytest.mark.parametrize("name", ["qwen3_vl_30b_geo3k_grpo"])
def test_a_command_trains_for_two_steps_on_two_ranks(name: str) -> None:
    assert family_of(name) == "qwen3_vl"
    assert main([name]) == 0
