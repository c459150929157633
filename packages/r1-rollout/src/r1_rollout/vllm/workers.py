"""vLLM's workers in processes of their own, as tensor parallelism needs them: their threads, their log, their end."""

import logging
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import torch

NAME = "VllmWorker"  # how vLLM calls these processes
PATIENCE = 10.0  # seconds for a worker to end
_BINDING, _THREADS = "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"
_FALSE_ALARMS = {  # by logger
    "vllm.v1.worker.cpu_worker": "sleep mode is not supported",  # the same calls are made everywhere
    "vllm.model_executor.model_loader.reload.layerwise": "RotaryEmbedding: Failed to load weights",  # it has none
}


@contextmanager
def worker_threads(count: int, *, on_cpu: bool) -> Iterator[None]:
    """Inside the block, workers start that share the processors; this process keeps its own number of threads.

    On processors vLLM would bind each worker to a memory node of its own, and refuses more workers than there are
    nodes. Here they are bound to nothing and divide the threads, unless the environment says otherwise. And it cuts
    torch to one thread in the process that starts workers; in this one the learner computes, too.
    """
    threads, before = torch.get_num_threads(), {name: os.environ.get(name) for name in (_BINDING, _THREADS)}
    if on_cpu:
        os.environ.setdefault(_BINDING, "nobind")
        os.environ.setdefault(_THREADS, str(max(1, len(os.sched_getaffinity(0)) // count)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        torch.set_num_threads(threads)


def running_workers() -> set[BaseProcess]:
    """Return vLLM's workers that this process has started."""
    return {child for child in multiprocessing.active_children() if child.name.startswith(NAME)}


def end_workers(workers: Iterable[BaseProcess]) -> None:
    """Kill those that do not end by themselves: one that hangs would keep this process from ending, too."""
    deadline = time.monotonic() + PATIENCE
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()


def silence_false_alarms(worker: Any) -> None:
    """Keep what vLLM warns of at every sync, and nobody need know, out of the log of the process of `worker`."""
    for name in _FALSE_ALARMS:
        logging.getLogger(name).addFilter(_worth_saying)


def _worth_saying(record: logging.LogRecord) -> bool:
    alarm = _FALSE_ALARMS.get(record.name)
    return alarm is None or alarm not in record.getMessage()
