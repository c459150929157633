"""Build the demonstrations of a fine-tuning run: check and mix all sources, and order them."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

from r1_cli.build.prompts import Counter
from r1_cli.build.rendering import Rendering
from r1_cli.build.rows import OpenSource
from r1_cli.config import RunConfig
from r1_cli.config.data import DataConfig
from r1_cli.config.sources import Source
from r1_cli.train.demonstrations import MOST_LEFT_OUT, Demonstrations
from r1_data.conversations import Wanted
from r1_data.dataset import Mixture, PromptDataset, Summary
from r1_data.demonstrations import ConversationRenderer
from r1_data.prefetch import PromptMemory
from r1_data.references import describe
from r1_data.stream import Stream, WeightedStream
from r1_data.types import DataError, Demonstration

log = logging.getLogger("r1")


def wanted_rows(config: RunConfig) -> Wanted:
    """Return what the loss reads of a row."""
    return "pairs" if config.sft.has_pairs else "labels" if config.sft.compares else "answers"


class ConversationRows:
    """The rows of one source: `rows[i]` renders the i-th row that can be used."""

    renders_ahead = False

    def __init__(
        self, one: OpenSource, renderer: ConversationRenderer, config: DataConfig, progress: Callable[[int, int], None]
    ) -> None:
        """Check every row. Raises DataError if rows are over `data.max_length` and `data.truncation` is error."""
        self._read, self._rows, self._renderer, self.memory = (
            one.conversation_reader,
            one.rows,
            renderer,
            PromptMemory(),
        )
        self._kept, self._bad, self.has_media = list[int](), list[str](), False
        longest, overlong, digest = 0, list[str](), hashlib.blake2b(digest_size=16)
        for index, length in enumerate(self._measure(digest)):
            progress(index + 1, len(one.rows))
            if isinstance(length, DataError):
                self._bad.append(str(length))
                continue
            if length > config.max_length and config.truncation != "right":
                overlong.append(f"{one.rows[index][0]}: {length:,} tokens, data.max_length is {config.max_length}")
                continue
            self._kept.append(index)
            longest = max(longest, min(length, config.max_length))
        if overlong and config.truncation == "error":
            shown = "\n  ".join(overlong[:3])
            message = f"{len(overlong)} rows are too long: raise data.max_length, or set data.truncation"
            raise DataError(f"{message}=drop or =right\n  {shown}")
        self._overlong = overlong
        self.digest = digest.hexdigest()
        self.summary = Summary(len(one.rows), len(self._kept), len(overlong), longest, tuple(self._bad))

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> tuple[Demonstration, ...]:
        return self._renderer.render(self._read(*self._rows[self._kept[index]]))

    def left_out(self) -> Iterator[str]:
        yield from (*self._bad, *self._overlong)

    def prefetch(self, indices: Iterable[int]) -> None: ...

    def _measure(self, digest: "hashlib.blake2b") -> Iterator[int | DataError]:
        for row_id, row in self._rows:
            try:
                conversation = self._read(row_id, row)
            except DataError as error:
                yield error
                continue
            self.has_media = self.has_media or bool(conversation.media)
            digest.update(repr(conversation.identity).encode("utf-8", "backslashreplace"))
            digest.update("\0".join(map(describe, conversation.media)).encode("utf-8", "backslashreplace"))
            yield from self._renderer.measure([conversation])


def build_demonstrations(
    config: RunConfig, opened: Sequence[OpenSource], rendering: Rendering, counter: Counter
) -> Mixture:
    """Check every row, and log how many are left out and why.

    Raises:
        DataError: names the source: no row can be used, or more than 5 % cannot.
    """
    parts, data, sft = list[PromptDataset](), config.data, config.sft
    cut = data.max_length if data.truncation == "right" else None
    renderer = ConversationRenderer(rendering.renderer, turns=sft.turns, train_on_prompt=sft.train_on_prompt, cut=cut)
    for one in opened:
        try:
            part = ConversationRows(one, renderer, data, counter(f"checking {one.source.name}"))
        except DataError as error:
            raise DataError(f"{one.source.label}: {error}") from error
        _require_usable(one.source.label, part.summary)
        parts.append(cast(PromptDataset, part))
    return Mixture(parts)


def as_demonstrations(rows: Mixture | PromptDataset) -> Demonstrations:
    return cast(Demonstrations, rows)


def _require_usable(label: str, summary: Summary) -> None:
    bad = summary.bad
    if not bad:
        return
    message = f"{label}: {len(bad)} of {summary.read} rows cannot be used: {'; '.join(bad[:3])}"
    if not summary.kept or len(bad) > MOST_LEFT_OUT * summary.read:
        raise DataError(f"{message}\n  more than {MOST_LEFT_OUT:.0%}: correct or remove them; r1 data check lists all")
    log.warning("%s; they are left out", message)


def build_row_stream(config: RunConfig, rows: Mixture, sources: Sequence[Source]) -> Stream | WeightedStream:
    """Return the order of rows: epochs are exact, but for sources with weights."""
    data, batch = config.data, config.worker.actor.global_batch_size
    weights = [source.weight for source in sources if source.weight]
    if not weights:
        return Stream(len(rows), batch, seed=data.seed, shuffle=data.shuffle, drop_last=False)
    sizes, until = [len(part) for part in rows.parts], data.stopping_strategy
    return WeightedStream(sizes, weights, batch, seed=data.seed, shuffle=data.shuffle, until=until)
