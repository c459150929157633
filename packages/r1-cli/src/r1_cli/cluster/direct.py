"""Direct weight transfer from the ranks to engines in other processes."""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from r1_cli.build.engines import vllm
from r1_cli.config import RunConfig
from r1_cli.config.rollout import engine_module
from r1_cli.hardware import Hardware
from r1_rollout.transports.direct import GroupSender, IpcSender, Pass
from r1_rollout.transports.groups import NcclGroup, ProcessGroup, TcpGroup
from r1_rollout.weights import TransferCall

JOINING = 600.0  # seconds for the workers to join a group
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # variables that set torch's allocator

log = logging.getLogger("r1")

Ask: TypeAlias = Callable[..., Any]  # calls one process from another: `ask(method, *arguments)`; it pickles
Sender: TypeAlias = GroupSender | IpcSender  # what a rank keeps open between two syncs


@dataclass(frozen=True, slots=True)
class DirectBackend:
    """How weights are sent: through GPU memory that ranks and engines share, or a group of rank 0 and all workers."""

    kind: Literal["ipc", "nccl", "r1_tcp"]  # backends of vLLM's weight transfer; the last is for CPUs
    workers: int  # of each engine


def find_backend(config: RunConfig, hardware: Hardware, workers: int) -> DirectBackend | None:
    """Return how weights reach vLLM on GPUs; None: through the cluster's object store.

    Args:
        workers: of each engine.
    """
    kind = vllm.weights_backend(config, hardware)
    if kind is None or engine_module(config.worker.rollout.engine) is not engine_module("vllm"):
        return None
    for name in ALLOCATOR if kind == "ipc" else ():
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            log.warning(
                "%s=%s: torch shares such memory by descriptors of other processes, which many containers forbid. If "
                "the first weight sync fails, leave it out", name, os.environ[name],
            )  # fmt: skip
    return DirectBackend(kind, workers)


def open_sender(backend: DirectBackend, engines: Sequence[Ask], rank: int, weights: Pass, largest: int) -> Sender:
    """Return this rank's end of a transfer to the engines.

    Args:
        engines: call the engines' processes; rank 0 does.
        weights: makes one pass over the whole weights, in which all ranks gather.
        largest: bytes of the largest tensor.
    """
    workers = EngineWorkers(engines, backend.workers)
    if backend.kind == "ipc":
        return IpcSender(workers, rank, weights, largest)
    return GroupSender(workers, _open_group(backend, len(engines)) if rank == 0 else None, weights)


def _open_group(backend: DirectBackend, engines: int) -> ProcessGroup:
    if backend.kind == "nccl":
        return NcclGroup(engines * backend.workers, torch.device("cuda", 0), JOINING)
    return TcpGroup("127.0.0.1", engines * backend.workers, JOINING)


class EngineWorkers:
    def __init__(self, engines: Sequence[Ask], workers: int) -> None:
        self._engines, self._workers = engines, workers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        # The workers of each engine get ranks of their own in the group, if there is one.
        infos = [dict(init_info) for _ in self._engines]
        for number, info in enumerate(infos):
            if "rank_offset" in info:
                info["rank_offset"] += number * self._workers
        self._call([TransferCall("init_weight_transfer_engine", {"init_info": info}) for info in infos])

    def start_weight_update(self) -> None:
        self._call([TransferCall("start_weight_update")] * len(self._engines))

    def update_weights(self, update_info: Any) -> None:
        self._call([TransferCall("update_weights", {"update_info": update_info})] * len(self._engines))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call([TransferCall("finish_weight_update")] * len(self._engines))

    def _call(self, calls: Sequence[TransferCall]) -> None:
        """Call all at once. Raises the first error without waiting: the other calls may never return."""
        threads = ThreadPoolExecutor(len(calls))
        try:
            calling = [threads.submit(ask, "make_call", call) for ask, call in zip(self._engines, calls, strict=True)]
            for one in wait(calling, return_when=FIRST_EXCEPTION).done:
                one.result()
        finally:
            threads.shutdown(wait=False)
