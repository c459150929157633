"""Pictures from a file to the first batch, and through an epoch, beside the way of EasyR1 on the same processes.

uv run python benchmarks/data.py [--pictures 20000] [--peer 400] [--workers 2] [--size 640x480] [--rounds 3]

The peer, written out below, does what EasyR1 does with rows that hold encoded pictures. To filter by length it decodes,
resizes and processes each. In an epoch its loader does all that again, and keeps token and position ids; the engine
gets the picture decoded a second time and processes it by itself; the learner decodes and processes it a third time.
r1 decodes and processes a picture once: its embedded engine takes the tensors that the learner takes. Its epochs are
timed with nothing kept, from memory (`PromptMemory`) and from disk (`MediaCache`). Where r1 samples with vLLM, it
leaves the processing to the engine as well: `epoch_vllm` adds all of that to r1's time.

Both sides read the same rows (JPEG, each different), use the same processor, pixel range and rule for position ids, and
work in the same kind of worker processes; the peer is not charged for sending its results anywhere. What the peer does
is proportional to the rows, so it is measured on `--peer` of them and scaled. Epochs alternate, and the best round of
each side counts. On a machine with other work, wall time favours the side with more threads: compare processor time
there. Linux. The last line is one JSON object with the ratios.
"""

import argparse
import io
import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from transformers import AutoConfig, AutoProcessor

from r1_data import PromptDataset, Renderer, Stream
from r1_data.media_cache import MediaCache
from r1_data.positions import position_ids_of
from r1_data.prefetch import PromptMemory
from r1_data.workers import Workers

MODEL = Path(__file__).resolve().parents[1] / "examples/quickstart/model"
LOW, HIGH, BATCH, LIMIT = 262_144, 4_194_304, 16, 4096  # the pixel range is EasyR1's default
DRAWN = 32  # that many pictures are drawn; a comment in the file makes each of its copies another
AHEAD = 32
SIZE = {"shortest_edge": LOW, "longest_edge": HIGH}


class Cost(NamedTuple):
    """What a row costs, in seconds."""

    wall: float
    processor: float  # of all processes together


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
    """Every picture decoded, resized and processed by each that needs it."""

    def __init__(self) -> None:
        self.processor = AutoProcessor.from_pretrained(MODEL)
        self.position_ids = position_ids_of(AutoConfig.from_pretrained(MODEL))

    def picture(self, data: bytes) -> Image.Image:
        image = Image.open(io.BytesIO(data))
        image.load()
        area = image.width * image.height
        if not LOW <= area <= HIGH:
            scale = math.sqrt((LOW if area < LOW else HIGH) / area)
            image = image.resize((int(image.width * scale), int(image.height * scale)))
        return image.convert("RGB") if image.mode != "RGB" else image

    def render(self, row: dict[str, Any]) -> tuple[str, Any]:
        content = [{"type": "image"}, {"type": "text", "text": row["prompt"].removeprefix("<image>")}]
        messages = [{"role": "user", "content": content}]
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        pictures = [self.picture(data) for data in row["images"]]
        return text, self.processor(text=[text], images=pictures, images_kwargs={"size": SIZE}, return_tensors="pt")

    def pixel_values(self, row: dict[str, Any]) -> Any:
        pictures = [self.picture(data) for data in row["images"]]
        return self.processor.image_processor(pictures, size=SIZE, return_tensors="pt")

    def length(self, row: dict[str, Any]) -> int:
        return int(self.render(row)[1]["input_ids"].shape[1])

    def load(self, row: dict[str, Any]) -> int:
        text, inputs = self.render(row)  # the loader's
        self.position_ids(inputs["input_ids"][0], inputs)
        self.processor.tokenizer.encode(text, add_special_tokens=False)
        length = int(inputs["input_ids"].shape[1])
        del inputs  # the loader keeps no pixels; held here, they would slow what follows
        self.pixel_values(row)  # the engine's
        self.pixel_values(row)  # the learner's
        return length

    def process(self, row: dict[str, Any]) -> float:
        """Processor time that an engine needs for a row's pictures, decoded before."""
        pictures = [self.picture(data) for data in row["images"]]
        begin = time.process_time()
        self.processor.image_processor(pictures, size=SIZE, return_tensors="pt")
        return time.process_time() - begin


def ordered(start: Callable[[Any], "Future[Any]"], items: list[Any]) -> Iterator[Any]:
    """Results in order, with a bounded number under way."""
    running: list[Future[Any]] = []
    for item in items:
        running.append(start(item))
        if len(running) > AHEAD:
            yield running.pop(0).result()
    for future in running:
        yield future.result()


def clock() -> tuple[float, float]:
    """Seconds gone by, and seconds of processor time that this process and its workers have used."""
    used = 0.0
    for process in ("self", *(child.pid for child in multiprocessing.active_children())):
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        used += sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), used


def since(begin: tuple[float, float], rows: int) -> Cost:
    """What each row has cost since then."""
    return Cost(*((now - before) / rows for now, before in zip(clock(), begin, strict=True)))


def time_peer(pool: Workers, method: str, rows: Rows) -> Cost:
    begin = clock()
    assert max(ordered(lambda row: pool.submit(method, row), [row for _, row in rows])) <= LIMIT
    return since(begin, len(rows))


