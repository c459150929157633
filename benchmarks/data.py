"""Pictures from a file to the first batch, and through an epoch, beside the way of EasyR1 on the same processes.

uv run python benchmarks/data.py [--pictures 20000] [--peer 400] [--workers 2] [--size 640x480]

The peer, written out below, decodes, resizes and processes every picture to filter by length. In each epoch it does so
in the loader, whose pixels it drops, decodes and resizes for the engine, and does all again for the learner. Both sides
read the same rows (JPEG, each different), use the same processor and pixel range, and work in the same kind of worker
processes; the peer is not charged for sending its results anywhere. Its time is proportional to the rows, so it is
measured on `--peer` of them and scaled. The last line is one JSON object with the ratios.
"""

import argparse
import io
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import AutoProcessor

from r1_data import PromptDataset, Renderer, Stream
from r1_data.media_cache import MediaCache
from r1_data.prompt_memory import PromptMemory
from r1_data.workers import Workers

MODEL = Path(__file__).resolve().parents[1] / "examples/quickstart/model"
LOW, HIGH, BATCH, LIMIT = 262_144, 4_194_304, 16, 4096  # the pixel range is EasyR1's default
DRAWN = 32  # that many pictures are drawn; a comment in the file makes each of its copies another
AHEAD = 32


class Rows(Sequence[tuple[str, dict[str, Any]]]):
    """Rows with a picture each, put together when they are read."""

    def __init__(self, count: int, size: tuple[int, int]) -> None:
        self.count, self.drawn = count, []
        for seed in range(DRAWN):
            buffer = io.BytesIO()
            Image.effect_noise(size, 20 + seed).convert("RGB").save(buffer, "JPEG", quality=90)
            self.drawn.append(buffer.getvalue())

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(index)
        comment = f"picture {index}".encode()
        data = self.drawn[index % DRAWN]
        data = data[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + data[2:]
        return f"rows:{index}", {"prompt": "<image>How many?", "answer": "1", "images": [data]}


class Peer:
    """Every picture decoded, resized and processed whenever anything is asked of its row."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def picture(self, data: bytes) -> Image.Image:
        image = Image.open(io.BytesIO(data))
        area = image.width * image.height
        if not LOW <= area <= HIGH:
            scale = math.sqrt((LOW if area < LOW else HIGH) / area)
            image = image.resize((int(image.width * scale), int(image.height * scale)))
        return image.convert("RGB")

    def render(self, row: dict[str, Any]) -> Any:
        content = [{"type": "image"}, {"type": "text", "text": row["prompt"].removeprefix("<image>")}]
        messages = [{"role": "user", "content": content}]
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        size = {"shortest_edge": LOW, "longest_edge": HIGH}
        pictures = [self.picture(data) for data in row["images"]]
        return dict(self.processor(text=[text], images=pictures, images_kwargs={"size": size}, return_tensors="pt"))

    def length(self, row: dict[str, Any]) -> int:
        return int(self.render(row)["input_ids"].shape[1])

    def load(self, row: dict[str, Any]) -> int:
        loader = self.length(row)
        for data in row["images"]:
            self.picture(data)  # the engine's
        return loader + self.length(row)  # the learner's


def ordered(start: Callable[[Any], "Future[Any]"], items: list[Any]) -> Iterator[Any]:
    """Results in order, with a bounded number under way."""
    running: list[Future[Any]] = []
    for item in items:
        running.append(start(item))
        if len(running) > AHEAD:
            yield running.pop(0).result()
    for future in running:
        yield future.result()


def time_peer(rows: Rows, workers: int) -> tuple[float, float]:
    """Seconds per row to filter, and seconds per row of an epoch."""
    with Workers(Peer(AutoProcessor.from_pretrained(MODEL)), workers) as pool:
        warm = [pool.submit("length", rows[0][1]) for _ in range(4 * workers)]
        for future in warm:
            future.result()
        begin = time.perf_counter()
        assert max(ordered(lambda row: pool.submit("length", row), [row for _, row in rows])) <= LIMIT
        filtered = time.perf_counter()
        for _ in ordered(lambda row: pool.submit("load", row), [row for _, row in rows]):
            pass
        done = time.perf_counter()
    return (filtered - begin) / len(rows), (done - filtered) / len(rows)


def read_epoch(dataset: PromptDataset, epoch: int) -> float:
    """Seconds per row of one epoch in shuffled batches."""
    stream = Stream(len(dataset), BATCH, seed=1, shuffle=True)
    first = epoch * stream.batches_per_epoch
    begin = time.perf_counter()
    for batch in range(first, first + stream.batches_per_epoch):
        indices = stream.batch(batch)
        dataset.prefetch([*indices, *stream.batch(batch + 1)])
        for index in indices:
            dataset[index]
    return (time.perf_counter() - begin) / (stream.batches_per_epoch * BATCH)


def make_renderer(cache: MediaCache | None = None) -> Renderer:
    return Renderer(AutoProcessor.from_pretrained(MODEL), min_pixels=LOW, max_pixels=HIGH, cache=cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=20_000)
    parser.add_argument("--peer", type=int, default=400, help="rows on which the peer is measured, and each epoch")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--size", default="640x480")
    options = parser.parse_args()
    width, height = map(int, options.size.split("x"))
    rows, some = (Rows(count, (width, height)) for count in (options.pictures, options.peer))
    peer_filter, peer_epoch = time_peer(some, options.workers)
    with tempfile.TemporaryDirectory() as folder:
        renderer = make_renderer()
        with Workers(renderer, options.workers) as workers:
            workers.submit("measure", []).result()
            settings: dict[str, Any] = {"max_prompt_length": LIMIT, "workers": workers, "memory": PromptMemory(2**28)}
            begin = time.perf_counter()
            dataset = PromptDataset(rows, renderer, known_lengths=folder, **settings)
            first = Stream(len(dataset), BATCH, seed=1, shuffle=True).batch(0)
            dataset.prefetch(first)
            assert len([dataset[index] for index in first]) == BATCH
            to_first_batch = time.perf_counter() - begin
            begin = time.perf_counter()
            PromptDataset(rows, renderer, known_lengths=folder, **settings)
            again = time.perf_counter() - begin
            decoded = read_epoch(PromptDataset(some, renderer, **settings), 0)
        renderer = make_renderer(MediaCache(0, Path(folder) / "media", 10**11))
        with Workers(renderer, options.workers) as workers:
            dataset = PromptDataset(some, renderer, **{**settings, "workers": workers})
            read_epoch(dataset, 0)
            cached = read_epoch(dataset, 1)
    peer_first = peer_filter * len(rows) + peer_epoch * BATCH
    print(f"to the first batch of {len(rows):,} pictures: {to_first_batch:.1f} s, peer {peer_first:.1f} s (scaled)")
    print(f"the same again, lengths known: {again:.1f} s")
    print(f"an epoch, ms per picture: {1e3 * decoded:.1f}, from disk {1e3 * cached:.1f}, peer {1e3 * peer_epoch:.1f}")
    ratios = {
        "pictures": len(rows),
        "size": options.size,
        "peer_rows": len(some),
        "workers": options.workers,
        "first_batch": round(peer_first / to_first_batch, 1),
        "epoch": round(peer_epoch / decoded, 2),
        "epoch_from_disk": round(peer_epoch / cached, 2),
    }
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
