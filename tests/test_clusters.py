"""Runs on two nodes and with vLLM under Ray reach what one process reaches, also after a kill.

What each way has reached stands in benchmarks/results/cluster.md.
"""

import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from endtoend import QUICKSTART, R1, read_log
from faults_table import note_fault
from patience import eventually
from started_nodes import started_nodes
from test_many_ranks import (
    PATIENCE,
    RUN,
    assert_same_numbers,
    exact_numbers,
    kill,
    restarts_of,
    running,
    start,
    steps_of,
    two_heads,
    wait_for,
    words_of,
)
from two_nodes import HERE, NODES, two_nodes

from r1_cli.checkpoint.memory import POINTER
from r1_cli.runs.reader import RunReader

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not find_spec("ray"), reason="ray is not installed")]

STEPS = 10  # in which the quickstart learns half of what it does in all
LEARN = [
    f"trainer.val_freq={STEPS}", "trainer.save_freq=-1", "trainer.logger=[file]",
    "worker.actor.optim.lr_scheduler_type=constant", "data.filter_overlong_prompts_workers=1",
    "data.val_files=examples/quickstart/val.parquet[:162]",
]  # fmt: skip


def terminated(process: subprocess.Popen[str]) -> str:
    """What a run has printed that ends by SIGTERM, as it should."""
    process.terminate()
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM, out + err
    return out


def learned(folder: Path) -> tuple[float, float]:
    """Accuracy before the first step and after the last that was asked for."""
    before, after = (read_log(folder)[step]["val/accuracy_reward"] for step in (0, STEPS))
    return before, after


def test_two_started_nodes_give_one_process_numbers_until_sigterm_and_one_rank_goes_on(tmp_path: Path, r1: R1) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    words, folder = [*RUN[2:], "worker.rollout.name=embedded"], f"trainer.save_checkpoint_path={two}"
    with started_nodes() as nodes, nodes.train(*words, folder, "trainer.max_steps=1000") as process:
        wait_for(lambda: steps_of(two) >= 3, process)
        out = terminated(process)
        assert eventually(lambda: not nodes.actors())
    assert re.search(r"learner-0 +\S+ +cpu *\n *learner-1 +\S+ +cpu *\n *engine-0 +\S+ +cpu *\n *engine-1", out)
    taken = steps_of(two)
    for run in (f"trainer.save_checkpoint_path={one}", folder):
        r1(*RUN[:2], *words, run, f"trainer.max_steps={taken + 1}")
    assert [record["step"] for record in read_log(two)] == [*range(1, taken + 2)]
    assert_same_numbers(one, two, steps=3)


def test_two_nodes_with_engines_apart_that_sample_ahead_go_on_as_one_when_one_is_lost_and_as_two_when_it_is_back(
    tmp_path: Path, r1: R1
) -> None:
    one, two, ahead = tmp_path / "one", tmp_path / "two", "trainer.max_staleness=1"
    seats = [*NODES, "worker.rollout.engines.nnodes=2", "worker.rollout.engines.n_gpus_per_node=1"]
    words = [
        *seats,
        "trainer.max_steps=1000",
        "trainer.min_nodes=1",
        "trainer.max_restarts=3",
        "trainer.save_freq=1",
        ahead,
    ]
    with (
        two_nodes(cpus=2) as (address, raylets, join),
        running(two, *words, steps=3, RAY_ADDRESS=address, **HERE) as process,
    ):
        # Nodes of one address are ordered by Ray's ids alone: either rank may be on this one, and either engine.
        lost = [psutil.Process(raylets[1]), *psutil.Process(raylets[1]).children(recursive=True)]
        names = set(re.findall(r"ray::((?:learner|engine|media)-\d)", " ".join(map(words_of, lost))))
        began = time.time()
        for each in lost:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        wait_for(lambda: restarts_of(two), process)
        alone = steps_of(two)
        wait_for(lambda: steps_of(two) > alone + 1, process)
        note_fault("a lost node, with `trainer.min_nodes`", restarts_of(two)[-1], began)
        join()
        kill(two, "learner-0")
        wait_for(lambda: len(restarts_of(two)) == 2, process)
        again = steps_of(two)
        wait_for(lambda: steps_of(two) > again, process)
        out = terminated(process)
    assert "1 of trainer.nnodes=2 machines are there" in out
    devices = [len(one["host"]["devices"]) for one in RunReader(two).starts()]
    assert devices == [2, 1, 2]
    assert re.search(r"learner-0 +127\.0\.0\.1 +cpu *\n *learner-1 +127\.0\.0\.1 +cpu", out)
    assert re.search(r"engine-0 +127\.0\.0\.1 +cpu *\n *engine-1 +127\.0\.0\.1 +cpu", out)
    assert re.search(rf"({'|'.join(names)}) on 127\.0\.0\.1", restarts_of(two)[0]["cause"])
    r1(*RUN, f"trainer.max_steps={alone + 2}", f"trainer.save_checkpoint_path={one}", ahead)
    assert_same_numbers(one, two, steps=alone + 2)
    assert [record["staleness/mean"] for record in read_log(two)[:3]] == [0, 1, 1]


