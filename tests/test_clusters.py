"""Two nodes with vLLM beside their ranks learn what one process does with its own engine.

With embedded engines they give its very numbers (`test_many_ranks`); what each way has reached stands in
benchmarks/results/cluster.md.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from endtoend import QUICKSTART, R1, read_log
from test_many_ranks import HERE, finished, two_nodes

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not (find_spec("ray") and find_spec("vllm")), reason="ray or vllm is not installed"),
]

STEPS = 10  # in which the quickstart learns half of what it does in all
LEARN = [
    f"trainer.max_steps={STEPS}", f"trainer.val_freq={STEPS}", "trainer.save_freq=-1", "trainer.logger=[file]",
    "worker.actor.optim.lr_scheduler_type=constant", "data.filter_overlong_prompts_workers=1",
    "data.val_files=examples/quickstart/val.parquet[:162]",
]  # fmt: skip


def accuracies(folder: Path) -> tuple[float, float]:
    """Before the first step and after the last."""
    records = read_log(folder)
    return records[0]["val/accuracy_reward"], records[-1]["val/accuracy_reward"]


def test_two_nodes_reach_one_process_accuracy(tmp_path: Path, r1: R1) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    r1("train", QUICKSTART, *LEARN, "worker.rollout.name=embedded", f"trainer.save_checkpoint_path={one}")
    seated = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", f"trainer.save_checkpoint_path={two}"]
    with two_nodes(cpus=2) as (address, _):
        out = finished("train", QUICKSTART, *LEARN, "worker.rollout.name=vllm", *seated, RAY_ADDRESS=address, **HERE)
    assert len(re.findall(r"engine-\d +127\.0\.0\.1 +cpu", out)) == 2
    before, after = accuracies(one)
    assert after > before + 0.2, "one process learns nothing in so few steps"
    assert accuracies(two)[1] > after - 0.12
    for record in read_log(two)[1:]:
        assert record["rollout/logprob_gap_max"] < 1e-3
