"""Weights to engines on the ranks' own GPUs: every rank gathers them, and each worker reads its own GPU's copy there.

NEVER RUN: it takes GPUs. It follows vLLM 0.32's `IPCTrainerWeightTransferEngine`; `benchmarks/gpu.py --stage sync`
shows it, and tests what is called in which order.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from r1_rollout.vllm.sending.engines import Engines, Patient

BUFFER = 1 << 28  # bytes of weights on each GPU that are under way at once

Pass = Callable[[], Iterable[tuple[str, Tensor]]]  # makes one pass over the weights, whole tensors


class Repeated:
    """vLLM's source of weights: each iteration is a new pass."""

    def __init__(self, weights: Pass) -> None:
        self._weights = weights

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._weights())


class IpcSender:
    """Made and asked on every rank; rank 0 calls the engines.

    vLLM gathers all ranks' handles over the default process group, so that must be the ranks alone; of these each
    worker takes the one of its own GPU, on whichever machine that is.
    """

    def __init__(self, engines: Engines, rank: int, weights: Pass, largest: int) -> None:
        """Let the engines know what will come.

        Args:
            engines: called by rank 0 only.
            largest: bytes of the largest tensor, which must fit into the buffer.
        """
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

        self._engines = Patient(engines)
        info = IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=max(BUFFER, largest))
        source: Any = Repeated(weights)
        self._sender = IPCTrainerWeightTransferEngine.trainer_init(info, client=self._engines, source=source)

    def send(self) -> None:
        """Send all weights; returns when the engines have them. Raises an engine's error when the pass is over."""
        self._engines.raise_error()
        self._sender.send_weights()
        self._engines.raise_error()

    def close(self) -> None:
        """Nothing stays open."""
        self._sender.shutdown()
