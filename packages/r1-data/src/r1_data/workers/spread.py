"""Process many examples with workers: sent in chunks, results in order, and a fatal example is identified."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from r1_data.types import Item
from r1_data.workers.pool import WorkerDied, Workers

Entry = TypeVar("Entry")
Result = TypeVar("Result")
Chunk = list[tuple[Entry, Item | None]]

_CHUNK = 128  # examples sent at a time
_MEDIA = 32  # pictures and videos sent at a time
_AHEAD = 4  # pending chunks per worker
_SLOTS = 256  # items in a chunk, most of them without an example


def map_examples(
    items: Iterable[tuple[Entry, Item | None]],
    workers: Workers | None,
    method: str,
    local: Callable[..., list[Result]],
    *,
    is_local: Callable[[Item], bool],
    media: int = _MEDIA,
    arguments: tuple[object, ...] = (),
) -> Iterator[tuple[Entry, Result | WorkerDied | None]]:
    """Yield each item with the result for its example, in order: None if it has no example.

    Args:
        items: any value to return beside the result, and the example to process.
        workers: hold the object with `method`; None: this process does everything.
        method: maps a list of examples to a list of results.
        local: the same function, for examples that this process handles by `is_local`.
        media: maximum number of pictures and videos in a chunk.
        arguments: of `method` and `local`, after the list.

    A chunk whose worker died is sent again example by example; WorkerDied is the result of the fatal one.
    """

    def ask(examples: list[Item]) -> "Future[list[Result]] | list[Result]":
        if workers is None or all(map(is_local, examples)):
            return local(examples, *arguments)
        return workers.submit(method, [example.as_asked() for example in examples], *arguments)

    ahead = _AHEAD * workers.count if workers is not None else 0
    running: deque[tuple[Chunk[Entry, Item], Future[list[Result]] | list[Result]]] = deque()
    for chunk in _chunks(items, media, is_local if workers is not None else lambda example: True):
        running.append((chunk, _ask(chunk, ask)))
        if len(running) > ahead:
            yield from _receive(*running.popleft(), ask)
    while running:
        yield from _receive(*running.popleft(), ask)


def _chunks(
    items: Iterable[tuple[Entry, Item | None]], most_media: int, is_local: Callable[[Item], bool]
) -> Iterator[Chunk[Entry, Item]]:
    chunk: Chunk[Entry, Item] = []
    examples = media = 0
    local: bool | None = None
    for item, example in items:
        if example is not None and local is not None and is_local(example) != local:
            yield chunk
            chunk, examples, media, local = [], 0, 0, None
        chunk.append((item, example))
        if example is not None:
            examples, media, local = examples + 1, media + len(example.media), is_local(example)
        if examples >= _CHUNK or media >= most_media or len(chunk) >= _SLOTS:
            yield chunk
            chunk, examples, media, local = [], 0, 0, None
    if chunk:
        yield chunk


def _ask(
    chunk: Chunk[Entry, Item], ask: "Callable[[list[Item]], Future[list[Result]] | list[Result]]"
) -> "Future[list[Result]] | list[Result]":
    examples = [example for _, example in chunk if example is not None]
    return ask(examples) if examples else []


def _receive(
    chunk: Chunk[Entry, Item],
    running: "Future[list[Result]] | list[Result]",
    ask: "Callable[[list[Item]], Future[list[Result]] | list[Result]]",
) -> Iterator[tuple[Entry, Result | WorkerDied | None]]:
    results: Iterator[Result | WorkerDied]
    try:
        results = iter(running if isinstance(running, list) else running.result())
    except WorkerDied as error:
        if sum(example is not None for _, example in chunk) > 1:  # sent one by one to find which
            for one in chunk:
                yield from _receive([one], _ask([one], ask), ask)
            return
        results = iter([error])
    for item, example in chunk:
        yield item, None if example is None else next(results)
