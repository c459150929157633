"""Weights past the driver, from GPU to GPU: over which way, and how rank 0 calls the processes of the engines."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from r1_cli.build.engines import vllm
from r1_cli.config import RunConfig
from r1_cli.config.rollout import engine_module
from r1_cli.hardware import Hardware
from r1_rollout.vllm.sending.group import Group, GroupSender
from r1_rollout.vllm.sending.ipc import IpcSender, Pass
from r1_rollout.weight_source import TransferCall

JOINING = 600.0  # seconds for the workers to join a group

Ask = Callable[..., Any]  # asks one process from another: `ask(verb, *arguments)`; it pickles


@dataclass(frozen=True, slots=True)
class Way:
    """What weights go over: GPUs that ranks and engines share, or a group of rank 0 and all workers."""

    kind: Literal["ipc", "nccl", "r1_tcp"]  # backends of vLLM's weight transfer; the last is to processors what NCCL is
    workers: int  # of each engine


class Sender(Protocol):
    """What a rank keeps open between two syncs."""

    def send(self) -> None:
        """Send all weights; all ranks must call it."""

    def close(self) -> None:
        """End what is open."""


def find_way(config: RunConfig, hardware: Hardware, workers: int) -> Way | None:
    """Return how vLLM on GPUs gets its weights; None where they go as objects of the cluster, a bucket each.

    Args:
        workers: of each engine.
    """
    kind = vllm.weights_backend(config, hardware)
    if kind is None or engine_module(config.worker.rollout.engine) is not engine_module("vllm"):
        return None
    return Way(kind, workers)


def open_sender(way: Way, hosts: Sequence[Ask], rank: int, weights: Pass, largest: int) -> Sender:
    """Return this rank's end of a way to the engines.

    Args:
        hosts: ask the engines' processes; rank 0 does.
        weights: makes one pass over the whole weights, in which all ranks gather.
        largest: bytes of the largest tensor.
    """
    engines = Hosts(hosts, way.workers)
    if way.kind == "ipc":
        return IpcSender(engines, rank, weights, largest)
    return GroupSender(engines, open_group(way, len(hosts)) if rank == 0 else None, weights)


def open_group(way: Way, engines: int) -> Group:
    """Return rank 0's end of a group with the workers of so many engines, which can join it from now on."""
    if way.kind == "nccl":
        from r1_rollout.vllm.nccl_group import NcclSender

        return NcclSender(engines * way.workers, torch.device("cuda", 0), JOINING)
    from r1_rollout.vllm.tcp_group import TcpSender

    return TcpSender("127.0.0.1", engines * way.workers, JOINING)


class Hosts:
    """The processes of all engines as `r1_rollout.vllm.sending.engines.Engines`."""

    def __init__(self, hosts: Sequence[Ask], workers: int) -> None:
        self._hosts, self._workers = hosts, workers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Give the workers of each engine ranks of their own in the group, if there is one."""
        infos = [dict(init_info) for _ in self._hosts]
        for number, info in enumerate(infos):
            if "rank_offset" in info:
                info["rank_offset"] += number * self._workers
        self._call([TransferCall("init_weight_transfer_engine", {"init_info": info}) for info in infos])

    def start_weight_update(self) -> None:
        self._call([TransferCall("start_weight_update")] * len(self._hosts))

    def update_weights(self, update_info: Any) -> None:
        self._call([TransferCall("update_weights", {"update_info": update_info})] * len(self._hosts))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call([TransferCall("finish_weight_update")] * len(self._hosts))

    def _call(self, calls: Sequence[TransferCall]) -> None:
        """TransferCall all at once. Raises the first error at once: the others may wait for what will not come now."""
        threads = ThreadPoolExecutor(len(calls))
        try:
            asked = [threads.submit(host, "deliver", call) for host, call in zip(self._hosts, calls, strict=True)]
            for one in wait(asked, return_when=FIRST_EXCEPTION).done:
                one.result()
        finally:
            threads.shutdown(wait=False)
