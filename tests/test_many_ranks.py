"""A run on two ranks under Ray: the numbers of one process, resumed on one rank, and nothing left when it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import families
import psutil
import pytest
from endtoend import QUICKSTART, R1, ROOT, SMALL, read_log, without_clock

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not find_spec("ray"), reason="ray is not installed")]

# Two nodes of one machine have its loopback address, which Ray would not take for one of many, and no token.
HERE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled"}
PATIENCE = 600  # seconds for what takes 30 where nothing else runs
RUN = [
    "train", QUICKSTART, *SMALL, "data.val_files=null", "trainer.val_freq=-1", "trainer.save_freq=-1",
    "worker.rollout.n=4", "algorithm.disable_kl=false", "worker.actor.clip_ratio_high=0.25",
    "worker.actor.optim.lr_scheduler_type=constant",
]  # fmt: skip


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "this took too long"
        time.sleep(0.05)


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    command = [str(Path(sys.executable).with_name("r1")), *words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        command, cwd=ROOT, text=True, env={**os.environ, "COLUMNS": "200", **environment}, **streams
    )


def finished(*words: str, **environment: str) -> str:
    """What a run prints that goes well."""
    with start(*words, **environment) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, out + err
    return out


@contextmanager
def running(folder: Path, *words: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A run of two ranks that has taken a step; its processes, Ray's folder and shared memory must end with it."""
    process = start(*RUN, f"trainer.save_checkpoint_path={folder}", *words, **environment)
    try:
        wait_for(lambda: steps_of(folder), process)
        started = psutil.Process(process.pid).children(recursive=True)
        own = {word for one in started for word in re.findall(r"/\S*r1-ray-\w+", words_of(one))}
        own |= {name for one in started for name in shared_memory_of(one)}
        yield process
    finally:
        process.kill()
    assert psutil.wait_procs(started, timeout=PATIENCE)[1] == []
    assert not any(Path(one).exists() for one in own)


def words_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it lived for a moment only
        return ""


