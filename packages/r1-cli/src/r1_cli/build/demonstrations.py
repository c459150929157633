"""Build the demonstrations of a fine-tuning run: check and mix all sources, and order them."""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch

from r1_cli.build.prompts import Counter
from r1_cli.build.rendering import Rendering
from r1_cli.build.rows import OpenSource
from r1_cli.config import RunConfig
from r1_cli.config.sources import Source
from r1_cli.train.demonstrations import MOST_LEFT_OUT, Demonstrations
from r1_data.conversations import Wanted
from r1_data.dataset import Mixture, PromptDataset, Summary
from r1_data.prefetch import PromptMemory
from r1_data.render import Renderer
from r1_data.stream import Stream, WeightedStream
from r1_data.types import Conversation, DataError, Demonstration, Turns

log = logging.getLogger("r1")


def wanted_rows(config: RunConfig) -> Wanted:
    """Return what the loss reads of a row."""
    return "pairs" if config.sft.has_pairs else "labels" if config.sft.compares else "answers"


class TextConversations:
    """Conversations without media, whose templates render their beginning as the beginning of their rendering."""

    has_media = renders_ahead = False

    def __init__(self, one: OpenSource, renderer: Renderer, turns: Turns, max_length: int) -> None:
        self._read, self._rows, self._renderer = one.conversation_reader, one.rows, renderer
        self._turns, self._limit, self.memory = turns, max_length, PromptMemory()
        self._kept: list[int] = []
        self._bad: list[str] = []
        longest, digest = 0, hashlib.blake2b(digest_size=16)
        for index, (row_id, row) in enumerate(one.rows):
            digest.update(repr((row_id, row)).encode("utf-8", "backslashreplace"))
            try:
                longest = max(longest, *(len(found.token_ids) for found in self._render(index)))
                self._kept.append(index)
            except DataError as error:
                self._bad.append(str(error))
        self.digest = digest.hexdigest()
        self.summary = Summary(len(one.rows), len(self._kept), 0, longest, tuple(self._bad))

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> tuple[Demonstration, ...]:
        return self._render(self._kept[index])

    def left_out(self) -> Iterator[str]:
        yield from self._bad

    def prefetch(self, indices: Iterable[int]) -> None: ...

    def _render(self, index: int) -> tuple[Demonstration, ...]:
        one = self._read(*self._rows[index])
        if one.media:
            raise DataError(f"{one.id}: conversations with pictures or videos are not supported yet")
        endings = [one.messages] if one.rejected is None else [one.messages, one.messages[:-1] + one.rejected]
        found = [sample for messages in endings for sample in self._mark(one, messages)]
        for sample in found:
            if len(sample.token_ids) > self._limit:
                raise DataError(f"{one.id}: {len(sample.token_ids)} tokens, data.max_length is {self._limit}")
        return tuple(found)

    def _mark(self, one: Conversation, messages: list[dict[str, object]]) -> list[Demonstration]:
        def encode(count: int, *, generation_prompt: bool) -> list[int]:
            text = self._renderer.write_chat(messages[:count], tools=one.tools, generation_prompt=generation_prompt)
            found: list[int] = self._renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
            return found

        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        pieces = []
        for place in places if self._turns != "last" else places[-1:]:
            begin, end = encode(place, generation_prompt=True), encode(place + 1, generation_prompt=False)
            if end[: len(begin)] != begin:
                raise DataError(f"{one.id}: the chat template changes earlier turns")
            pieces.append((end, len(begin)))
        if self._turns == "each":
            return [self._demonstration(one, tokens, [(begin, len(tokens))]) for tokens, begin in pieces]
        return [self._demonstration(one, pieces[-1][0], [(begin, len(tokens)) for tokens, begin in pieces])]

    def _demonstration(self, one: Conversation, tokens: list[int], spans: list[tuple[int, int]]) -> Demonstration:
        mask = [any(begin <= place < end for begin, end in spans) for place in range(len(tokens))]
        return Demonstration(one.id, tokens, mask, torch.arange(len(tokens))[None], {}, mask.index(True), one.source)


def build_demonstrations(
    config: RunConfig, opened: Sequence[OpenSource], rendering: Rendering, counter: Counter
) -> Mixture:
    """Check every row, and log how many are left out and why.

    Raises:
        DataError: names the source: no row can be used, or more than 5 % cannot.
    """
    parts = []
    for one in opened:
        part = TextConversations(one, rendering.renderer, config.sft.turns, config.data.max_length)
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
