"""Runs with a critic: what they learn, report, keep and resume, on one device."""

import re
from pathlib import Path

import pytest
import torch
from critic_runs import PPO, words_of
from endtoend import R1, read_log
from safetensors.torch import load_file
from test_docs import listed_metrics

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


def weights(folder: Path, step: int, owner: str) -> dict[str, torch.Tensor]:
    return load_file(folder / f"global_step_{step}/{owner}/model.safetensors")


def test_a_critic_begins_at_0_and_returns_are_rewards_less_penalties(ppo: Path) -> None:
    warm, _, last = read_log(ppo)
    assert (warm["critic/values/min"], warm["critic/values/max"]) == (0.0, 0.0)
    # The policy is its own reference still, so no token has a penalty.
    assert (warm["critic/returns/min"], warm["critic/returns/max"]) == pytest.approx((0.1, 1.0), abs=1e-5)
    assert last["critic/values/mean"] > 0.01
    assert last["critic/returns/mean"] != last["critic/advantages/mean"]


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
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert all(torch.equal(merged[name], tensor) for name, tensor in weights(ppo, STEPS, "actor").items())
    refused = r1("merge", checkpoint / "critic", ok=False)
    assert refused.exit_code != 0
    assert f"forecasts returns and writes no text: name {checkpoint}" in refused.output.replace("\n", " ")
    begin = [f"worker.critic.model.model_path={checkpoint / 'critic'}", "worker.critic.optim.lr=0.0"]
    r1(*words_of(tmp_path / "run", *PPO, *begin, "trainer.save_freq=1", steps=1))
    (record,) = read_log(tmp_path / "run")
    assert record["critic/values/mean"] > 0.01
    trained = weights(ppo, STEPS, "critic")
    assert all(torch.equal(tensor, trained[name]) for name, tensor in weights(tmp_path / "run", 1, "critic").items())
