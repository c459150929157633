"""One decoding step of all rows: forward and sampling on the device, and the report that the host reads of them."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from r1_rollout.embedded.forward import Forward
from r1_rollout.embedded.graphs import Graphs
from r1_rollout.embedded.kv import GroupCache
from r1_rollout.embedded.prefill import rotary_axes, without_lone_axis
from r1_rollout.embedded.rows import DecodingRows, DecodingStrategy
from r1_rollout.embedded.stack import Stack
from r1_rollout.routing import Routing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Read = Callable[[], NDArray[np.int32]]  # waits for a copy and returns it


class DecodingStep:
    def __init__(
        self,
        model: "PreTrainedModel",
        strategy: DecodingStrategy,
        stack: Stack | None,
        graphs: Graphs | None,
        routing: Routing | None,
    ) -> None:
        """`stack` computes the step, or the model's own forward if there is none; `graphs` replay it."""
        self._forward, self._strategy = Forward(model), strategy
        self._stack, self._graphs, self._routing = stack, graphs, routing

    def run(self, rows: DecodingRows, cache: GroupCache) -> None:
        """Append a token to each row and write the rows' report, on the device."""
        axes = len(rotary_axes(rows.owners[0][0].prompt.position_ids))
        cache.aim(rows.counts - 1)
        if self._graphs is None:
            self._compute(rows, cache, axes)
        else:
            self._graphs.run((len(rows), axes, cache.footprint()), partial(self._compute, rows, cache, axes))
        rows.counts += 1

    def _compute(self, rows: DecodingRows, cache: GroupCache, axes: int) -> None:
        """Run the part of a step that a graph captures. It reads no number of the host that changes between steps."""
        before = rows.ages - 1  # tokens in the cache
        cache.place(before)
        position_ids = without_lone_axis((rows.positions + before)[None, :, None].expand(axes, -1, -1))
        logits = self._compute_logits(rows, position_ids, cache)
        self.choose(logits, rows, 0)

    def choose(self, logits: Tensor, rows: DecodingRows, first: int) -> None:
        """Append a token to the rows from `first` on, given their logits, and write their report, on the device."""
        tokens, logprobs = self._strategy.choose(logits, rows.keys[first:], rows.ages[first:])
        rows.extend(first, tokens, logprobs, self._strategy.stopped)

    def _compute_logits(self, rows: DecodingRows, position_ids: Tensor, cache: GroupCache) -> Tensor:
        if self._routing is None:
            return self._decode_tokens(rows.last, position_ids, cache)
        with self._routing.recording() as record:
            logits = self._decode_tokens(rows.last, position_ids, cache)
            rows.route(record())
        return logits

    def _decode_tokens(self, tokens: Tensor, position_ids: Tensor, cache: GroupCache) -> Tensor:
        if self._stack is not None:
            return self._stack.step(tokens, position_ids, cache)
        with cache.decoding():
            return self._forward(tokens[:, None], position_ids, cache, mask=cache.mask)[:, -1]


class HostCopies:
    """Copies of reports that the host reads later, while the device computes the next step.

    Each copy has one of two page-locked buffers in turn, so at most one may be unread when the next begins. NOT RUN ON
    A GPU.
    """

    def __init__(self, size: int) -> None:
        """`size` is that of the largest report."""
        self._buffers = [torch.empty(size, dtype=torch.int32, pin_memory=True) for _ in range(2)]

    def start(self, report: Tensor) -> Read:
        """Begin to copy a report [3, rows] behind the kernels that write it."""
        self._buffers.reverse()
        buffer, done = self._buffers[0][: report.numel()].view_as(report), torch.cuda.Event()
        buffer.copy_(report, non_blocking=True)
        done.record()

        def read() -> NDArray[np.int32]:
            done.synchronize()
            return buffer.numpy()

        return read
