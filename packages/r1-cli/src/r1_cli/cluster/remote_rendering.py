"""Render pictures and videos on the nodes of a cluster, by r1-data's workers, and store them there.

Knows nothing of Ray. The driver gets prompts with references to model inputs; no pixels pass through it, unless a
reward function or a server needs the pictures.
"""

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch

from r1_cli.cluster.batch_transfer import put_inputs
from r1_cli.cluster.worker_group import Put, WorkerGroup
from r1_data.model_inputs import LazyMedia
from r1_data.pictures import to_pil
from r1_data.prefetch import PromptMemory
from r1_data.references import Video
from r1_data.render import Renderer
from r1_data.types import DataError, Example, Prompt
from r1_data.vision import Pixels
from r1_data.workers import Workers

Key: TypeAlias = tuple[int, int, int]  # memory, dataset, row
OpenWorkers: TypeAlias = Callable[[Renderer], AbstractContextManager[Workers | None]]
_M_MMAP_THRESHOLD = -3  # in glibc's malloc.h


class RenderWorker:
    """Renders on one node, several calls concurrently.

    Media that may crash or hang a decoder are decoded in workers, as on one device.
    """

    def __init__(
        self, renderer: Renderer, open_workers: OpenWorkers, memory_bytes: int, dtype: torch.dtype | None, put: Put
    ) -> None:
        """Store the settings, without starting workers.

        Args:
            memory_bytes: decoded media that are cached for the next epoch, for each memory in a key.
            dtype: of the stored floating-point model inputs; None: unchanged.
        """
        _return_large_blocks()
        self._renderer, self._dtype, self._put = renderer, dtype, put
        self._stack = ExitStack()
        self._workers = self._stack.enter_context(open_workers(renderer))
        self._memories: dict[int, PromptMemory] = defaultdict(partial(PromptMemory, memory_bytes))
        self._turn = threading.Lock()

    def render(self, key: Key, example: Example) -> Prompt:
        """Return the prompt with its model inputs stored here, without pictures and messages.

        Raises as `Renderer.render` does, and WorkerDied.
        """
        return self._with_pixels(key, example, partial(self._put_down, example))

    def read(self, key: Key, example: Example) -> Pixels:
        return self._with_pixels(key, example, lambda pixels: pixels)

    def _with_pixels(self, key: Key, example: Example, then: Callable[[Pixels], Any]) -> Any:
        with self._turn:
            memory = self._memories[key[0]]

        def kept(pixels: Pixels) -> Any:
            memory.add_pixels(key, pixels)
            return then(pixels)

        pixels = memory.get_pixels(key)
        if self._workers is None:
            return kept(self._renderer.load(example)) if pixels is None else then(pixels)
        if pixels is None:
            return self._workers.submit("load", example, then=kept).result()
        return self._workers.compute(then, pixels).result()

    def _put_down(self, example: Example, pixels: Pixels) -> Prompt:
        prompt = self._renderer.render(example, pixels)
        inputs = put_inputs(prompt.model_inputs, self._put, self._dtype)
        return replace(prompt, model_inputs=inputs, images=(), videos=(), messages=())

    def reset(self) -> None:
        """Free the cached media, as the run starts again: its files may be others."""
        with self._turn:
            self._memories.clear()

    def close(self) -> None:
        self._stack.close()


class RenderPool:
    """Renders rows on the nodes of a cluster: r1-data's remote rendering.

    A row always goes to the same node, which caches it. If it fails there, the driver's node tries it before it counts
    as bad: files need not be on all nodes.
    """

    def __init__(self, start: Callable[[], Sequence[WorkerGroup]], machines: int, calls: int) -> None:
        """Store the settings; `begin` or the first row starts the workers.

        Args:
            start: makes the group of the `RenderWorker` of each node, the driver's first.
            machines: how many it makes.
            calls: concurrent calls of one node.
        """
        self._start, self._closed = start, False
        self._hosts: Sequence[WorkerGroup] = ()
        self._turn = threading.Lock()
        self._threads = [ThreadPoolExecutor(calls, f"r1-media-{number}") for number in range(machines)]

    def __call__(self, key: Key, example: Example) -> "Future[Prompt]":
        """Begin to render a row with media. The future raises as `Renderer.render`, WorkerDied or ClusterError."""
        return self._threads[self._node_of(key)].submit(self._render, key, example)

    def begin(self) -> None:
        """Start the nodes' processes without waiting for them. An error is raised again with the first row."""
        self._threads[0].submit(self._started)

    def _render(self, key: Key, example: Example) -> Prompt:
        prompt: Prompt = self._call("render", key, example)
        videos = sum(isinstance(reference, Video) for reference in example.media)
        read = partial(self._call, "read", key, example)
        return replace(
            prompt,
            ground_truth=example.ground_truth,
            metadata=example.metadata,
            messages=example.messages,
            source=example.source,
            images=LazyMedia(len(example.media) - videos, lambda: [*map(to_pil, read().images)]),
            videos=LazyMedia(videos, lambda: read().videos),
        )

    def _call(self, verb: str, key: Key, example: Example) -> Any:
        hosts, node, request = self._started(), self._node_of(key), example.as_asked()
        try:
            return hosts[node].call(verb, key, request)
        except DataError:
            if node == 0:
                raise
        return hosts[0].call(verb, key, request)

    def _node_of(self, key: Key) -> int:
        return key[-1] % len(self._threads)

    def _started(self) -> Sequence[WorkerGroup]:
        with self._turn:
            if self._closed:
                raise RuntimeError("the run has ended: nothing is rendered any more")
            self._hosts = self._hosts or self._start()
            return self._hosts

    def close(self) -> None:
        with self._turn:
            self._closed = True
            for host in self._hosts:
                host.close()
        for threads in self._threads:
            threads.shutdown(cancel_futures=True)


def _return_large_blocks() -> None:
    """Make malloc map each large block: otherwise holes between cached pictures took seven times their size."""
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
