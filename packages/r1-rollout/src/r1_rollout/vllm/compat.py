"""Workarounds for vLLM 0.32: worker processes, shared memory that outlives them, positions of media."""

import gc
import logging
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces import SupportsMRoPE
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.worker.worker_base import WorkerBase

NAME = "VllmWorker"  # how vLLM calls these processes
PATIENCE = 10.0  # seconds for a worker to end
_BINDING, _THREADS = "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"
_FALSE_ALARMS = {  # by logger
    "vllm.v1.worker.cpu_worker": "sleep mode is not supported",  # the same calls are made everywhere
    "vllm.model_executor.model_loader.reload.layerwise": "RotaryEmbedding: Failed to load weights",  # it has none
}
PLACE = "/dev/shm/"
OWN = "vllm_dist_"  # what vLLM's reductions on processors are called; nothing opens them a second time
BROUGHT = "{kind}_position_ids"  # name of the input, by kind of media: int64 [axes, prompt_length] each


@contextmanager
def worker_threads(count: int, *, on_cpu: bool) -> Iterator[None]:
    """Inside the block, workers start that share the CPU; this process keeps its own number of threads.

    vLLM would bind each worker to a memory node, and refuses more workers than nodes. Here workers divide the threads,
    unless the environment sets them. vLLM also limits torch to one thread in this process, where the learner computes.
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
    return {child for child in multiprocessing.active_children() if child.name.startswith(NAME)}


def end_workers(workers: Iterable[BaseProcess]) -> None:
    deadline = time.monotonic() + PATIENCE
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()


def silence_false_alarms(worker: "WorkerBase") -> None:
    """Silence meaningless warnings that vLLM repeats at every sync."""
    for name in _FALSE_ALARMS:
        logging.getLogger(name).addFilter(_worth_saying)


def _worth_saying(record: logging.LogRecord) -> bool:
    alarm = _FALSE_ALARMS.get(record.name)
    return alarm is None or alarm not in record.getMessage()


def forget_names(worker: "WorkerBase | None" = None) -> None:
    """Unlink vLLM's shared memory after its workers have started, so that it ends with the last process.

    Otherwise hundreds of megabytes for each engine of several workers stay when the processes are killed.
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
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.partition(PLACE)[2] for line in lines if PLACE in line}
    return {name for name in paths if not name.endswith(" (deleted)")}


def follow_positions(model: "SupportsMRoPE") -> None:
    """Let vLLM's `model`, of a kind with M-RoPE, use the learner's positions, which each medium carries.

    vLLM's own differ after a video of Qwen2.5-VL whose seconds exceed its height and width: vLLM continues after the
    largest position (arXiv 2409.12191), transformers 5.19 after height and width.
    """
    own = model.get_mrope_input_positions

    def positions(input_tokens: list[int], mm_features: "list[MultiModalFeatureSpec]") -> tuple[Tensor, int]:
        if not mm_features:
            return own(input_tokens, mm_features)
        feature = mm_features[0]
        return extended(feature.data[BROUGHT.format(kind=feature.modality)].data, len(input_tokens))

    model.get_mrope_input_positions = positions


def extended(positions: Tensor, length: int) -> tuple[Tensor, int]:
    """Return the positions [axes, length] of a prompt and of an answer after it, and the answer's offset.

    The offset is the difference of the answer's positions and the numbers of its tokens. A request that vLLM has
    preempted comes back with the tokens that it had.
    """
    after = int(positions.max()) + 1
    answer = torch.arange(after, after + length - positions.shape[1]).expand(len(positions), -1)
    return torch.cat([positions, answer], dim=1), after - positions.shape[1]
