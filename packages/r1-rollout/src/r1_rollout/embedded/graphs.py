"""Decoding steps as CUDA graphs, which spare a CPU the launch of each kernel.

A graph reads and writes the addresses that it was captured with. Rows stay where they are, and while the cache's
`footprint` is the same, the graph is valid. It changes when samples enter or leave, or answers grow by `kv.GRAIN`
columns.
"""

import logging
from collections.abc import Callable, Hashable
from typing import ClassVar

import torch

log = logging.getLogger("r1")

# Steps of one key that are launched before it is captured. They also load kernels and workspaces, which a capture must
# not. Before a capture torch waits for the device and gives its cached memory back, so one costs several launches of a
# step.
PATIENCE = 2
Action = Callable[[], None]  # reads and writes tensors that stay
Capture = Callable[[Action], Action]  # runs none of an action's kernels; returns what does


def capture_cuda(action: Action) -> Action:
    """Capture an action that has run before as a CUDA graph."""
    current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may allocate meanwhile
            action()
    except BaseException:
        torch.cuda.set_stream(current)  # torch leaves the stream of a failed capture as the current one
        raise
    replay: Action = graph.replay
    return replay


class Graphs:
    # Whether a capture has failed in this process. Torch's allocator counts it as under way from then on and frees no
    # memory for the next, so there is no second try.
    failed: ClassVar[bool] = False

    def __init__(self, capture: Capture = capture_cuda) -> None:
        self._capture = capture
        self._key: Hashable = None
        self._seen = 0  # steps with this key that were launched kernel by kernel
        self._replay: Action | None = None
        self.replayed = 0  # steps

    def run(self, key: Hashable, action: Action) -> None:
        """Run an action, or replay it.

        Args:
            key: two actions of one key run the same kernels at the same addresses.
        """
        if key != self._key:
            self._key, self._seen, self._replay = key, 0, None
        if self._replay is None and self._seen >= PATIENCE and not self.failed:
            self._replay = self._try_capture(action)
        if self._replay is None:
            self._seen += 1
            action()
        else:
            self._replay()
            self.replayed += 1

    def _try_capture(self, action: Action) -> Action | None:
        try:
            return self._capture(action)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # such as a layer of experts that reads numbers back
            type(self).failed = True
            log.warning(
                "the embedded engine decodes without CUDA graphs: %s. If the GPU's memory runs out later, set "
                "worker.rollout.enforce_eager=true and start again",
                str(error).splitlines()[0],
            )
            return None
