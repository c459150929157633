"""Many examples over worker processes: sent in chunks, answered in order, and one that ends its worker is found."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from r1_data.types import Example
from r1_data.workers.pool import WorkerDied, Workers

Item = TypeVar("Item")
Chunk = list[tuple[Item, Example | None]]

_CHUNK = 128  # examples sent at a time
_MEDIA = 32  # pictures and videos sent at a time
_AHEAD = 4  # chunks under way for each worker
_SLOTS = 256  # items that wait for one chunk, most of which have nothing to send


def spread(
    items: Iterable[tuple[Item, Example | None]],
    workers: Workers | None,
    method: str,
    here: Callable[..., list[Any]],
    *,
    stays: Callable[[Example], bool],
    media: int = _MEDIA,
    arguments: tuple[Any, ...] = (),
) -> Iterator[tuple[Item, Any]]:
    """Yield each item with what came back for its example, in order: None where it has none.

    Args:
        items: what is wanted back beside the result, and the example that is asked about.
        workers: hold what has `method`; None: all is done here.
        method: takes a list of examples, `as_asked`, and gives a list of as many results.
        here: the same, for examples that this process looks at itself.
        stays: which those are.
        media: pictures and videos of a chunk, from which on it takes no more.
        arguments: of `method` and `here`, after the list.

    A chunk whose worker died is sent again one by one; the result of an example that a worker dies of is WorkerDied.
    """

    def ask(examples: list[Example]) -> "Future[list[Any]] | list[Any]":
        if workers is None or all(map(stays, examples)):
            return here(examples, *arguments)
        return workers.submit(method, [example.as_asked() for example in examples], *arguments)

    ahead = _AHEAD * workers.count if workers is not None else 0
    running: deque[tuple[Chunk[Item], Future[list[Any]] | list[Any]]] = deque()
    for chunk in _chunks(items, media, stays if workers is not None else lambda example: True):
        running.append((chunk, _ask(chunk, ask)))
        if len(running) > ahead:
            yield from _receive(*running.popleft(), ask)
    while running:
        yield from _receive(*running.popleft(), ask)


def _chunks(
    items: Iterable[tuple[Item, Example | None]], most_media: int, stays: Callable[[Example], bool]
) -> Iterator[Chunk[Item]]:
    """Cut the items into chunks whose examples are all looked at here, or all by a worker."""
    chunk: Chunk[Item] = []
    examples = media = 0
    here: bool | None = None
    for item, example in items:
        if example is not None and here is not None and stays(example) != here:
            yield chunk
            chunk, examples, media, here = [], 0, 0, None
        chunk.append((item, example))
        if example is not None:
            examples, media, here = examples + 1, media + len(example.media), stays(example)
        if examples >= _CHUNK or media >= most_media or len(chunk) >= _SLOTS:
            yield chunk
            chunk, examples, media, here = [], 0, 0, None
    if chunk:
        yield chunk


def _ask(
    chunk: Chunk[Item], ask: "Callable[[list[Example]], Future[list[Any]] | list[Any]]"
) -> "Future[list[Any]] | list[Any]":
    examples = [example for _, example in chunk if example is not None]
    return ask(examples) if examples else []


def _receive(
    chunk: Chunk[Item],
    running: "Future[list[Any]] | list[Any]",
    ask: "Callable[[list[Example]], Future[list[Any]] | list[Any]]",
) -> Iterator[tuple[Item, Any]]:
    try:
        results = iter(running if isinstance(running, list) else running.result())
    except WorkerDied as error:
        if sum(example is not None for _, example in chunk) > 1:  # which of them it was shows when each goes alone
            for one in chunk:
                yield from _receive([one], _ask([one], ask), ask)
            return
        results = iter([error])
    for item, example in chunk:
        yield item, None if example is None else next(results)
