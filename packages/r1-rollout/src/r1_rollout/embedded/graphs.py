"""Decoding steps as CUDA graphs, which spare a CPU the launch of each kernel.

A graph reads and writes the addresses that it was captured with, so the cache keeps a step's tensors in place
(`kv.GroupCache`, `in_place`). While its `footprint` is the same, the graph is valid. It changes when samples enter or
leave, or answers grow by `kv.GRAIN` columns.
"""

import logging
from collections.abc import Callable, Hashable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from r1_rollout.embedded.kv import GroupCache
from r1_rollout.embedded.stack import Stack

log = logging.getLogger("r1")

# Steps of one footprint before it is captured. Before a capture torch waits for the device and gives its cached memory
# back, so one costs several launches of a step.
PATIENCE = 2
# Runs an action and returns what runs its kernels again, with the tensor that they fill.
Action = partial[Tensor]
Capture = Callable[[Action], tuple[Callable[[], None], Tensor]]


def capture_cuda(action: Action) -> tuple[Callable[[], None], Tensor]:
    """Capture an action as a CUDA graph, after a warm-up run on another stream."""
    current, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    beside.wait_stream(current)
    with torch.cuda.stream(beside):
        action()
    current.wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may allocate meanwhile
            result = action()
    except BaseException:
        torch.cuda.set_stream(current)  # torch leaves the stream of a failed capture as the current one
        raise
    return graph.replay, result


class Graphs:
    # Whether a capture has failed in this process. Torch's allocator counts it as under way from then on and frees no
    # memory for the next, so there is no second try.
    failed: ClassVar[bool] = False

    def __init__(self, stack: Stack, capture: Capture = capture_cuda) -> None:
        self._stack, self._capture = stack, capture
        self._key: Hashable = None
        self._seen = 0  # steps with this key that were launched kernel by kernel
        self._replay: Callable[[], None] | None = None
        self._tokens = self._positions = self._logits = torch.empty(0)
        self.replayed = 0  # steps

    def step(self, tokens: Tensor, position_ids: Tensor, cache: GroupCache) -> Tensor:
        if self.failed:
            return self._stack.step(tokens, position_ids, cache)
        key = (tokens.shape, position_ids.shape, cache.footprint())
        if key != self._key:
            self._key, self._seen, self._replay = key, 0, None
        if self._replay is None and (self._seen < PATIENCE or not self._capture_step(tokens, position_ids, cache)):
            self._seen += 1
            return self._stack.step(tokens, position_ids, cache)
        assert self._replay is not None
        self._tokens.copy_(tokens)
        self._positions.copy_(position_ids)
        self._replay()
        self.replayed += 1
        return self._logits

    def _capture_step(self, tokens: Tensor, position_ids: Tensor, cache: GroupCache) -> bool:
        self._tokens, self._positions = tokens.clone(), position_ids.clone(memory_format=torch.contiguous_format)
        try:
            self._replay, self._logits = self._capture(partial(self._stack.step, self._tokens, self._positions, cache))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # such as a layer of experts that reads numbers back
            type(self).failed = True
            log.warning(
                "the embedded engine decodes without CUDA graphs: %s. If the GPU's memory runs out later, set "
                "worker.rollout.enforce_eager=true and start again",
                str(error).splitlines()[0],
            )
        return not self.failed
