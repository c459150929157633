"""What `r1 view` shows of each process of a run, and of the faults that the run has survived."""

import time

from r1_cli.runs.history import JsonObject
from r1_cli.runs.processes import Process, newest_of, read_processes
from r1_cli.runs.reader import RunReader
from r1_cli.runs.report.page import describe_restart

PHASES = 3  # of a process, the longest first


def process_table(run: RunReader) -> JsonObject:
    """Return {"processes", "restarts"}; no processes if the run has ended."""
    now = time.time()
    return {
        "processes": [_row(one, now) for one in newest_of(read_processes(run.path))],
        "restarts": [describe_restart(one["restart"]) for one in run.starts() if "restart" in one],
    }


def _row(process: Process, now: float) -> JsonObject:
    longest = sorted(process.seconds.items(), key=lambda one: -one[1])[:PHASES]
    return {
        "name": process.name,
        "host": process.host,
        "pid": process.pid,
        "state": process.state(now),
        "memory": process.memory,
        "device_memory": process.device_memory,
        "tokens": process.tokens,
        "phases": [[name, seconds] for name, seconds in longest],
        "heard": max(now - process.beat, 0.0),
        "restarts": process.restarts,
    }
