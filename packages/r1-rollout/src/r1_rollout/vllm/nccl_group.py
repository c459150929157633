"""A NCCL group for weights on GPUs: the learner's GPU at rank 0, and the workers of one server.

NOT TESTED on GPUs: it follows the public API of vLLM 0.32, and tests check only what is called in which order. The
workers' end is vLLM's own weight-transfer engine `nccl`.
"""

import base64
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class NcclSender:
    """The sender's end. `connect` and `send` are called from one thread, `destroy` from any.

    The group's id, which is what lets a process in, goes over the server's guarded HTTP; no store is opened for it.
    """

    def __init__(self, workers: int, device: torch.device) -> None:
        """Make the id of a group of this process, with its GPU `device`, and `workers` others."""
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self._world_size = workers + 1
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        self._communicator: Any = None
        self.init_info: dict[str, Any] = {
            "nccl_unique_id_b64": base64.b64encode(self._id).decode(),
            "rank_offset": 1,
            "world_size": self._world_size,
        }

    def connect(self) -> None:
        """Join the group; returns when all workers have, and never if one does not: NCCL has no deadline here."""
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        self._communicator = uid_init_process_group(self._id, 0, self._world_size, self._device)

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Send the tensors, in order, to every worker; returns when they are there."""
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                copy = tensor.to(self._device).contiguous()
                self._communicator.broadcast(copy, src=0, stream=self._stream)
        self._stream.synchronize()

    def destroy(self) -> None:
        """End the group; a thread that waits in `send` is let go."""
        if self._communicator is not None:
            self._communicator.destroy()  # aborts what is under way
