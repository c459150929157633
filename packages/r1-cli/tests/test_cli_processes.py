"""`r1 ps`, `r1 stop` and `r1 logs` know the processes of a run, on all machines, and touch no others."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from cli_processes import write
from click.testing import CliRunner, Result
from patience import eventually

from r1_cli.main import main
from r1_cli.runs import processes
from r1_cli.runs.processes import DRIVER, PROCESSES, STOP, Process, read_processes, started_at, with_descendants

# A driver that ignores SIGTERM if told so, a rank that it has started, and a lock file as a run holds it.
DRIVEN = """
import signal, subprocess, sys, time
from pathlib import Path
from r1_cli.runs import processes
processes.BEAT_SECONDS = 0.05
run = Path(sys.argv[1])
lock = (run / ".lock").open("w")
with processes.record_driver(run):
    rank = subprocess.Popen(["sleep", "600"])
    signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "deaf" else lambda *_: sys.exit(143))
    processes.note("gen", step=3, steps=9)
    time.sleep(600)
"""


@contextmanager
def driver(run: Path, how: str = "") -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", DRIVEN, str(run), how]) as process:
        try:
            assert eventually(lambda: any(one.step for one in read_processes(run)))
            yield process
        finally:
            process.kill()


def r1(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [*map(str, words)], catch_exceptions=False)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "OWN_SECONDS", 0.2)


def test_ps_names_the_runs_of_this_machine_and_stop_ends_one_with_its_children_and_no_other_process(
    tmp_path: Path,
) -> None:
    other = subprocess.Popen(["sleep", "600"])
    try:
        with driver(tmp_path) as process:
            shown = next(line for line in r1("ps").output.splitlines() if str(tmp_path) in line)
            assert shown.split()[1:4] == ["3/9", str(process.pid), "gen"]
            (own,) = read_processes(tmp_path)
            children = with_descendants([process.pid]).keys() - {process.pid}
            assert len(children) == 1
            # The pid of a process that has ended long ago, which another one has now.
            write(tmp_path, replace(own, name="learner-0", pid=other.pid, started=1))
            assert "gone" in r1("ps", tmp_path).output
            assert f"process {process.pid}, ended" in r1("stop", tmp_path).output
            assert process.wait() == 143
            assert [started_at(pid) for pid in children] == [None]
        assert other.poll() is None
        assert "no process of" in r1("stop", tmp_path).output
        assert str(tmp_path) not in r1("ps").output
    finally:
        other.kill()
        other.wait()


RANK = """
import sys, time
from pathlib import Path
from r1_cli.cluster.worker_group import redirect_output
from r1_cli.runs.processes import record_process
run = Path(sys.argv[1])
redirect_output(run / "logs/learner-0.log")
record_process(run, "learner-0")
time.sleep(600)
"""


def test_ps_names_a_run_of_which_a_rank_is_here_and_the_driver_on_another_machine(tmp_path: Path) -> None:
    now = time.time()
    write(tmp_path, Process(DRIVER, "far", "another boot", 7, 1, now, now, "gen", now))
    with subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path)]) as rank:
        assert eventually(lambda: len(read_processes(tmp_path)) == 2)
        shown = next(line for line in r1("ps").output.splitlines() if str(tmp_path) in line)
        rank.kill()
    assert shown.split()[1:3] == ["7", "gen"]
    assert shown.endswith(" far")


def test_stop_kills_what_does_not_end_by_itself(tmp_path: Path) -> None:
    with driver(tmp_path, "deaf") as process:
        done = processes.stop_run(tmp_path, grace=0.1)
        assert process.wait() == -9
    assert "has not ended" in done[0]
    assert "SIGKILL" in done[-1]


def test_a_driver_on_another_machine_is_named_and_left_alone(tmp_path: Path) -> None:
    now = time.time()
    own = Process(DRIVER, "far", "another boot", os.getpid(), started_at(os.getpid()) or 0, now, now - 100)
    write(tmp_path, own)
    assert "silent for 1" in r1("ps", tmp_path).output
    ended = r1("stop", tmp_path)
    assert ended.exit_code == 2
    assert f"process {os.getpid()} on far, has been silent for 100 s: type r1 stop there" in ended.output


@pytest.mark.parametrize("how", ["", "deaf"])
def test_a_driver_on_another_machine_that_sees_the_folder_ends_when_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with driver(tmp_path, how) as process:
        monkeypatch.setattr(processes, "this_machine", lambda: "another boot")
        ended = r1("stop", tmp_path, "--grace", "0.3" if how else "60")
        assert (ended.exit_code, f"process {process.pid} on " in ended.output) == (2 if how else 0, True)
        assert ("type r1 stop there, which kills it" if how else ", ended\n") in ended.output
        assert (process.poll() if how else process.wait(60)) == (None if how else 143)
        assert not [*tmp_path.glob(f"{PROCESSES}/{STOP}")]


def test_a_killed_driver_leaves_records_that_the_next_one_removes(tmp_path: Path) -> None:
    with driver(tmp_path) as process:
        process.kill()
        process.wait()
        assert [one.state() for one in read_processes(tmp_path)] == ["gone"]
    (tmp_path / PROCESSES / STOP).touch()  # asked of the driver that was killed
    with processes.record_driver(tmp_path):
        assert not (tmp_path / PROCESSES / STOP).exists()
        assert [one.pid for one in read_processes(tmp_path)] == [os.getpid()]
    assert not (tmp_path / PROCESSES).exists()


def test_logs_prints_the_ends_of_all_logs_or_follows_one(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("learner-0", "engine-0"):
        (tmp_path / f"logs/{name}.log").write_text("".join(f"{name} {line}\x1b\n" for line in range(30)))
    shown = r1("logs", tmp_path, "-n", 2).output
    assert shown.splitlines() == [
        "==> engine-0 <==", "engine-0 28\\x1b", "engine-0 29\\x1b",
        "==> learner-0 <==", "learner-0 28\\x1b", "learner-0 29\\x1b",
    ]  # fmt: skip
    assert "has no log of learner-7; it has engine-0, learner-0" in r1("logs", tmp_path, "learner-7").output
    words = [sys.executable, "-m", "r1_cli.main", "logs", str(tmp_path), "engine-0", "-f", "-n", "1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as one:
        assert one.stdout
        assert one.stdout.readline() == "engine-0 29\\x1b\n"
        with (tmp_path / "logs/engine-0.log").open("a") as log:
            log.write("half")
            log.flush()
            log.write(" and whole\n")
        assert one.stdout.readline() == "half and whole\n"
        one.kill()
