"""The processes of a run: each records itself in the run's folder, so that it is found again and never mistaken."""

import json
import os
import platform
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

PROCESSES = "processes"  # folder in that of the run, with a file for each process
STOP = "stop"  # file in it: `r1 stop` on another machine asks the driver to end
DRIVER = "driver"
BEAT_SECONDS = 5.0  # between two records of a process
SILENT_SECONDS = 3 * BEAT_SECONDS  # after which a process is shown as silent
OWN_SECONDS = 5.0  # for the processes of a run to end when its driver has ended


@dataclass(slots=True)
class Process:
    """What a process records of itself. `machine`, `pid` and `started` identify it, also if its pid is used again."""

    name: str  # driver, learner-0, engine-0, ...
    host: str
    machine: str  # boot id and pid namespace, within which a pid means something
    pid: int
    started: int  # clock ticks between boot and start
    began: float  # seconds since 1970, as all times here
    beat: float = 0.0  # of this record
    doing: str = ""
    since: float = 0.0  # when it began to do so
    step: int | None = None
    steps: int | None = None
    memory: int = 0  # resident bytes
    device_memory: int | None = None  # bytes that torch has reserved; None without a GPU
    tokens: int = 0  # that an engine has sampled
    seconds: dict[str, float] = field(default_factory=dict)  # by what it has done
    restarts: int = 0  # earlier processes of this name under the same driver; see `newest_of`

    @property
    def is_here(self) -> bool:
        return self.machine == this_machine()

    @property
    def runs(self) -> bool:
        """Whether this very process runs on this machine."""
        return self.is_here and started_at(self.pid) == self.started

    def state(self, now: float | None = None) -> str:
        """Return `stopped`, `gone`, `silent for 40 s`, or what it does and for how long."""
        now = time.time() if now is None else now
        if self.is_here and not self.runs:
            return "gone"
        if self.is_here and (_stat(self.pid) or ("",))[0] in ("T", "t"):
            return "stopped"
        if now - self.beat > SILENT_SECONDS:
            return f"silent for {now - self.beat:.0f} s"
        return f"{self.doing} for {now - self.since:.0f} s" if self.doing else "idle"


_own: Process | None = None  # of this process
# Who has read the records of all processes last, when, and what they were.
_seen: tuple[Process | None, float, list[Process]] = None, 0.0, []


def started_at(pid: int) -> int | None:
    """Return the clock ticks between boot and a process's start; None if it has ended."""
    found = _stat(pid)
    return None if found is None or found[0] in ("Z", "X") else int(found[19])


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the process's name, which may contain anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


@cache
def this_machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


@contextmanager
def record_driver(run: Path) -> Iterator[None]:
    """Record this process as the driver of a run inside the block; at the end remove the records of all processes."""
    global _own
    folder = run / PROCESSES
    with suppress(OSError):  # a full disk keeps no run from starting here
        folder.mkdir(exist_ok=True)
        (folder / STOP).unlink(missing_ok=True)
        for path in folder.glob("*.json"):
            if (process := _read(path)) is None or (process.is_here and not process.runs):
                path.unlink(missing_ok=True)
    stop = record_process(run, DRIVER)
    try:
        yield
    finally:
        stop.set()
        _own = None
        shutil.rmtree(folder, ignore_errors=True)


def record_process(run: Path, name: str) -> threading.Event:
    """Record this process in a run's folder every `BEAT_SECONDS`, in a thread, until the event is set.

    Nothing is written if no driver has recorded itself there.
    """
    global _own
    now = time.time()
    _own = own = Process(name, platform.node(), this_machine(), os.getpid(), started_at(os.getpid()) or 0, now)
    path, ended = run / PROCESSES / f"{name}-{own.pid}.json", threading.Event()

    def write() -> None:
        own.beat, own.memory, own.device_memory = time.time(), _resident_bytes(), _device_bytes()
        draft = path.with_suffix(f".{os.getpid()}")
        with suppress(OSError, RuntimeError):  # no folder, or a dictionary that another thread has changed
            draft.write_text(json.dumps(asdict(own)))
            draft.replace(path)

    def beat() -> None:
        global _seen
        while not ended.wait(BEAT_SECONDS):
            write()
            if name == DRIVER:
                _seen = own, time.time(), newest_of(read_processes(run))
                if _is_asked_to_stop(run):
                    os.kill(own.pid, signal.SIGTERM)

    write()
    threading.Thread(target=beat, name="r1-heartbeat", daemon=True).start()
    return ended


def note(doing: str, *, step: int | None = None, steps: int | None = None) -> None:
    """Set what the next record says that this process does; "" for nothing."""
    if (own := _own) is not None:
        now = time.time()
        if own.doing:
            own.seconds[own.doing] = own.seconds.get(own.doing, 0.0) + now - own.since
        own.doing, own.since = doing, now
        own.step, own.steps = own.step if step is None else step, own.steps if steps is None else steps


def last_seen() -> tuple[float, list[Process]]:
    """Return when the driver's thread read the records last, and the processes; no step waits for that."""
    by, when, processes = _seen
    return (when, processes) if by is not None and by is _own else (0.0, [])


