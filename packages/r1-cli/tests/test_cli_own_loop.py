"""`r1_cli.open`: what it refuses before it loads anything."""

from pathlib import Path
from typing import Any

import pytest

import r1_cli
from r1_cli.config import ConfigError, load_config

QUICKSTART = Path(__file__).parents[3] / "examples/quickstart"
DATA = {"train_files": str(QUICKSTART / "train.parquet"), "prompt_key": "problem", "answer_key": "answer"}
SMALL: dict[str, Any] = {
    "data": {
        **DATA,
        "rollout_batch_size": 4,
        "format_prompt": None,
        "max_prompt_length": 64,
        "max_response_length": 20,
    },
    "worker": {
        "actor": {"global_batch_size": 4, "model": {"model_path": str(QUICKSTART / "model")}},
        "reward": {"reward_function": f"{QUICKSTART / 'reward.py'}:compute_score"},
    },
}


@pytest.mark.parametrize(
    ("key", "value"),
    [("n_gpus_per_node", 2), ("max_staleness", 1)],
)
def test_what_needs_a_loop_is_refused_by_name(key: str, value: int) -> None:
    config = {**SMALL, "trainer": {"n_gpus_per_node": 1, key: value}}
    with pytest.raises(ConfigError, match=rf"trainer\.{key}.*needs r1 train"), r1_cli.open(config):
        pass


@pytest.mark.parametrize(
    "teacher",
    [
        {"urls": "http://127.0.0.1:1/v1"},
        {"sources": {"shapes": {"model": {"model_path": "owner/teacher"}}}},
        {"model": {"model_path": "owner/teacher"}, "max_pixels": 5000000},
    ],
)
def test_a_teacher_that_the_learner_does_not_hold_is_refused(teacher: dict[str, Any]) -> None:
    config = {**SMALL, "worker": {**SMALL["worker"], "teacher": teacher}, "trainer": {"n_gpus_per_node": 1}}
    config["algorithm"] = {"disable_kl": True}
    with pytest.raises(ConfigError, match=r"worker\.teacher.*needs r1 train"), r1_cli.open(config):
        pass


def test_a_mapping_is_checked_as_a_file_is_and_a_loaded_configuration_is_taken() -> None:
    with pytest.raises(ConfigError, match="rollout_batch_sise"), r1_cli.open({"data": {"rollout_batch_sise": 4}}):
        pass
    words = ["trainer.max_staleness=1", "trainer.n_gpus_per_node=1", f"config={QUICKSTART / 'config.yaml'}"]
    config, _ = load_config(words)
    with pytest.raises(ConfigError, match="max_staleness"), r1_cli.open(config):
        pass
