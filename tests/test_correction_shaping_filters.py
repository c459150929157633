"""Rollout correction, reward shaping, group filters and learning rates in real runs."""

import json
from math import cos, pi
from pathlib import Path
from typing import Any, get_args

import pytest
from endtoend import QUICKSTART, R1, SMALL, read_log, without_clock
from standing import Standing, stand

from r1_cli.build import algorithm
from r1_cli.build.learner import build_learning_rate
from r1_cli.config import load_config
from r1_cli.config.algorithm import Rejection
from r1_core.learner import Learner

STEP = [*SMALL, "trainer.val_before_train=false", "trainer.val_freq=-1", "trainer.save_freq=-1"]
STEP += ["worker.rollout.canary=false"]  # of the run below, which stands, it is on
# The engine computes in float32 on a processor: a learner in bfloat16 disagrees with it.
GAP = "worker.actor.fsdp.torch_dtype=bf16"
CORRECTION = "algorithm.rollout_correction"
EVERY = get_args(Rejection)


def run(r1: R1, folder: Path, *overrides: str, steps: int = 1) -> list[dict[str, Any]]:
    r1("train", QUICKSTART, *STEP, f"trainer.max_steps={steps}", f"trainer.save_checkpoint_path={folder}", *overrides)
    return read_log(folder)


