"""Two ranks under Ray give the numbers of one process; after a kill the run resumes on one rank."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import families
import psutil
import pytest
from endtoend import QUICKSTART, R1, ROOT, SMALL, read_log, without_clock
from episode_runs import AGENT, agents, calls_of, episodes, write_environment
from faults_table import note_fault

from r1_cli.runs.processes import read_processes
from r1_cli.runs.reader import RunReader

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not find_spec("ray"), reason="ray is not installed")]

PATIENCE = 600  # seconds for what takes 30 where nothing else runs
RUN = [
    "train", QUICKSTART, *SMALL, "data.val_files=null", "trainer.val_freq=-1", "trainer.save_freq=-1",
    "worker.rollout.n=4", "algorithm.disable_kl=false", "worker.actor.clip_ratio_high=0.25",
    "worker.actor.optim.lr_scheduler_type=constant", "trainer.max_restarts=0",
]  # fmt: skip


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        if process.poll() is not None:
            pytest.fail("".join(process.communicate()))
        assert time.monotonic() < until, "this took too long"
        time.sleep(0.05)


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    command = [str(Path(sys.executable).with_name("r1")), *words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        command, cwd=ROOT, text=True, env={**os.environ, "COLUMNS": "200", **environment}, **streams
    )


@contextmanager
def running(folder: Path, *words: str, steps: int = 1, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A run of two ranks that has taken steps; its processes, Ray's folder and shared memory must end with it."""
    process = start(*RUN, f"trainer.save_checkpoint_path={folder}", *words, **environment)
    try:
        wait_for(lambda: steps_of(folder) >= steps, process)
        started = psutil.Process(process.pid).children(recursive=True)
        own = {word for one in started for word in re.findall(r"/\S*r1-ray-\w+", words_of(one))}
        own |= {name for one in started for name in shared_memory_of(one)}
        yield process
    finally:
        process.kill()
    assert psutil.wait_procs(started, timeout=PATIENCE)[1] == []
    assert not any(Path(one).exists() for one in own)


def driver_of(process: subprocess.Popen[str]) -> psutil.Process:
    """The process that trains, which `r1` starts and watches."""
    (driver,) = psutil.Process(process.pid).children()
    return driver


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


def kill(folder: Path, name: str) -> None:
    """Let one of a run's actors die."""
    hit(folder, name, signal.SIGKILL)


def hit(folder: Path, name: str, number: int) -> None:
    log = (folder / f"logs/{name}.log").read_text()
    os.kill(int(re.findall(rf"{name} on \S+, process (\d+)", log)[-1]), number)


def steps_of(folder: Path) -> int:
    log = folder / "experiment_log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def restarts_of(folder: Path) -> list[dict[str, Any]]:
    return [one["restart"] for one in RunReader(folder).starts() if "restart" in one]


def test_two_ranks_survive_faults_one_after_the_other_with_the_bits_of_a_calm_run(tmp_path: Path) -> None:
    calm, two = tmp_path / "calm", tmp_path / "two"
    words = ["trainer.n_gpus_per_node=2", "trainer.max_steps=1000", "trainer.max_restarts=9", "trainer.save_freq=2"]
    words += ["trainer.restart_window=1"]  # no restart waits
    with running(two, *words) as process:
        hits = {
            "SIGKILL of a rank": lambda: hit(two, "learner-1", signal.SIGKILL),
            "SIGSTOP of a rank": lambda: hit(two, "learner-0", signal.SIGSTOP),
            "SIGKILL of the driver": lambda: driver_of(process).kill(),
        }
        hit(two, "engine-1", signal.SIGKILL)
        note_fault("SIGKILL of an engine", {}, time.time(), "goes on")
        wait_for(lambda: (two / "logs/engine-1.log").read_text().count("--- engine-1") == 2, process)
        assert not restarts_of(two)
        before = steps_of(two)
        wait_for(lambda: steps_of(two) > before + 1, process)
        for number, (fault, strike) in enumerate(hits.items(), start=1):
            before, began = steps_of(two), time.time()
            strike()
            wait_for(lambda number=number: len(restarts_of(two)) == number, process)
            wait_for(lambda before=before: steps_of(two) > before, process)
            note_fault(fault, restarts_of(two)[-1], began)
        left = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM, out + err
    assert psutil.wait_procs(left, timeout=PATIENCE)[1] == []
    assert "Traceback" not in out + err
    assert re.search(r"engine-1 on 127.0.0.1 died in \w+.*\n(.*\n)+?The step goes on with the other engines", out)
    causes = [restart["cause"] for restart in restarts_of(two)]
    assert "learner-1 on 127.0.0.1 died" in causes[0]
    assert re.search(r"ray::learner-0\S*, process \d+, was stopped for 10 s .* stacks are in", causes[1])
    assert "was killed by SIGKILL" in causes[2]
    lasting = re.findall(r"process (\d+)", (two / "logs/learner-0.log").read_text())
    assert lasting[0] == lasting[1], "the rank that was not killed has imported again"
    assert all(one["steps_again"] <= 3 for one in restarts_of(two))
    assert "the run starts again" in out.lower()
    assert re.search(r"learner-0 … learner-1 +127\.0\.0\.1 +cpu, cpu", out)
    assert "state T: ray::learner-0" in "".join(path.read_text() for path in two.glob("faults/*/processes.txt"))
    assert "Loading weights" not in (two / "logs/learner-0.log").read_text()
    taken = steps_of(two)
    assert taken >= 6
    process = start(*RUN, words[0], f"trainer.save_checkpoint_path={calm}", f"trainer.max_steps={taken}")
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, out + err
    assert [record["step"] for record in read_log(two)] == [*range(1, taken + 1)]
    assert exact_numbers(two) == exact_numbers(calm)


