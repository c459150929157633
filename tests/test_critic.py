"""Runs with a critic on one device: learning, metrics, checkpoints and resuming."""

import re
from pathlib import Path

import pytest
import torch
from critic_runs import PPO, words_of
from endtoend import R1, ROOT, listed_metrics, read_log, without_clock
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

pytestmark = pytest.mark.slow

STEPS = 3
WARM = [
    "trainer.critic_warmup=1",
    "trainer.save_freq=1",
    "trainer.save_limit=-1",
    "algorithm.kl_type=adaptive",
    "algorithm.kl_horizon=100",
]


@pytest.fixture(scope="module")
def ppo(r1: R1, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps, the first of which warms the critic up, with what it printed."""
    folder = tmp_path_factory.mktemp("ppo")
    (folder / "output.txt").write_text(r1(*words_of(folder, *PPO, *WARM, steps=STEPS)).output)
    return folder


def weights(folder: Path, step: int, owner: str, name: str = "model") -> dict[str, torch.Tensor]:
    return load_file(folder / f"global_step_{step}/{owner}/{name}.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_critic_begins_at_0_and_returns_are_rewards_less_penalties(ppo: Path) -> None:
    warm, _, last = read_log(ppo)
    assert (warm["critic/values/min"], warm["critic/values/max"]) == (0.0, 0.0)
    # The policy is its own reference still, so no token has a penalty.
    assert (warm["critic/returns/min"], warm["critic/returns/max"]) == pytest.approx((0.1, 1.0), abs=1e-5)
    assert last["critic/values/mean"] > 0.01
    assert last["critic/returns/mean"] != last["critic/advantages/mean"]


def test_steps_that_warm_the_critic_up_leave_the_actor_to_the_bit(ppo: Path) -> None:
    begun = load_file(ROOT / "examples/quickstart/model/model.safetensors")
    # The file has the family's older names, and half the digits.
    older = {"model.language_model.": "model.", "model.visual.": "visual."}
    warm = {re.sub("|".join(older), lambda m: older[m[0]], name): w for name, w in weights(ppo, 1, "actor").items()}
    assert equal(warm, {name: tensor.to(torch.float32) for name, tensor in begun.items()})
    assert not equal(warm, weights(ppo, 2, "actor"))
    assert not equal(weights(ppo, 1, "critic"), weights(ppo, 2, "critic"))
    records = read_log(ppo)
    assert [any(key.startswith("actor/pg_") for key in record) for record in records] == [False, True, True]
    assert all(record["critic/grad_norm"] > 0 for record in records)


def test_a_run_with_a_critic_goes_on_to_the_bit(r1: R1, ppo: Path, tmp_path: Path) -> None:
    begin = f"trainer.load_checkpoint_path={ppo / 'global_step_1'}"
    r1(*words_of(tmp_path, *PPO, *WARM, begin, steps=STEPS))
    assert without_clock(read_log(tmp_path)) == without_clock(read_log(ppo))[1:]
    for owner in ("actor", "critic"):
        for name in ("model", "optimizer"):
            assert equal(weights(tmp_path, STEPS, owner, name), weights(ppo, STEPS, owner, name)), (owner, name)


def test_the_kl_in_the_reward_lowers_returns_by_a_coefficient_that_is_fixed_or_adapts(
    r1: R1, ppo: Path, tmp_path: Path
) -> None:
    # The policy has hardly moved, so the KL lies far below its target: error -0.2, 16 samples a step; none in warm-up.
    steered = [0.01, 0.01, 0.01 * (1 - 0.2 * 16 / 100)]
    assert [record["critic/kl_coef"] for record in read_log(ppo)] == pytest.approx(steered)
    r1(*words_of(tmp_path, *PPO, "algorithm.kl_coef=1000"))
    first, second = read_log(tmp_path)
    assert (first["critic/kl_coef"], second["critic/kl_coef"]) == (1000, 1000)
    assert first["critic/kl"] == pytest.approx(0, abs=1e-6) != second["critic/kl"]
    assert (first["critic/returns/min"], first["critic/returns/max"]) == pytest.approx((0.1, 1.0), abs=1e-3)
    assert second["critic/returns/max"] - second["critic/returns/min"] > 2 > second["critic/rewards/max"]


def test_every_metric_of_a_critic_stands_on_the_page_and_no_other(ppo: Path) -> None:
    written = {name for record in read_log(ppo) for name in record} - {"step"}
    of_critics, others = listed_metrics("The critic"), [p for p in listed_metrics() if p.pattern != "actor/[^ ]+"]
    assert not [name for name in sorted(written) if not any(p.fullmatch(name) for p in (*of_critics, *others))]
    assert not [p.pattern for p in of_critics if not any(p.fullmatch(name) for name in written)]


def test_the_plan_knows_the_critic(ppo: Path) -> None:
    output = (ppo / "output.txt").read_text()
    # 4 prompts in mini-batches of 4, twice; weights, gradients and two states of 835,937 parameters in float32
    assert re.search(r"the critic's +2 ", output)
    assert re.search(r"critic +13\.4 MB", output)


def test_merge_takes_the_actor_of_a_checkpoint_and_a_run_may_begin_with_its_critic(
    r1: R1, ppo: Path, tmp_path: Path
) -> None:
    checkpoint = ppo / f"global_step_{STEPS}"
    r1("merge", checkpoint, "--output", tmp_path / "merged")
    # A checkpoint has the names of transformers' class, a merged model the published ones.
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").state_dict()
    assert equal(weights(ppo, STEPS, "actor"), {name: merged[name] for name in weights(ppo, STEPS, "actor")})
    refused = r1("merge", checkpoint / "critic", ok=False)
    assert refused.exit_code != 0
    assert f"forecasts returns and writes no text: name {checkpoint}" in refused.output.replace("\n", " ")
    begin = [f"worker.critic.model.model_path={checkpoint / 'critic'}", "worker.critic.optim.lr=0.0"]
    r1(*words_of(tmp_path / "run", *PPO, *begin, "trainer.save_freq=1", steps=1))
    (record,) = read_log(tmp_path / "run")
    assert record["critic/values/mean"] > 0.01
    assert equal(weights(tmp_path / "run", 1, "critic"), weights(ppo, STEPS, "critic"))


def test_a_critics_loss_falls_by_half_on_the_quickstart(r1: R1, tmp_path: Path) -> None:
    larger = ["data.rollout_batch_size=16", "worker.actor.global_batch_size=16"]
    learning = ["algorithm.adv_estimator=gae", "worker.critic.optim.lr=1e-3"]
    r1(*words_of(tmp_path, *larger, *learning, steps=9))
    first, *_, one, two, three = (record["critic/vf_loss"] for record in read_log(tmp_path))
    assert (one + two + three) / 3 < first / 2