def read_epoch(dataset: PromptDataset, epoch: int) -> Cost:
    """One epoch in shuffled batches."""
    stream = Stream(len(dataset), BATCH, seed=1, shuffle=True)
    first = epoch * stream.batches_per_epoch
    begin = clock()
    for batch in range(first, first + stream.batches_per_epoch):
        indices = stream.batch(batch)
        dataset.prefetch([*indices, *stream.batch(batch + 1)])
        for index in indices:
            dataset[index]
    return since(begin, stream.batches_per_epoch * BATCH)


def make_renderer(cache: MediaCache | None = None) -> Renderer:
    rule = position_ids_of(AutoConfig.from_pretrained(MODEL))
    processor = AutoProcessor.from_pretrained(MODEL)
    return Renderer(processor, min_pixels=LOW, max_pixels=HIGH, position_ids=rule, cache=cache)


def start(pool: Workers, method: str, *arguments: Any) -> None:
    """Have every worker of a pool running."""
    for future in [pool.submit(method, *arguments) for _ in range(4 * pool.count)]:
        future.result()


def time_first_batch(rows: Rows, workers: Workers, renderer: Renderer) -> tuple[float, float]:
    """Seconds to the first batch, and to having checked the rows once more with their lengths known."""
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"max_prompt_length": LIMIT, "workers": workers, "known_lengths": folder}
        begin = time.perf_counter()
        dataset = PromptDataset(rows, renderer, **settings)
        first = Stream(len(dataset), BATCH, seed=1, shuffle=True).batch(0)
        dataset.prefetch(first)
        assert len([dataset[index] for index in first]) == BATCH
        to_first_batch = time.perf_counter() - begin
        begin = time.perf_counter()
        PromptDataset(rows, renderer, **settings)
        return to_first_batch, time.perf_counter() - begin


def time_epochs(rows: Rows, rounds: int, peer: Workers, workers: Workers, renderer: Renderer) -> dict[str, Cost]:
    """The best of some epochs of each kind, in both measures."""
    settings: dict[str, Any] = {"max_prompt_length": LIMIT, "workers": workers}
    nothing_kept = PromptDataset(rows, renderer, memory=PromptMemory(0), **settings)
    in_memory = PromptDataset(rows, renderer, memory=PromptMemory(2**33), **settings)
    with tempfile.TemporaryDirectory() as folder:
        from_disk = make_renderer(MediaCache(0, folder, 10**11))
        with Workers(from_disk, workers.count) as others:
            settings["workers"] = others
            on_disk = PromptDataset(rows, from_disk, memory=PromptMemory(0), **settings)
            for dataset in (nothing_kept, in_memory, on_disk):
                read_epoch(dataset, 0)
            times: dict[str, list[Cost]] = {"peer": [], "decoded": [], "memory": [], "disk": []}
            for number in range(1, rounds + 1):
                times["peer"].append(time_peer(peer, "load", rows))
                times["decoded"].append(read_epoch(nothing_kept, number))
                times["memory"].append(read_epoch(in_memory, number))
                times["disk"].append(read_epoch(on_disk, number))
    return {name: Cost(*map(min, zip(*several, strict=True))) for name, several in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=20_000)
    parser.add_argument("--peer", type=int, default=400, help="rows on which the peer is measured, and each epoch")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--size", default="640x480")
    parser.add_argument("--rounds", type=int, default=3, help="epochs of each kind, of which the best counts")
    options = parser.parse_args()
    width, height = map(int, options.size.split("x"))
    rows, some = (Rows(count, (width, height)) for count in (options.pictures, options.peer))
    renderer = make_renderer()
    with Workers(Peer(), options.workers) as peer, Workers(renderer, options.workers) as workers:
        start(peer, "length", rows[0][1])
        start(workers, "measure", [])
        peer_filter = time_peer(peer, "length", some)
        to_first_batch, again = time_first_batch(rows, workers, renderer)
        best = time_epochs(some, options.rounds, peer, workers, renderer)
        processing = min(ordered(lambda row: peer.submit("process", row), [row for _, row in some]))
    peer_first = peer_filter.wall * len(rows) + best["peer"].wall * BATCH
    print(f"to the first batch of {len(rows):,} pictures: {to_first_batch:.1f} s, peer {peer_first:.1f} s (scaled)")
    print(f"the same again, lengths known: {again:.1f} s")
    for measure in Cost._fields:
        shown = ", ".join(f"{name} {1e3 * getattr(cost, measure):.1f}" for name, cost in best.items())
        print(f"an epoch, ms a picture, {measure}: {shown}")
    print(f"an engine's own processing, ms a picture: {1e3 * processing:.1f} on one processor")
    wall, used = ({name: cost[place] for name, cost in best.items()} for place in (0, 1))
    ratios = {
        "pictures": len(rows),
        "size": options.size,
        "peer_rows": len(some),
        "workers": options.workers,
        "rounds": options.rounds,
        "first_batch": round(peer_first / to_first_batch, 1),
        "epoch": round(wall["peer"] / wall["decoded"], 2),
        "epoch_vllm": round(wall["peer"] / (wall["decoded"] + processing / options.workers), 2),
        "epoch_from_memory": round(wall["peer"] / wall["memory"], 2),
        "epoch_from_disk": round(wall["peer"] / wall["disk"], 2),
        "epoch_processor_time": round(used["peer"] / used["decoded"], 2),
        "epoch_vllm_processor_time": round(used["peer"] / (used["decoded"] + processing), 2),
    }
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