# An engine rounds a log-prob by what it decodes together, and the others take over the work of a dead one.
OF_ENGINES = (
    "rollout/kl",
    "rollout/logprob_gap",
    "rollout/chi2",
    "rollout/effective_sample_size",
    "rollout/ppl",
    "gen/",
)


def exact_numbers(run: Path) -> list[dict[str, Any]]:
    records = without_clock(read_log(run))
    return [{name: value for name, value in one.items() if not name.startswith(OF_ENGINES)} for one in records]


def assert_same_numbers(one: Path, two: Path, steps: int = 6) -> None:
    """Of a run on one device and one on two, but for what tells how tokens lie on the ranks."""
    # Numbers that differ in their last digits choose another token some day, so the first steps are compared.
    for single, ranked in zip(*(without_clock(read_log(folder))[:steps] for folder in (one, two)), strict=True):
        shares = {name: single.pop(name) for name in [*single] if name.startswith("global_seqlen/")}
        for record in (single, ranked):  # engines that share a group compute its prompt each
            record.pop("gen/prefilled_per_token", None)
        assert ranked.pop("global_seqlen/mean") in (shares["global_seqlen/mean"] / 2, shares["global_seqlen/mean"])
        ranked = {name: value for name, value in ranked.items() if not name.startswith("global_seqlen/")}
        assert ranked == pytest.approx(single, rel=1e-3, abs=1e-4)


PLANTED = "planted-9f8e7d6c5b4a"  # a secret, in all of these variables, a keyword argument and a URL
SECRETS = (
    "WANDB_API_KEY",
    "HF_TOKEN",
    "R1_REWARDS_TOKEN",
    "R1_METRICS_TOKEN",
    "OPENAI_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
)

REWARD = """
REWARD_NAME, REWARD_TYPE = "spread", "batch"


def compute_score(reward_inputs, api_key=None):
    return [{"overall": sum(map(ord, one["response"])) % 7 / 7} for one in reward_inputs]
"""


def two_heads(folder: Path) -> list[str]:
    """A model whose two heads two devices can share, and a reward that tells its responses apart."""
    (folder / "reward.py").write_text(REWARD)
    return [
        f"worker.actor.model.model_path={families.save_model('qwen2_5_vl', folder / 'model')}",
        f"worker.reward.reward_function={folder}/reward.py:compute_score",
        "data.max_prompt_length=256", "data.min_pixels=784", "data.max_pixels=3136",
        f"+worker.reward.reward_function_kwargs.api_key={PLANTED}",
    ]  # fmt: skip


def assert_on_loopback(driver: int) -> None:
    """No process of a run listens where another machine reaches it; the driver does, for Prometheus."""
    run = [psutil.Process(driver), *psutil.Process(driver).children(recursive=True)]
    listening = list[tuple[int, str]]()
    for one in run:
        with suppress(psutil.NoSuchProcess):
            sockets = [at for at in one.net_connections("inet") if at.status == psutil.CONN_LISTEN]
            listening += [(one.pid, at.laddr.ip.removeprefix("::ffff:")) for at in sockets]
    assert driver in {pid for pid, _ in listening}
    addresses = {address for _, address in listening}
    assert all(ip_address(one).is_loopback for one in addresses), addresses


def assert_nothing_planted(run: Path) -> None:
    """No file of a run's folder holds a planted secret."""
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {"manifest.json", "experiment_config.json", "learner-0.log", "config.json"} <= {path.name for path in files}
    assert not [path for path in files if PLANTED.encode() in path.read_bytes()]