def whole_and_cut(r1: R1, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run three steps at once, and again stopping after the second; both must be the same to the bit."""
    whole, cut = folder / "whole", folder / "cut"
    # A learning rate that depends on the number of steps would tell the two apart.
    same = [*overrides, "trainer.save_freq=1", "worker.actor.optim.lr_scheduler_type=constant"]
    for path, steps in ((whole, 3), (cut, 2), (cut, 3)):
        run(r1, path, *same, steps=steps)
    assert without_clock(read_log(whole)) == without_clock(read_log(cut))
    states = [json.loads((path / "global_step_3/trainer.json").read_text()) for path in (whole, cut)]
    assert states[0] == states[1]
    return read_log(whole)


@pytest.fixture(scope="module")
def standing(r1: R1, tmp_path_factory: pytest.TempPathFactory) -> Standing:
    return stand(r1, tmp_path_factory.mktemp("standing"), GAP)


@pytest.mark.parametrize(
    ("words", "largest"),
    [
        ("rollout_is=token rollout_is_threshold=1.01", 1.01),
        ("rollout_is=token rollout_is_threshold=0.99_1.01", 1.01),
        ("rollout_is=sequence", 2.0),
        ("rollout_is=geometric", 2.0),
        ("rollout_is=sequence rollout_is_batch_normalize=true", 16.0),
    ],
)
def test_weights_of_every_kind_take_a_step(standing: Standing, words: str, largest: float) -> None:
    record = standing.step(*(f"{CORRECTION}.{word}" for word in words.split()))
    assert record["actor/grad_norm"] > 0
    assert 0 < record["actor/rollout_ess"] < 1
    assert record["actor/rollout_weight_mean"] < record["actor/rollout_weight_max"] <= largest
    assert record["actor/rollout_rejected"] == 0


@pytest.mark.parametrize(
    ("rules", "bounds"),
    [
        ("token", "1.001"),
        ("geometric", "0.999_1.001"),
        (",".join(EVERY), ",".join("9" if name.endswith("k1") else "1e-5" for name in EVERY)),
    ],
    ids=["token", "geometric", "every one"],
)
def test_rejections_take_a_step(standing: Standing, rules: str, bounds: str) -> None:
    record = standing.step(f"{CORRECTION}.rollout_rs={rules}", f"{CORRECTION}.rollout_rs_threshold={bounds}")
    assert 0 < record["actor/rollout_rejected"] < 1
    assert record["actor/grad_norm"] > 0


def test_a_step_that_rejects_everything_moves_nothing(standing: Standing) -> None:
    record = standing.step(f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=8_9")
    assert record["actor/rollout_rejected"] == 1
    assert record["actor/grad_norm"] == record["actor/pg_loss"] == 0


def test_the_gap_is_logged_with_no_correction(standing: Standing) -> None:
    record = standing.step()
    assert 0 < record["rollout/logprob_gap_mean"] < record["rollout/logprob_gap_max"] < 1
    assert 0.9 < record["rollout/effective_sample_size"] < 1
    assert record["rollout/kl_k3"] > 0
    assert not any(name.startswith("actor/rollout_") for name in record)


def test_a_step_of_one_update_needs_no_forward_pass_for_the_old_policy(
    r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["algorithm.disable_kl=false", "algorithm.use_kl_loss=true"]
    one_update = ["worker.actor.global_batch_size=4", "worker.actor.micro_batch_size_per_device_for_update=8"]
    same = [*words, *one_update, "worker.actor.micro_batch_size_per_device_for_experience=8"]
    asked, add_logprobs = [], Learner.add_logprobs

    def noting(self: Learner, samples: Any, needs: Any) -> Any:
        asked.append(len(samples) if "old_logprobs" in needs else 0)
        return add_logprobs(self, samples, needs)

    monkeypatch.setattr(Learner, "add_logprobs", noting)
    once = run(r1, tmp_path / "once", *same, steps=2)
    assert 16 not in asked
    with monkeypatch.context() as patch:
        patch.setattr(algorithm, "gather_needs", lambda *parts: frozenset({"old_logprobs"}))
        twice = run(r1, tmp_path / "twice", *same, steps=2)
    assert asked.count(16) == 2
    assert without_clock(once) == without_clock(twice)
    assert once[1]["rollout/logprob_gap_max"] > 0


@pytest.fixture(scope="module")
def shaped(r1: R1, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Three steps of one update each, with a punishment of long answers and a learning rate that falls."""
    buffer, once = "worker.reward.overlong_buffer", "worker.actor.global_batch_size=4"
    words = [f"{buffer}.enable=true", f"{buffer}.len=15", f"{buffer}.penalty_factor=2", once]
    words += ["worker.actor.optim.lr_scheduler_type=linear", "worker.actor.optim.lr_warmup_steps=1"]
    return run(r1, tmp_path_factory.mktemp("shaped"), *words, "worker.actor.optim.min_lr_ratio=0", steps=3)


def test_long_answers_are_punished_before_the_advantages(shaped: list[dict[str, Any]]) -> None:
    record = shaped[0]
    assert record["overlong/penalty"] < 0
    assert 0 < record["overlong/ratio"] <= 1
    assert record["critic/rewards/mean"] == pytest.approx(record["critic/score/mean"] + record["overlong/penalty"])
    assert record["reward/overall"] == pytest.approx(record["critic/score/mean"])


def test_rewards_are_normalised_over_the_run_and_clipped(r1: R1, tmp_path: Path) -> None:
    shaped = ["algorithm.normalize_reward=true", "algorithm.reward_clip_range=[-1,0.5]"]
    records = whole_and_cut(r1, tmp_path, *shaped, "algorithm.adv_estimator=remax")
    assert all(-1 <= r["critic/rewards/min"] < r["critic/rewards/max"] <= 0.5 for r in records)
    assert all(r["actor/grad_norm"] > 0 for r in records)
    state = json.loads((tmp_path / "whole/global_step_3/trainer.json").read_text())["rewards"]
    assert state["count"] == 3 * 16


def test_zero_variance_keeps_the_groups_whose_answers_differ(r1: R1, tmp_path: Path) -> None:
    chosen = [
        "algorithm.online_filtering=true",
        "algorithm.filter_mode=zero_variance",
        "data.mini_rollout_batch_size=2",
    ]
    # A group of two whose accuracies differ has one right answer.
    records = run(r1, tmp_path, *chosen, "algorithm.filter_key=accuracy", "worker.rollout.n=2", steps=2)
    for record in records:
        assert record["rollout/groups_trained"] == 4
        assert record["reward/accuracy"] == 0.5
    assert sum(record["rollout/groups_sampled"] for record in records) > 8
    assert max(record["filter/rate"] for record in records) > 0


def test_ema_std_filters_by_its_past_and_goes_on_with_it(r1: R1, tmp_path: Path) -> None:
    words = "filter_mode=ema_std filter_ema_start_step=1 filter_start_step=2 std_filter_beta=1.2 filter_ema_ratio=0.5"
    chosen = ["algorithm.online_filtering=true", *(f"algorithm.{word}" for word in words.split())]
    records = whole_and_cut(r1, tmp_path, *chosen, "data.mini_rollout_batch_size=2", "trainer.max_try_make_batch=4")
    assert "filter/ema_mean" not in records[0]
    assert records[0]["filter/rate"] == 0
    for record in records[1:]:
        assert record["filter/ema_threshold"] == pytest.approx(1.2 * record["filter/ema_mean"])
    assert records[1]["filter/ema_mean"] != records[2]["filter/ema_mean"]
    assert max(record["filter/rate"] for record in records) > 0
    state = json.loads((tmp_path / "cut/global_step_3/trainer.json").read_text())["filter"]
    assert (state["step"], state["steps_seen"]) == (4, 3)


def test_a_filter_key_that_no_score_has_is_named(r1: R1, tmp_path: Path) -> None:
    words = ["algorithm.online_filtering=true", "algorithm.filter_key=acc", f"trainer.save_checkpoint_path={tmp_path}"]
    process = r1("train", QUICKSTART, *STEP, *words, ok=False)
    assert process.exit_code == 2
    assert "algorithm.filter_key=acc: the reward function reports no such part, only accuracy" in process.output


@pytest.mark.parametrize(
    ("words", "scales"),
    [
        ("lr_scheduler_type=constant lr_warmup_steps=2", [0.5, 1, 1, 1]),
        ("lr_scheduler_type=constant lr_warmup_ratio=0.5 lr_warmup_steps=null", [0.5, 1, 1, 1]),
        ("lr_scheduler_type=linear lr_warmup_steps=0 min_lr_ratio=0.2", [1, 0.8, 0.6, 0.4]),
        ("lr_scheduler_type=cosine lr_warmup_steps=0 min_lr_ratio=null", [(1 + cos(pi * i / 4)) / 2 for i in range(4)]),
        ("lr_scheduler_type=cosine lr_warmup_steps=0 min_lr_ratio=0 num_cycles=1", [1, 0.5, 0, 0.5]),
    ],
)
def test_the_learning_rate_follows_its_keys(words: str, scales: list[float]) -> None:
    config, _ = load_config([QUICKSTART, *(f"worker.actor.optim.{word}" for word in words.split())])
    factor = build_learning_rate(config.worker.actor.optim, 4, 1)
    assert [factor(step) for step in range(4)] == pytest.approx(scales)


def test_a_run_learns_at_the_rate_of_its_keys_and_logs_it(shaped: list[dict[str, Any]]) -> None:
    assert [record["actor/lr"] for record in shaped] == pytest.approx([1e-4, 1e-4, 0.5e-4])
