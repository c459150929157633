"""Stacks of the run's processes, written into the run's folder when a phase takes too long."""

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from threading import main_thread
from traceback import walk_stack

from r1_cli.faults.processes import descendants_of, state_of, title_of

FOLDER = "faults"  # in the run's folder
ASKED = signal.SIGUSR2
ANSWER_SECONDS = 1.0  # for processes to write their stacks
KERNEL = ("wchan", "stack", "syscall")  # files of /proc/PID; some need rights that the run may lack


def answer_requests() -> None:
    """Let this process write the stacks of its threads to its log when `write_dump` asks for them."""
    with suppress(AttributeError, ValueError, OSError):  # no such signal, or no file behind stderr
        faulthandler.register(ASKED, file=2, all_threads=True, chain=False)


def write_dump(run: Path, phase: str, facts: Mapping[str, object]) -> Path:
    """Write facts, the driver's stacks, and states and stacks of all processes that it has started on this machine."""
    folder = run / FOLDER / f"{datetime.now():%Y-%m-%dT%H-%M-%S}-{phase}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "phase.json").write_text(json.dumps({"phase": phase, **facts}, indent=1, default=str) + "\n")
    with (folder / "driver.txt").open("w") as file:
        file.write(_main_stack())
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    processes = descendants_of(os.getpid())
    logs = {path: path.stat().st_size for path in (run / "logs").glob("*.log")}
    for pid in processes:
        if _answers(pid):
            with suppress(OSError):
                os.kill(pid, ASKED)
    (folder / "processes.txt").write_text("".join(_describe(pid) for pid in processes))
    time.sleep(ANSWER_SECONDS)
    for path, size in logs.items():
        with path.open("rb") as log:
            log.seek(size)
            if told := log.read():
                (folder / f"{path.stem}.txt").write_bytes(told)
    return folder


def _main_stack() -> str:
    """Return the main thread's stack, as faulthandler lists it last and ends after a hundred threads."""
    frames = walk_stack(sys._current_frames()[main_thread().ident or 0])
    listed = [f'  File "{one.f_code.co_filename}", line {line} in {one.f_code.co_name}\n' for one, line in frames]
    return "Main thread (most recent call first):\n" + "".join(listed) + "\n"


def _answers(pid: int) -> bool:
    """Whether a process catches the signal, which ends others."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(line for line in lines if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (ASKED - 1) & 1)
    return False


def _describe(pid: int) -> str:
    told = [f"--- process {pid}, state {state_of(pid)}: {title_of(pid)}"]
    for name in KERNEL:
        with suppress(OSError):
            told.append(f"{name}: {Path(f'/proc/{pid}/{name}').read_text().strip()}")
    return "\n".join(told) + "\n"
