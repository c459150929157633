"""N real Ray actors that hold nothing: start, a call of all, and what watchdog, heartbeats and `r1 ps` read."""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from r1_cli.cluster.actors import ActorGroup, ActorPlacement
from r1_cli.cluster.ray_cluster import open_cluster
from r1_cli.config.trainer import TrainerConfig
from r1_cli.faults.watchdog import Watchdog
from r1_cli.hardware import Hardware
from r1_cli.placement import Node
from r1_cli.runs.processes import BEAT_SECONDS, find_runs, read_processes, record_driver

CALLS = 30
_opened = [0]  # files by this process, and folders that it has listed


class Idle:
    def nothing(self) -> None: ...


@contextmanager
def open_actors(most: int) -> Iterator[Callable[[int], dict[str, float]]]:
    """Open a cluster for `most` actors; yield what starts some and measures them."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    begun = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="r1-") as folder,
        record_driver(Path(folder)),
        open_cluster(TrainerConfig(n_gpus_per_node=most), Hardware("cpu")) as machines,
    ):
        print(f"cluster of {most}: {time.monotonic() - begun:.3g} s")
        yield partial(_start, Path(folder), machines.learner[0])


def _start(run: Path, node: Node, count: int) -> dict[str, float]:
    begun = time.monotonic()
    names = [f"learner-{number}" for number in range(count)]
    group = ActorGroup([ActorPlacement(name, node, (), run / "logs" / f"{name}.log", count) for name in names])
    try:
        group.create(Idle, [()] * count)
        return {"actors s": time.monotonic() - begun, **_measure(group, run)}
    finally:
        group.close()


def _measure(group: ActorGroup, run: Path) -> dict[str, float]:
    from ray import cloudpickle

    walls, works = [], []
    for _ in range(CALLS):
        wall, work = time.perf_counter(), time.process_time()
        group.call_all("nothing")
        walls.append(time.perf_counter() - wall)
        works.append(time.process_time() - work)
    time.sleep(BEAT_SECONDS + 1)
    processes = psutil.Process().children(recursive=True)
    actors = [one for one in processes if one.pid in group.pids]
    watch, watched = _counted(Watchdog(run).kill_stopped)
    beat, read = _counted(lambda: read_processes(run))
    listed, looked = _counted(find_runs)
    return {
        "call of all ms": 1000 * median(walls),
        "call of all processor ms": 1000 * median(works),
        "MB of an actor": sum(one.memory_full_info().pss for one in actors) / len(actors) / 1e6,
        "bytes of a reference to an actor": len(cloudpickle.dumps(group.split()[0].remote_caller)),
        "watchdog processor s / s": watch,
        "watchdog files / s": watched,
        "heartbeats processor s / s": beat / BEAT_SECONDS,
        "heartbeats files": read,
        "r1 ps processor s": listed,
        "r1 ps files": looked,
    }


def _counted(work: Callable[[], Any]) -> tuple[float, int]:
    """Return the processor seconds of a call, and the files that it has opened."""
    if not _opened[0]:
        sys.addaudithook(_count)
    files, begun = _opened[0], time.process_time()
    work()
    return time.process_time() - begun, _opened[0] - files


def _count(event: str, arguments: Any) -> None:
    if event == "open":
        _opened[0] += 1