def test_a_node_that_is_lost_with_its_memory_costs_the_step_under_way_and_changes_no_bit(tmp_path: Path) -> None:
    calm, two = tmp_path / "calm", tmp_path / "two"
    words = [*NODES, "trainer.max_steps=1000", "trainer.memory_save_freq=1", "trainer.max_restarts=3"]
    with two_nodes() as (address, raylets, join):
        with running(two, *words, steps=3, RAY_ADDRESS=address, **HERE) as process:
            folders = [Path(line) for line in (two / POINTER).read_text().splitlines()]
            wait_for(lambda: all((one / "neighbour/global_step_3").is_dir() for one in folders), process)
            lost = [psutil.Process(raylets[1]), *psutil.Process(raylets[1]).children(recursive=True)]
            (number,) = re.findall(r"ray::copies-(\d)", " ".join(map(words_of, lost)))
            began = time.time()
            for each in lost:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            shutil.rmtree(folders[int(number)])
            join()
            wait_for(lambda: restarts_of(two), process)
            before = steps_of(two)
            wait_for(lambda: steps_of(two) > before + 1, process)
            out = terminated(process)
        restart = restarts_of(two)[-1]
        note_fault("a lost node, with its copies in memory", restart, began)
        assert restart["steps_again"] == 0, out
        assert "was in memory, in parts on several nodes" in out
        assert not any(one.exists() for one in folders)
        assert not (two / POINTER).exists()
        taken = steps_of(two)
        same = [words[0], words[1], f"trainer.save_checkpoint_path={calm}", f"trainer.max_steps={taken}"]
        with start(*RUN, *same, RAY_ADDRESS=address, **HERE) as process:
            out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, out + err
    assert [record["step"] for record in read_log(two)] == [*range(1, taken + 1)]
    assert exact_numbers(two) == exact_numbers(calm)


@pytest.mark.vllm
@pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed")
def test_two_nodes_with_vllm_beside_their_ranks_reach_one_process_accuracy(tmp_path: Path, r1: R1) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    words = ["train", QUICKSTART, *LEARN, f"trainer.max_steps={STEPS}"]
    r1(*words, "worker.rollout.name=embedded", f"trainer.save_checkpoint_path={one}")
    words += [*NODES, "worker.rollout.name=vllm", f"trainer.save_checkpoint_path={two}"]
    with two_nodes(cpus=2) as (address, *_), start(*words, RAY_ADDRESS=address, **HERE) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, out + err
    assert len(re.findall(r"engine-\d +127\.0\.0\.1 +cpu", out)) == 2
    before, after = learned(one)
    assert after > before + 0.2, "one process learns nothing in so few steps"
    assert learned(two)[1] > after - 0.12
    for record in read_log(two)[1:]:
        assert record["rollout/logprob_gap_max"] < 1e-3


@pytest.mark.vllm
@pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed")
def test_a_vllm_on_both_devices_of_two_ranks_agrees_with_them_until_sigterm_and_one_rank_goes_on(
    tmp_path: Path, r1: R1
) -> None:
    words, folder = [*two_heads(tmp_path), "worker.rollout.name=vllm"], tmp_path / "run"
    seats = ["trainer.n_gpus_per_node=2", "worker.rollout.tensor_parallel_size=2"]
    with running(folder, *words, *seats, "trainer.max_steps=1000", steps=2) as process:
        out = terminated(process)
    assert re.search(r"learner-0 … learner-1 +127\.0\.0\.1 +cpu, cpu *\n *engine-0 +127\.0\.0\.1 +cpu, cpu", out)
    taken = steps_of(folder)
    r1(*RUN, *words, f"trainer.max_steps={taken + 1}", f"trainer.save_checkpoint_path={folder}")
    records = read_log(folder)
    assert [record["step"] for record in records] == [*range(1, taken + 2)]
    for record in records:
        assert record["rollout/logprob_gap_max"] < 1e-3
