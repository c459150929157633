"""The workers' end of a broadcast on processors: vLLM's transfer engine for NCCL, with a group over TCP in its place.

Start, finish and shutdown of an update are vLLM's own, so that tests on processors see what GPUs do. Registered as
`r1_tcp`, for `--weight-transfer-config '{"backend": "r1_tcp"}'`, by the import of `receiver` in every worker.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from r1_rollout.vllm.tcp_group import TcpReceiver


@dataclass
class TcpInitInfo(WeightTransferInitInfo):
    """How to join the sender's group; see `TcpSender`."""

    address: str
    port: int
    secret: str
    seconds: float


class TcpTransferEngine(NCCLWeightTransferEngine):
    """Takes each bucket off the wire whole, then loads it, so that a tensor refused leaves no sender waiting."""

    init_info_cls = TcpInitInfo

    def init_transfer_engine(self, init_info: Any) -> None:
        self.model_update_group = TcpReceiver(init_info.address, init_info.port, init_info.secret, init_info.seconds)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # the base class would wait for an accelerator

    def receive_weights(self, update_info: Any) -> None:
        group: Any = self.model_update_group
        bucket = []
        for name, kind, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, kind))
            group.receive(tensor)
            bucket.append((name, tensor))
        self.model.load_weights(bucket)
