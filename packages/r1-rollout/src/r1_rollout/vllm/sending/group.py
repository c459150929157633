"""Weights to engines on other devices: all ranks gather them, and rank 0 sends them to the group of all workers.

vLLM's `NCCLTrainerWeightTransferEngine` wants a port that somebody has guessed, and gives every engine the same rank;
so the calls are made here, as for servers, and the workers' end is vLLM's. Over NCCL it has NEVER RUN; over TCP, to
processors, the same code is tested.
"""

import threading
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from r1_rollout.vllm.sending.engines import Engines
from r1_rollout.vllm.sending.ipc import Pass
from r1_rollout.weights import buckets

BUCKET = 1 << 28  # bytes of weights that are under way at once


class Group(Protocol):
    """The sender's end of a group with the workers of engines, or of one server.

    `nccl_group.NcclSender` or `tcp_group.TcpSender` is one.
    """

    init_info: dict[str, Any]  # what the workers need to know to join

    def connect(self) -> None:
        """Wait until all workers have joined."""

    def send(self, tensors: list[Tensor]) -> None:
        """Send the tensors to all workers."""

    def destroy(self) -> None:
        """End the group, and whatever waits in it."""


class GroupSender:
    """Made and asked on every rank; only rank 0 has a group and calls the engines."""

    def __init__(self, engines: Engines, group: Group | None, weights: Pass) -> None:
        """Let the workers join; `group` is None on all ranks but 0."""
        self._engines, self._group, self._weights = engines, group, weights
        if group is not None:
            _beside(group, lambda: engines.init_weight_transfer_engine(group.init_info), group.connect)

    def send(self) -> None:
        """Send all weights; returns when the engines have them.

        Raises what an engine raises, or what the group does, when all ranks have ended the pass. The group has ended
        then, too.
        """
        passing = buckets(self._weights(), BUCKET)
        try:
            if self._group is not None:
                self._engines.start_weight_update()
                for bucket in passing:
                    self._send(self._group, bucket)
                self._engines.finish_weight_update()
        finally:
            for _ in passing:  # ranks that gather have to do so together
                pass

    def _send(self, group: Group, bucket: list[tuple[str, Tensor]]) -> None:
        info = {
            "names": [name for name, _ in bucket],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
        }
        tensors = [tensor for _, tensor in bucket]
        _beside(group, lambda: self._engines.update_weights(info), lambda: group.send(tensors))

    def close(self) -> None:
        """End the group."""
        if self._group is not None:
            self._group.destroy()


def _beside(group: Group, call: Callable[[], object], what: Callable[[], object]) -> None:
    """Make a call that the engines answer when `what` has been done with the group here.

    If one of the two fails the group is ended, lest the other wait in it for ever.
    """
    failed: list[Exception] = []

    def run() -> None:
        try:
            what()
        except Exception as error:  # raised below
            failed.append(error)
            group.destroy()

    thread = threading.Thread(target=run, daemon=True, name="r1-sending")
    thread.start()
    try:
        call()
    except BaseException as error:
        group.destroy()
        thread.join()
        if failed:
            error.add_note(f"the sender's end: {type(failed[0]).__name__}: {failed[0]}")
        raise
    thread.join()
    if failed:
        raise failed[0]
