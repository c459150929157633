"""Engines in actors, on the devices of ranks or apart, on one node and on two: as accurate as one process's, and gone.

What each way reaches in all the quickstart's steps stands in benchmarks/results/cluster.md.
"""

import re
import signal
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir

import families
import psutil
import pytest
from endtoend import QUICKSTART, R1, read_log
from test_many_ranks import HERE, PATIENCE, finished, running, two_nodes

pytestmark = pytest.mark.skipif(not find_spec("ray"), reason="ray is not installed")
vllm = [pytest.mark.vllm, pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed")]

STEPS = 10  # in which the quickstart learns half of what it does in all
LEARN = [
    f"trainer.max_steps={STEPS}", f"trainer.val_freq={STEPS}", "trainer.save_freq=-1", "trainer.logger=[file]",
    "worker.actor.optim.lr_scheduler_type=constant", "data.filter_overlong_prompts_workers=1",
    "data.val_files=examples/quickstart/val.parquet[:162]",
]  # fmt: skip
APART = ["worker.rollout.engines.nnodes=2", "worker.rollout.engines.n_gpus_per_node=1"]


def accuracies(folder: Path) -> tuple[float, float]:
    """Before the first step and after the last."""
    records = read_log(folder)
    return records[0]["val/accuracy_reward"], records[-1]["val/accuracy_reward"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["worker.rollout.name=embedded", *APART], pytest.param(["worker.rollout.name=vllm"], marks=vllm)]
)
def test_two_nodes_reach_one_process_accuracy(words: list[str], tmp_path: Path, r1: R1) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    r1("train", QUICKSTART, *LEARN, f"trainer.save_checkpoint_path={one}")
    seated = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", *words, f"trainer.save_checkpoint_path={two}"]
    with two_nodes(cpus=2) as (address, _):
        out = finished("train", QUICKSTART, *LEARN, *seated, RAY_ADDRESS=address, **HERE)
    assert len(re.findall(r"engine-\d +127\.0\.0\.1 +cpu", out)) == 2
    before, after = accuracies(one)
    assert after > before + 0.2, "one process learns nothing in so few steps"
    assert accuracies(two)[1] > after - 0.12
    for record in read_log(two)[1:]:
        assert record["rollout/logprob_gap_max"] < 1e-3


def shared_by(process: psutil.Process) -> set[str]:
    """What a process of vLLM's has mapped of shared memory; "(deleted)" stands behind what has no name any more."""
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    return set(re.findall(r"/dev/shm/(?:psm_|vllm_dist_).*$", maps, re.MULTILINE))


@pytest.mark.vllm
@pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed")
def test_a_tensor_parallel_engine_apart_that_is_killed_ends_the_run_and_leaves_nothing(tmp_path: Path) -> None:
    model = families.save_model("qwen2_5_vl", tmp_path / "model")  # the quickstart's has three heads
    words = [
        "trainer.n_gpus_per_node=2", "worker.rollout.engines.nnodes=1", "worker.rollout.engines.n_gpus_per_node=2",
        "worker.rollout.name=vllm", "worker.rollout.tensor_parallel_size=2", "trainer.max_steps=1000",
        "data.max_prompt_length=1024", f"worker.actor.model.model_path={model}",
    ]  # fmt: skip
    with running(tmp_path / "run", *words) as process:
        log = (tmp_path / "run/logs/engine-0.log").read_text()
        engine = psutil.Process(int(re.findall(r"engine-0 on 127\.0\.0\.1, process (\d+)", log)[-1]))
        own = [engine, *engine.children(recursive=True)]
        shared = [name for one in own for name in shared_by(one)]
        assert shared
        assert all(name.endswith(" (deleted)") for name in shared), "this would stay when the engine is killed"
        sockets = {c.laddr for one in own for c in one.net_connections("unix") if Path(c.laddr).is_socket()}
        assert not [path for path in sockets if path.startswith(gettempdir()) and "r1-ray-" not in path]
        engine.send_signal(signal.SIGKILL)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2, out + err
    assert re.search(r"engine-0 +127\.0\.0\.1 +cpu, cpu", out)
    assert "engine-0 on 127.0.0.1 died" in err
    assert "Traceback" not in err
