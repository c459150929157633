"""The EasyR1 commands on two ranks."""

import re
from pathlib import Path

import easyr1_ranks
import pytest
import ranked_runs
import ranks
from easyr1_runs import COMMANDS, QUICKSTART, learners, model_of, words_of
from endtoend import R1, ROOT
from families import save_model

from r1_cli.config import load_config, unavailable


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_of_a_command_is_refused_with_two_ranks(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    config, provenance = load_config(words_of(name, "owner/model", tmp_path))
    assert config.trainer.devices == 2
    assert unavailable(config, provenance) == []


def test_a_dry_run_shows_where_ranks_and_engines_would_be_and_that_these_have_one_device(
    r1: R1, tmp_path: Path
) -> None:
    words = words_of("qwen2_5_vl_3b_android_gui_grpo", "owner/model", tmp_path)
    shown = r1("train", *words, "trainer.nnodes=2", "--dry-run").output
    assert re.search(r"learner-0 … learner-1 +node 0 +0, 1", shown)
    assert re.search(r"learner-2 … learner-3 +node 1 +0, 1", shown)
    assert re.search(r"engine-2 … engine-3 +node 1 +0, 1", shown)
    easyr1 = "worker.rollout.tensor_parallel_size=2"
    assert (
        f"note: {easyr1} has no effect: an embedded engine has one device"
        in r1("train", *words, easyr1, "--dry-run").output
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the commands' models are replaced by, as folders."""
    folder, kinds = tmp_path_factory.mktemp("models"), {model_of(name) for name in COMMANDS}
    return {QUICKSTART: QUICKSTART} | {kind: save_model(kind, folder / kind) for kind in kinds - {QUICKSTART}}


@pytest.mark.slow
@pytest.mark.parametrize("name", learners())
def test_two_ranks_take_the_step_of_one_process(name: str, models: dict[str, str], monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    expected = easyr1_ranks.take_step(name, models[model_of(name)])
    assert len(expected) == 2
    for found in ranks.run(easyr1_ranks.take_step, name, models[model_of(name)]):
        pairs = zip(found, expected, strict=True)
        assert all(compared(one) == pytest.approx(compared(other), rel=0.02, abs=1e-3) for one, other in pairs)


def compared(update: dict[str, float]) -> dict[str, float]:
    """Without the share of clipped tokens while nothing has moved: a clip_ratio_low of 0 lets rounding decide it."""
    return {key: value for key, value in update.items() if abs(update["ppo_kl"]) > 1e-6 or "clipfrac" not in key}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl_30b_geo3k_grpo"])
def test_a_command_trains_for_two_steps_on_two_ranks(name: str, models: dict[str, str], tmp_path: Path) -> None:
    assert model_of(name) == "qwen3_vl_moe"
    words = words_of(name, models[model_of(name)], tmp_path / "unused")
    for found in ranks.run(ranked_runs.train, tmp_path, "train", *words):
        assert [record["step"] for record in found if "actor/grad_norm" in record] == [1, 2]
