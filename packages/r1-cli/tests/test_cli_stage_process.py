"""The process of a stage: signals reach it, and it ends with `r1 run`."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from patience import eventually

from r1_cli.jobs import stages as jobs

STARTER = """
import sys
from r1_cli.jobs import stages
stages.R1 = (sys.executable, sys.argv[1])
print(stages.run_command(["word"]), flush=True)
"""
COMMAND = """
import sys
from r1_cli.jobs import stages
from r1_cli.main import main
stages.R1 = (sys.executable, sys.argv[1])
main(["run", sys.argv[2]])
"""
STAGE = """
import os, signal, sys, time
def told(number, frame):
    print(signal.Signals(number).name, flush=True)
    told.count += 1
    if told.count == 2:
        sys.exit(3)
told.count = 0
for one in (signal.SIGINT, signal.SIGTERM):
    signal.signal(one, told)
print(os.getpid(), *sys.argv[1:], flush=True)
while True:
    time.sleep(60)
"""


@pytest.fixture
def started(tmp_path: Path) -> "Iterator[tuple[subprocess.Popen[str], int]]":
    """`run_command` in a process of its own, and the process of its stage."""
    (file := tmp_path / "stage.py").write_text(STAGE)
    with subprocess.Popen([sys.executable, "-c", STARTER, str(file)], stdout=subprocess.PIPE, text=True) as starter:
        pid = int(line(starter).split()[0])
        yield starter, pid
        starter.kill()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.skipif(sys.platform != "linux", reason="needs the parent-death signal")
def test_a_stage_is_killed_with_its_run(started: "tuple[subprocess.Popen[str], int]") -> None:
    starter, pid = started
    stage = os.pidfd_open(pid)
    starter.kill()
    assert select.select([stage], [], [], 20.0)[0], "the stage outlives r1 run"
    os.close(stage)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_each_signal_reaches_the_stage_once(
    started: "tuple[subprocess.Popen[str], int]", number: signal.Signals
) -> None:
    starter, pid = started
    assert os.getpgid(pid) == pid != os.getpgid(starter.pid), "a terminal's Ctrl-C would reach both"
    starter.send_signal(number)
    assert line(starter) == number.name
    starter.send_signal(signal.SIGINT)  # the second, whose handler ends the stage
    assert line(starter) == "SIGINT"
    assert line(starter) == f"(3, {number.value})"
    assert starter.wait() == 0


def test_a_run_that_is_stopped_has_the_exit_code_of_a_training(tmp_path: Path) -> None:
    (file := tmp_path / "stage.py").write_text(STAGE)
    (tmp_path / "stages.yaml").write_text(
        f"output: {tmp_path}/out\nstages: {{one: {{command: merge, model: {file}}}}}\n"
    )
    words = [sys.executable, "-c", COMMAND, str(file), str(tmp_path / "stages.yaml")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        while not line(run).endswith("model"):
            assert run.poll() is None
        for _ in range(2):
            run.send_signal(signal.SIGTERM)
            assert line(run) == "SIGTERM"
        assert line(run).startswith("r1: stage one was stopped by SIGTERM; to resume: ")
        assert run.wait() == 128 + signal.SIGTERM


def test_ctrl_z_stops_both_and_fg_continues_both(started: "tuple[subprocess.Popen[str], int]") -> None:
    starter, pid = started
    starter.send_signal(signal.SIGTSTP)
    os.waitid(os.P_PID, starter.pid, os.WSTOPPED | os.WNOWAIT)
    assert eventually(lambda: state(pid) == "T")
    starter.send_signal(signal.SIGCONT)
    starter.send_signal(signal.SIGTERM)
    assert line(starter) == "SIGTERM"


def test_signals_are_handled_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP)]
    monkeypatch.setattr(jobs, "R1", (sys.executable, "-c", "raise SystemExit(4)"))
    assert jobs.run_command([]) == (4, None)
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP)] == before


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
