"""Test of memory: it does not grow with the steps taken, neither here nor in the workers."""

import multiprocessing
import sys
from pathlib import Path

import pytest

from r1_data.dataset import Mixture, PromptDataset
from r1_data.media_cache import MediaCache
from r1_data.prefetch import PromptMemory
from r1_data.render import Renderer
from r1_data.stream import Stream
from r1_data.workers import Workers

ROWS, BATCH, WARM, STEPS = 48, 6, 30, 100
PAGE = 4096


def resident(process: int | str) -> int:
    """Bytes of memory that a process has in use."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("count", [0, 1])
def test_memory_grows_by_less_than_a_fortieth_of_what_is_rendered(processor, picture, count):
    rows = [
        (f"t:{i}", {"prompt": "<image>?", "answer": "1", "images": [picture(300, 200 + i)], "bulk": bytes(50_000)})
        for i in range(ROWS)
    ]
    renderer, others = Renderer(processor, cache=MediaCache(2**20)), multiprocessing.active_children()
    workers = Workers(renderer, count) if count else None
    memory = PromptMemory(2**20, ahead_bytes=4 * 2**20)
    dataset = PromptDataset(rows, renderer, max_prompt_length=2000, memory=memory, workers=workers)
    stream, rendered, before = Stream(ROWS, BATCH, seed=1, shuffle=True), 0, {}
    for step in range(STEPS):
        dataset.prefetch(stream.batch(step))
        for index in stream.batch(step):
            prompt = dataset[index]
            rendered += prompt.model_inputs["pixel_values"].nbytes if step >= WARM else 0
        if step == WARM:
            own = [process.pid for process in multiprocessing.active_children() if process not in others]
            before = {pid: resident(pid) for pid in ("self", *own)}
    grown = {pid: resident(pid) - size for pid, size in before.items()}
    if workers:
        workers.close()
    assert len(before) == 1 + count
    # Six times what an allocator has to spare on a busy machine, and less than the rows' bytes beside the pictures.
    assert max(grown.values()) < rendered / 40, (grown, rendered)


def test_many_sources_share_one_bound(processor, picture):
    rows = [(f"t:{i}", {"prompt": "<image>?", "answer": "1", "images": [picture(280, 200 + i)]}) for i in range(4)]
    renderer, memory = Renderer(processor), PromptMemory(2**20)
    parts = [PromptDataset(rows, renderer, max_prompt_length=2000, memory=memory) for _ in range(30)]
    mixture, one = Mixture(parts), 0
    for index in range(len(mixture)):
        (image,) = mixture[index].images
        one = max(one, 3 * image.width * image.height)
        assert memory.bytes <= 2**20
    assert len(mixture) * one > 8 * 2**20  # without a bound, all would be there
    assert memory.bytes > 2**19