def test_two_ranks_that_share_every_sequence_of_actor_and_critic_are_one_process_until_one_is_killed_and_go_on_as_one(
    tmp_path: Path, r1: R1
) -> None:
    words = [
        *two_heads(tmp_path), "trainer.save_freq=2",
        "algorithm.adv_estimator=gae", "worker.critic.optim.lr=1e-3", "worker.critic.ppo_epochs=2",
    ]  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    sizes = ["worker.actor.ulysses_size=2", "worker.critic.ulysses_size=2"]
    shared = ["trainer.n_gpus_per_node=2", *sizes, "trainer.max_steps=1000"]
    watched = ["trainer.metrics_port=0", f"trainer.project_name=https://user:{PLANTED}@host"]
    with running(two, *words, *shared, *watched, steps=2, **dict.fromkeys(SECRETS, PLANTED)) as process:
        wait_for((two / "global_step_2").is_dir, process)
        assert_on_loopback(driver_of(process).pid)
        names = {"driver", "learner-0", "learner-1", "engine-0", "engine-1"}
        assert names <= {one.name for one in read_processes(two)}
        kill(two, "learner-1")
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2, out + err
    assert "r1: learner-1 on 127.0.0.1 died" in err
    assert str(two / "logs/learner-1.log") in err
    assert "has a forward hook" not in "".join(log.read_text() for log in two.glob("logs/*.log"))  # engines have none
    assert PLANTED not in out + err
    r1("report", two)
    assert_nothing_planted(two)
    assert "perf/memory_gb/learner-1" in read_log(two)[-1]
    assert "Traceback" not in err
    assert re.search(r"devices per sequence +2 +ulysses_size", out)
    kept = max(int(folder.name.rpartition("_")[2]) for folder in two.glob("global_step_*"))
    assert kept >= 2
    for folder in (one, two):
        r1(*RUN, *words, f"trainer.save_checkpoint_path={folder}", f"trainer.max_steps={kept + 1}")
    # Numbers that differ in their last digits choose another token some day, so the first steps are compared.
    for single, ranked in zip(*(without_clock(read_log(folder))[:3] for folder in (one, two)), strict=True):
        assert ranked == pytest.approx(single, rel=1e-3, abs=1e-4)


LORA = ["worker.actor.model.lora.rank=8", "worker.actor.optim.lr=5e-4"]
APART = ["worker.rollout.engines.nnodes=1", "worker.rollout.engines.n_gpus_per_node=1"]


def test_a_replay_under_ray_repeats_agents_and_runs_none(tmp_path: Path, r1: R1) -> None:
    agent, run = tmp_path / "agent.py", tmp_path / "run"
    agent.write_text(AGENT)
    words = [*agents(f"python {agent}"), "trainer.save_freq=1", "trainer.max_steps=2", "trainer.n_gpus_per_node=2"]
    with running(run, *words, steps=2) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, out + err
    agent.write_text("raise SystemExit('a replay runs no agent')")
    told = r1("replay", run, "--step", "2").output
    assert "as this engine does not tell at which step a turn began" in told
    assert "step 2 is the same up to 0.001: 32 answers" in told


def test_an_engine_apart_samples_episodes_of_an_adapter_ahead_until_it_is_killed_in_one_and_one_process_goes_on(
    tmp_path: Path, r1: R1
) -> None:
    one, two, album = tmp_path / "one", tmp_path / "two", write_environment(tmp_path)
    words = [*episodes(album), *LORA, "trainer.max_staleness=1"]
    with running(two, *words, "trainer.n_gpus_per_node=2", *APART, "trainer.max_steps=1000", steps=3) as process:
        calls = calls_of(album)
        wait_for(lambda: calls_of(album) > calls, process)
        kill(two, "engine-0")
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2, out + err
    assert "engine-0 on 127.0.0.1 died" in err
    taken = len({record["step"] for record in read_log(two)})
    for folder in (one, two):
        r1(*RUN, *words, f"trainer.save_checkpoint_path={folder}", f"trainer.max_steps={taken + 1}")
    assert_same_episodes(one, two)
    assert [record["step"] for record in read_log(two)] == [*range(1, taken + 2)]


def assert_same_episodes(one: Path, two: Path) -> None:
    assert_same_numbers(one, two, steps=3)
    for folder in (one, two):
        assert any(record["rollout/groups_kept"] for record in read_log(folder)), "no episode was carried over"
        for record in read_log(folder):
            assert record["episode/pictures"] == 1
            assert record["rollout/canary_gap"] < 1e-5
            assert record.get("rollout/logprob_gap_max", 0.0) < 1e-5
