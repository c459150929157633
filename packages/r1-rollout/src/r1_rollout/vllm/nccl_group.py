"""A NCCL group for weights on GPUs: the learner's GPU at rank 0, and the workers of one server.

NOT TESTED on GPUs: it follows the public API of vLLM 0.32, and tests check only what is called in which order. The
workers' end is vLLM's own weight-transfer engine `nccl`.
"""

import base64
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class NcclSender:
    """The sender's end. `connect` and `send` are called from one thread, `destroy` from any.

    The group's id, which is what lets a process in, goes over the server's guarded HTTP; no store is opened for it.
    """

    def __init__(self, workers: int, device: torch.device, seconds: float) -> None:
        """Make the id of a group of this process, with its GPU `device`, and `workers` others.

        Args:
            workers: how many others.
            device: this process's GPU.
            seconds: how long `connect` waits for them.
        """
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self._world_size = workers + 1
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        self._seconds = seconds
        self._lock = threading.Lock()
        self._communicator: Any = None
        self._error: Exception | None = None
        self._over = False
        self.init_info: dict[str, Any] = {
            "nccl_unique_id_b64": base64.b64encode(self._id).decode(),
            "rank_offset": 1,
            "world_size": self._world_size,
        }

    def connect(self) -> None:
        """Join the group; returns when all workers have.

        NCCL itself waits for ever. The thread in which it does is left to itself at the deadline, and ends the group if
        that comes about too late.

        Raises:
            TimeoutError: a worker did not join in time.
        """
        thread = threading.Thread(target=self._join, daemon=True, name="r1-nccl")
        thread.start()
        thread.join(self._seconds)
        if self._error is not None:
            raise self._error
        if thread.is_alive():
            self.destroy()
            raise TimeoutError(
                f"not all of {self._world_size - 1} workers joined the NCCL group in {self._seconds:g} s"
            )

    def _join(self) -> None:
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        try:
            communicator = uid_init_process_group(self._id, 0, self._world_size, self._device)
        except Exception as error:  # raised by `connect`, if it still waits
            self._error = error
            return
        with self._lock:
            self._communicator = communicator
            if self._over:
                communicator.destroy()

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
        with self._lock:
            if self._communicator is not None and not self._over:
                self._communicator.destroy()  # aborts what is under way
            self._over = True
