"""Shared memory of vLLM's processes, which has no name once all of them have it: it ends with the last of them.

What has a name stays when the processes are killed, hundreds of megabytes for each engine of several workers.
"""

import gc
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

PLACE = "/dev/shm/"
OWN = "vllm_dist_"  # what vLLM's reductions on processors are called; nothing opens them a second time


def forget_names(worker: Any = None) -> None:
    """Take their names from what this process has made or mapped for vLLM, whose workers must have started.

    Args:
        worker: whose process it is; as vLLM calls a function in its workers.
    """
    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

    frozen = gc.get_freeze_count() > 0  # vLLM does that at the end of its start, and what is frozen is not listed
    if frozen:
        gc.unfreeze()
    for one in gc.get_objects():
        if type(one) is ShmRingBuffer and one.is_creator:
            one.is_creator = False  # who would take the name away, and now does not
            one.shared_memory.unlink()
    if frozen:
        gc.freeze()
    for name in mapped_names():
        if name.startswith(OWN):
            with suppress(FileNotFoundError):  # another worker was first
                os.unlink(PLACE + name)


def mapped_names() -> set[str]:
    """Return the names of shared memory that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.partition(PLACE)[2] for line in lines if PLACE in line}
    return {name for name in paths if not name.endswith(" (deleted)")}