def shared_memory_of(process: psutil.Process) -> set[str]:
    """Files in memory that a process has mapped and that have a name."""
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:  # it lived for a moment only
        return set()
    return {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/dev/shm/" in line and "(deleted)" not in line}


def steps_of(folder: Path) -> int:
    log = folder / "experiment_log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_two_ranks_give_one_process_numbers_and_go_on_as_one(tmp_path: Path, r1: R1) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with running(two, "trainer.n_gpus_per_node=2", "trainer.max_steps=1000") as process:
        process.terminate()
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM, out + err
    assert re.search(r"learner-0 … learner-1 +127\.0\.0\.1 +cpu, cpu", out)
    assert (two / "logs/media-0.log").is_file()
    taken = steps_of(two)
    assert "Loading weights" not in (two / "logs/learner-0.log").read_text()
    assert (two / f"global_step_{taken}/actor/model.safetensors").is_file()
    for folder in (one, two):
        r1(*RUN, f"trainer.save_checkpoint_path={folder}", f"trainer.max_steps={taken + 2}")
    assert_same_numbers(one, two)


def assert_same_numbers(one: Path, two: Path) -> None:
    """Of a run on one device and one on two, but for what tells how tokens lie on the ranks."""
    # Numbers that differ in their last digits choose another token some day, so the first steps are compared.
    for single, ranked in zip(*(without_clock(read_log(folder))[:6] for folder in (one, two)), strict=True):
        shares = {name: single.pop(name) for name in [*single] if name.startswith("global_seqlen/")}
        assert ranked.pop("global_seqlen/mean") in (shares["global_seqlen/mean"] / 2, shares["global_seqlen/mean"])
        ranked = {name: value for name, value in ranked.items() if not name.startswith("global_seqlen/")}
        assert ranked == pytest.approx(single, rel=1e-3, abs=1e-4)


REWARD = """
REWARD_NAME, REWARD_TYPE = "spread", "batch"


def compute_score(reward_inputs):
    return [{"overall": sum(map(ord, one["response"])) % 7 / 7} for one in reward_inputs]
"""


def test_two_ranks_that_share_every_sequence_of_actor_and_critic_give_one_process_numbers_and_go_on_as_one(
    tmp_path: Path, r1: R1
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    model = families.save_model("qwen2_5_vl", tmp_path / "model")  # of two heads, with one key head
    words = [
        *RUN, f"worker.actor.model.model_path={model}",
        f"worker.reward.reward_function={tmp_path}/reward.py:compute_score",
        "data.max_prompt_length=256", "data.min_pixels=784", "data.max_pixels=3136", "trainer.save_freq=2",
        "algorithm.adv_estimator=gae", "worker.critic.optim.lr=1e-3", "worker.critic.ppo_epochs=2",
    ]  # fmt: skip
    one, two = (f"trainer.save_checkpoint_path={tmp_path / name}" for name in ("one", "two"))
    sizes = ["worker.actor.ulysses_size=2", "worker.critic.ulysses_size=2"]
    shared = ["trainer.n_gpus_per_node=2", *sizes, "trainer.max_steps=2"]
    command = [str(Path(sys.executable).with_name("r1")), *words, two, *shared]
    process = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE)
    assert process.returncode == 0, process.stdout + process.stderr
    assert re.search(r"devices per sequence +2 +ulysses_size", process.stdout)
    for folder in (one, two):
        r1(*words, folder, "trainer.max_steps=3")
    # Numbers that differ in their last digits choose another token some day, so the first steps are compared.
    for single, ranked in zip(*(without_clock(read_log(tmp_path / name))[:3] for name in ("one", "two")), strict=True):
        assert ranked == pytest.approx(single, rel=1e-3, abs=1e-4)


def test_a_rank_that_is_killed_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with running(tmp_path, "trainer.n_gpus_per_node=2", "trainer.max_steps=1000") as process:
        log = (tmp_path / "logs/learner-1.log").read_text()
        os.kill(int(re.findall(r"learner-1 on 127\.0\.0\.1, process (\d+)", log)[-1]), signal.SIGKILL)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2, out + err
    assert "r1: learner-1 on 127.0.0.1 died" in err
    assert str(tmp_path / "logs/learner-1.log") in err
    assert "Traceback" not in err


def test_an_engine_that_is_killed_ends_the_run_with_its_name_and_the_last_step_is_kept(tmp_path: Path) -> None:
    with running(tmp_path, "trainer.n_gpus_per_node=2", "trainer.max_steps=1000") as process:
        log = (tmp_path / "logs/engine-1.log").read_text()
        os.kill(int(re.findall(r"engine-1 on 127\.0\.0\.1, process (\d+)", log)[-1]), signal.SIGKILL)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2, out + err
    assert "engine-1 on 127.0.0.1 died" in err
    taken = max(int(folder.name.rpartition("_")[2]) for folder in tmp_path.glob("global_step_*"))
    assert (tmp_path / f"global_step_{taken}/actor/model.safetensors").is_file()
    assert "Traceback" not in err


@contextmanager
def two_nodes(cpus: int = 1) -> Iterator[tuple[str, list[int]]]:
    """A cluster's address, and the processes that its two nodes stand and fall with."""
    command = [sys.executable, str(ROOT / "tests/two_nodes.py"), str(cpus)]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, env={**os.environ, **HERE}, **streams) as process:
        started = json.loads(process.stdout.readline())
        yield started["address"], started["raylets"]
        process.communicate("", timeout=PATIENCE)


def test_two_nodes_train_together_and_the_loss_of_one_ends_the_run(tmp_path: Path) -> None:
    words = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.max_steps=1000"]
    with two_nodes() as (address, raylets), running(tmp_path, *words, RAY_ADDRESS=address, **HERE) as process:
        # Nodes of one address are ordered by Ray's ids alone: either rank may be on this one, its engine beside it.
        lost = " ".join(map(words_of, psutil.Process(raylets[1]).children(recursive=True)))
        (rank,) = set(re.findall(r"ray::learner-(\d)", lost))
        os.kill(raylets[1], signal.SIGKILL)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2, out + err
    assert re.search(r"learner-0 +127\.0\.0\.1 +cpu *\n *learner-1 +127\.0\.0\.1 +cpu", out)
    assert re.search(rf"(learner-{rank}|engine-{rank}|media-\d) on 127\.0\.0\.1", err), err


def test_two_nodes_with_engines_apart_give_one_process_numbers(tmp_path: Path, r1: R1) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    seats = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]
    seats += ["worker.rollout.engines.nnodes=2", "worker.rollout.engines.n_gpus_per_node=1"]
    with two_nodes(cpus=2) as (address, _):
        words = [*RUN, *seats, "trainer.max_steps=3", f"trainer.save_checkpoint_path={two}"]
        out = finished(*words, RAY_ADDRESS=address, **HERE)
    assert re.search(r"engine-0 +127\.0\.0\.1 +cpu *\n *engine-1 +127\.0\.0\.1 +cpu", out)
    r1(*RUN, "trainer.max_steps=3", f"trainer.save_checkpoint_path={one}")
    assert_same_numbers(one, two)