def count_tokens(tokens: int) -> None:
    if _own is not None:
        _own.tokens += tokens


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _device_bytes() -> int | None:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return int(cuda.memory_reserved()) if cuda is not None and cuda.is_initialized() else None


def read_processes(run: Path) -> list[Process]:
    """Return the recorded processes of a run, the driver first; [] if none runs."""
    found = [process for path in (run / PROCESSES).glob("*.json") if (process := _read(path))]
    return sorted(found, key=lambda one: (one.name != DRIVER, one.name, one.began))


def newest_of(processes: Sequence[Process]) -> list[Process]:
    """Return the newest process of each name, with the number of those before it that it replaced."""
    found: dict[str, Process] = {}
    for one in processes:
        before = found.get(one.name)
        found[one.name] = one if before is None else replace(one, restarts=before.restarts + 1)
    return [*found.values()]


def _is_asked_to_stop(run: Path) -> bool:
    """Whether `ask_to_stop` was called since the last look."""
    try:
        (run / PROCESSES / STOP).unlink()
    except OSError:
        return False
    return True


def ask_to_stop(run: Path, driver: Process, grace: float) -> bool:
    """Let a driver on another machine that sees the run's folder end the run; return whether it has within `grace`."""
    (run / PROCESSES / STOP).touch()
    ends = time.monotonic() + grace
    while (left := _is_recorded(run, driver)) and time.monotonic() < ends:
        time.sleep(0.05)
    (run / PROCESSES / STOP).unlink(missing_ok=True)
    return not left


def _is_recorded(run: Path, process: Process) -> bool:
    return any((one.machine, one.pid) == (process.machine, process.pid) for one in read_processes(run))


def _read(path: Path) -> Process | None:
    try:
        return Process(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # removed meanwhile, or of another version
        return None


def find_runs() -> list[Path]:
    """Return the folders of this user's runs of which a recorded process is on this machine.

    A driver holds the run's lock open, other processes their log.
    """
    found: set[Path] = set()
    recorded = cache(read_processes)  # each process of a run names its folder
    for fds in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):
            for path in {Path(os.readlink(fd)) for fd in fds.iterdir()}:
                run = path.parent if path.name == ".lock" else path.parents[1] if path.parent.name == "logs" else None
                if run and any(one.pid == int(fds.parent.name) and one.runs for one in recorded(run)):
                    found.add(run)
    return sorted(found)


def with_descendants(pids: list[int]) -> dict[int, int]:
    """Return pid and start of these processes of this machine and of all that they have started."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        if (stat := _stat(int(path.name))) is not None:
            parents.setdefault(int(stat[1]), []).append(int(path.name))
    found: dict[int, int] = {}
    left = list(pids)
    while left:
        pid = left.pop()
        if pid not in found and (started := started_at(pid)) is not None:
            found[pid] = started
            left += parents.get(pid, [])
    return found


def send_signal(pid: int, started: int, number: signal.Signals) -> bool:
    """Send a signal to this very process; return whether it was there to get it. Raises PermissionError."""
    try:
        handle = os.pidfd_open(pid)  # of the process that has the pid now, also if the pid is used again afterwards
    except ProcessLookupError:
        return False
    try:
        if started_at(pid) != started:
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)


def wait_for(processes: dict[int, int], seconds: float) -> dict[int, int]:
    """Wait until these processes have ended, so long at most; return those that have not."""
    ends = time.monotonic() + seconds
    while True:
        left = {pid: started for pid, started in processes.items() if started_at(pid) == started}
        if not left or time.monotonic() >= ends:
            return left
        time.sleep(0.05)


def stop_run(run: Path, grace: float) -> list[str]:
    """End a run's processes on this machine, and no others; return what was done, a line each.

    The driver gets SIGTERM and `grace` seconds to end the run. Processes of the run that are left have `OWN_SECONDS`
    to end by themselves, as many after SIGTERM, and are killed then.
    """
    recorded = [one for one in read_processes(run) if one.runs]
    every = with_descendants([one.pid for one in recorded])
    every.pop(os.getpid(), None)
    done = []
    for driver in (one for one in recorded if one.name == DRIVER):
        send_signal(driver.pid, driver.started, signal.SIGTERM)
        late = wait_for({driver.pid: driver.started}, grace)
        done.append(f"the driver, process {driver.pid}, {'has not ended' if late else 'ended'} after SIGTERM")
    left = wait_for(every, OWN_SECONDS)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid, started in left.items():
            send_signal(pid, started, number)
        if left:
            done.append(f"{number.name} to {len(left)} left: {', '.join(map(str, left))}")
        left = wait_for(left, OWN_SECONDS)
    return done


def kill_with_descendants(code: int) -> None:
    """Kill all processes that this one has started, and end with this exit code at once."""
    for pid, started in with_descendants([os.getpid()]).items():
        if pid != os.getpid():
            with suppress(PermissionError):
                send_signal(pid, started, signal.SIGKILL)
    os._exit(code)
