"""A short training by each published recipe on two ranks gives the numbers of one process, also after resuming."""

from pathlib import Path
from typing import Any

import pytest
import ranked_runs
import ranks
from critic_runs import KL_INSIDE, PPO, words_of
from endtoend import R1, read_log, without_clock

pytestmark = pytest.mark.slow

STEPS = 3
RECIPES = {
    "DAPO": [
        "algorithm.online_filtering=true", "algorithm.filter_key=accuracy", "worker.actor.clip_ratio_high=0.28",
        "worker.reward.overlong_buffer.enable=true", "worker.reward.overlong_buffer.len=8",
    ],
    "REINFORCE++": ["algorithm.adv_estimator=reinforce_plus_plus", *KL_INSIDE],
    "ReMax": ["algorithm.adv_estimator=remax"],
    "PPO": [*PPO, "trainer.critic_warmup=1", "trainer.save_freq=2"],
}  # fmt: skip


def words(name: str, *more: str) -> list[str]:
    """What is typed, but for the run's folder."""
    given = words_of(Path("unused"), *RECIPES[name], *more, steps=STEPS)
    return [word for word in given if not word.startswith("trainer.save_checkpoint_path=")]


def numbers(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a run logs, but for what a clock or the place of tokens on ranks decides."""
    own = without_clock(records)
    return [{key: value for key, value in record.items() if not key.startswith("global_seqlen/")} for record in own]


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, other in zip(numbers(found), numbers(expected), strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", RECIPES)
def test_two_ranks_train_by_a_recipe_as_one_process_does(r1: R1, tmp_path: Path, name: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    r1(*words(name), f"trainer.save_checkpoint_path={one}")
    expected = read_log(one)
    assert [record["step"] for record in expected] == [1, 2, 3]
    assert all(0 <= record["reward/overall"] <= 1 for record in expected)
    assert expected[-1]["actor/grad_norm"] > 0
    for found in ranks.run(ranked_runs.train, two, *words(name)):
        assert_same(found, expected)
    if name == "PPO":
        goes_on_elsewhere(r1, tmp_path, expected)


def goes_on_elsewhere(r1: R1, folder: Path, expected: list[dict[str, Any]]) -> None:
    """One process from what two ranks have saved, and two ranks from what one process has."""
    saved = folder / "two/0/global_step_2"
    assert (saved / "critic/model.safetensors").is_file()
    r1(*words("PPO", f"trainer.load_checkpoint_path={saved}"), f"trainer.save_checkpoint_path={folder / 'alone'}")
    assert_same(read_log(folder / "alone"), expected[2:])
    start = f"trainer.load_checkpoint_path={folder / 'one/global_step_2'}"
    for found in ranks.run(ranked_runs.train, folder / "together", *words("PPO", start)):
        assert_same(found, expected[2:])
