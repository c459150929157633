"""Many examples over worker processes: sent in chunks, answered in order, and one that ends its worker is found."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from r1_data.types import Example
from r1_data.workers.pool import WorkerDied, Workers

Item = TypeVar("Item")
Chunk = list[tuple[Item, Example | None]]
Submit = Callable[[list[Example]], "Future[list[Any]]"]

_CHUNK = 32  # examples sent at a time
_AHEAD = 4  # chunks under way for each worker
_SLOTS = 256  # items that wait for one chunk, most of which have nothing to send


def spread(
    items: Iterable[tuple[Item, Example | None]], workers: Workers, method: str, *, media: int = _CHUNK
) -> Iterator[tuple[Item, Any]]:
    """Yield each item with what came back for its example, in order: None where it has none to send.

    Args:
        items: what is wanted back beside the result, and the example to be sent.
        method: of what the workers hold; it takes a list of examples, without their metadata, and gives a list of
            as many results.
        media: pictures and videos of a chunk, from which on it takes no more.

    A chunk whose worker died is sent again one by one; the result of an example that a worker dies of is WorkerDied.
    """

    def submit(examples: list[Example]) -> "Future[list[Any]]":
        return workers.submit(method, [replace(example, metadata={}) for example in examples])

    running: deque[tuple[Chunk[Item], Future[list[Any]] | None]] = deque()
    for chunk in _chunks(items, media):
        running.append((chunk, _send(chunk, submit)))
        if len(running) > _AHEAD * workers.count:
            yield from _receive(*running.popleft(), submit)
    while running:
        yield from _receive(*running.popleft(), submit)


def _chunks(items: Iterable[tuple[Item, Example | None]], most_media: int) -> Iterator[Chunk[Item]]:
    chunk: Chunk[Item] = []
    examples = media = 0
    for item, example in items:
        chunk.append((item, example))
        if example is not None:
            examples, media = examples + 1, media + len(example.media)
        if examples >= _CHUNK or media >= most_media or len(chunk) >= _SLOTS:
            yield chunk
            chunk, examples, media = [], 0, 0
    if chunk:
        yield chunk


def _send(chunk: Chunk[Item], submit: Submit) -> "Future[list[Any]] | None":
    examples = [example for _, example in chunk if example is not None]
    return submit(examples) if examples else None


def _receive(
    chunk: Chunk[Item],
    running: "Future[list[Any]] | None",
    submit: Submit,
) -> Iterator[tuple[Item, Any]]:
    try:
        results = iter(running.result() if running else ())
    except WorkerDied as error:
        if sum(example is not None for _, example in chunk) > 1:  # which of them it was shows when each goes alone
            for one in chunk:
                yield from _receive([one], _send([one], submit), submit)
            return
        results = iter([error])
    for item, example in chunk:
        yield item, None if example is None else next(results)
