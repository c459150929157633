"""Datasets: every row is validated before training, and rendered when requested."""

import hashlib
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal

from r1_data.formats import detect_columns
from r1_data.lengths import MANY, MANY_TEXTS, measure_all, open_known
from r1_data.messages import RowReader
from r1_data.prefetch import ItemRenderer, PromptMemory, RemoteRenderer, RenderJob, RowRenderer
from r1_data.references import describe
from r1_data.remarks import Remarks
from r1_data.render import Renderer
from r1_data.sources import as_rows
from r1_data.types import DataError, Example, Item, MediaError, Overlong, Prompt, Rendered, Row
from r1_data.workers import WorkerDied, Workers

if TYPE_CHECKING:
    from concurrent.futures import Future

BadRows = Literal["refuse", "skip_media", "skip"]
Overlength = Literal["error", "refuse", "skip", "cut"]  # of rows over the limit; error: even if bad rows are skipped

_SHOWN = 10  # maximum number of rows in an error message


@dataclass(frozen=True, slots=True)
class Summary:
    """How many rows of a source were read, kept and skipped, and why."""

    read: int  # rows
    kept: int  # rows
    overlong: int  # rows skipped because they exceed the limit
    longest: int  # tokens of the longest row kept, after cutting
    bad: tuple[str, ...] = ()  # why rows were skipped that cannot be used
    remarks: tuple[str, ...] = ()  # oddities of kept rows
    cut: int = 0  # kept rows over the limit: the last answer of each loses its end


@dataclass(frozen=True, slots=True)
class LengthLimit:
    tokens: int
    name: str  # of the setting
    what: str  # it limits
    overlong: Overlength


class RowDataset(Generic[Item, Rendered]):
    """Validated rows: `dataset[i]` renders the i-th kept row."""

    def __init__(
        self,
        rows: Sequence[tuple[str, Row]] | Sequence[Mapping[str, object]],
        reader: Callable[[str, Mapping[str, object]], Item],
        renderer: ItemRenderer[Item, Rendered],
        limit: LengthLimit,
        *,
        bad_rows: BadRows = "refuse",
        progress: Callable[[int, int], None] | None = None,
        memory: PromptMemory | None = None,
        workers: Workers | None = None,
        remote: Callable[[tuple[int, int, int], Item], "Future[Rendered]"] | None = None,
        known_lengths: str | Path | None = None,
    ) -> None:
        """Validate every row: its columns, the headers of its media, its length.

        Args:
            rows: (row id, row), as from `read_rows`; or mappings: a list of dicts, a `datasets.Dataset`.
            bad_rows: "refuse" all unusable rows, "skip" them, or skip those with unreadable media ("skip_media").
            progress: called with (rows validated, total rows).
            memory: holds decoded media and rows rendered ahead; several datasets may share it.
            workers: processes that hold `renderer`; None: this process does everything.
            remote: renders rows with media on other machines; prompts then hold references (`r1_data.model_inputs`).
            known_lengths: folder that caches the lengths of datasets with 1,000 and more rows.

        Raises:
            DataError: rows that cannot be used (lists up to ten with reasons, and the total), or no row is left.
        """
        self._rows, self._reader, self._renderer, self._limit = as_rows(rows), reader, renderer, limit
        self.has_media = False  # whether any row has pictures or videos
        self._remarks: list[str] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self.memory = memory or PromptMemory()
        self._row_renderer = RowRenderer(
            self._rows, self._reader, renderer, self.memory, workers=workers, remote=remote
        )
        lengths = self._measure(known_lengths if len(rows) >= MANY else None, workers, progress)
        if limit.overlong == "refuse":
            lengths = [self._within(row, length) for row, length in enumerate(lengths)]
        self._kept, summary = _choose(lengths, limit, bad_rows)
        self.summary = replace(summary, remarks=tuple(self._remarks))
        self.digest = self._digest.hexdigest()  # of all rows' messages, answers and media references
        del self._digest
        skipped = enumerate(lengths) if limit.overlong == "skip" else ()
        self._overlong = [(row, found) for row, found in skipped if _is_overlong(found, limit.tokens)]

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Rendered:
        """Render the i-th kept row. Raises DataError that names the row if a picture does not decode."""
        job, limit = self.job(index), self._limit
        try:
            rendered = self.memory.render(job).result()
        except WorkerDied as error:
            raise MediaError(f"{self._rows[job.row][0]}: {error}") from error
        if (length := self.length_of(rendered)) > limit.tokens:
            tokens = f"{length:,} tokens, {limit.name} is {limit.tokens}"
            raise MediaError(
                f"{self._rows[job.row][0]}: the {limit.what} has {tokens}; its data changed after validation"
            )
        return rendered

    @abstractmethod
    def length_of(self, rendered: Rendered) -> int:
        """Return the tokens of a rendered row."""

    def find_remarks(self, item: Item) -> Iterable[str]:
        """Return oddities of a usable row."""
        return ()

    def mean_values(self, rows: int = 16) -> float:
        """Estimate the mean number of values in a row's model inputs, from media headers."""
        chosen, counts = self._kept[:: max(len(self._kept) // rows, 1)], []
        for row, _ in chosen:
            with suppress(DataError):  # deleted since validation: reported when it is rendered
                counts.append(self._renderer.count_values(self._row_renderer.read(row)))
        return sum(counts) / max(len(counts), 1)

    def left_out(self) -> Iterator[str]:
        yield from self.summary.bad
        for row, found in self._overlong:
            yield str(self._too_long(row, found) if isinstance(found, int) else found)

    def prefetch(self, indices: Iterable[int]) -> None:
        """Render rows in the background, in this order, as far ahead as memory allows."""
        self.memory.prefetch(map(self.job, indices) if self.renders_ahead else ())

    @property
    def renders_ahead(self) -> bool:
        """Whether workers or other machines render in the background."""
        return self._row_renderer.concurrent

    def example(self, index: int) -> Item:
        """Read the i-th kept row again, without rendering it. Raises DataError that names the row."""
        return self._row_renderer.read(self._kept[index][0])

    def job(self, index: int) -> RenderJob[Rendered]:
        return RenderJob(self._row_renderer, *self._kept[index])

    def _items(self) -> Iterator[tuple[int, Item | DataError]]:
        for index in range(len(self._rows)):
            try:
                item = self._row_renderer.read(index)
            except DataError as error:
                yield index, error
                continue
            self.has_media = self.has_media or bool(item.media)
            self._remarks += self.find_remarks(item)
            self._digest.update(repr(item.identity).encode())
            self._digest.update("\0".join(map(describe, item.media)).encode("utf-8", "backslashreplace"))
            yield index, item

    def _measure(
        self, folder: str | Path | None, workers: Workers | None, progress: Callable[[int, int], None] | None
    ) -> list[int | DataError]:
        total = len(self._rows)
        lengths: list[int | DataError] = [0] * total
        with ExitStack() as stack:
            known = open_known(folder, self._renderer)
            if known is not None:
                stack.enter_context(closing(known))
            many = total >= MANY_TEXTS
            limit = None if self._limit.overlong == "cut" else self._limit.tokens
            found = measure_all(self._items(), self._renderer, workers, known, limit=limit, many=many)
            for done, (index, length) in enumerate(found, start=1):
                lengths[index] = length
                if progress is not None:
                    progress(done, total)
        return lengths

    def _within(self, row: int, length: int | DataError) -> int | DataError:
        if isinstance(length, Overlong):
            return DataError(length)
        if isinstance(length, DataError) or length <= self._limit.tokens:
            return length
        return self._too_long(row, length)

    def _too_long(self, row: int, tokens: int) -> DataError:
        limit = self._limit
        return DataError(f"{self._rows[row][0]}: the {limit.what} has {tokens} tokens, {limit.name} is {limit.tokens}")


class PromptDataset(RowDataset[Example, Prompt]):
    """Rows as prompts: `dataset[i]` renders the i-th kept row."""

    def __init__(
        self,
        rows: Sequence[tuple[str, Row]] | Sequence[Mapping[str, object]],
        renderer: Renderer,
        *,
        max_prompt_length: int,
        filter_overlong: bool = True,
        bad_rows: BadRows = "refuse",
        reader: RowReader | None = None,
        progress: Callable[[int, int], None] | None = None,
        memory: PromptMemory | None = None,
        workers: Workers | None = None,
        remote: RemoteRenderer | None = None,
        known_lengths: str | Path | None = None,
    ) -> None:
        """As `RowDataset`, which has the other arguments.

        Args:
            max_prompt_length: tokens, media included; longer rows are skipped with `filter_overlong`, else refused.
            reader: converts a row to an example; None: `RowReader()`, which detects the columns.
        """
        reader = reader or RowReader()
        self._prompt_reader, self._find_remarks = reader, Remarks(renderer.tokenizer, reader).find
        super().__init__(
            rows,
            reader,
            renderer,
            LengthLimit(max_prompt_length, "max_prompt_length", "prompt", "skip" if filter_overlong else "refuse"),
            bad_rows=bad_rows,
            progress=progress,
            memory=memory,
            workers=workers,
            remote=remote,
            known_lengths=known_lengths,
        )

    def example(self, index: int, images: str | None = None) -> Example:
        """Read the i-th kept row again, with the pictures of column `images` if it is set.

        Raises DataError that names the row.
        """
        if images is None:
            return super().example(index)
        name, row = self._rows[self._kept[index][0]]
        if images not in row:
            raise DataError(f"{name}: it has no column {images!r}; columns found: {', '.join(row)}")
        reader = self._prompt_reader
        columns = replace(detect_columns(row, reader.columns, reader.explicit_columns), images=images)
        return replace(reader, columns=columns, explicit_columns=True)(name, row)

    def length_of(self, rendered: Prompt) -> int:
        return len(rendered.token_ids)

    def find_remarks(self, item: Example) -> Iterable[str]:
        return (text for _, text in self._find_remarks(item))


class Mixture:
    """Several datasets as one, in order."""

    def __init__(self, parts: Sequence[PromptDataset]) -> None:
        self.parts = list(parts)
        self._ends = list(accumulate(len(part) for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Prompt:
        which, own = self._place(index)
        return self.parts[which][own]

    def prefetch(self, indices: Iterable[int]) -> None:
        planned: dict[PromptMemory, list[RenderJob[Prompt]]] = {part.memory: [] for part in self.parts}
        for index in indices:
            which, own = self._place(index)
            if self.parts[which].renders_ahead:
                planned[self.parts[which].memory].append(self.parts[which].job(own))
        for memory, jobs in planned.items():
            memory.prefetch(jobs)

    def example(self, index: int, images: str | None = None) -> Example:
        which, own = self._place(index)
        return self.parts[which].example(own, images)

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        which = bisect_right(self._ends, index)
        return which, index - self._ends[which] + len(self.parts[which])


def _choose(
    lengths: Sequence[int | DataError], limit: LengthLimit, bad_rows: BadRows
) -> tuple[list[tuple[int, int]], Summary]:
    total, most, cuts = len(lengths), limit.tokens, limit.overlong == "cut"
    skipped = {"refuse": (), "skip_media": (MediaError,), "skip": (DataError,)}[bad_rows]
    overlong = [length for length in lengths if _is_overlong(length, most)]
    kept = [
        (row, min(length, most))
        for row, length in enumerate(lengths)
        if isinstance(length, int) and (cuts or length <= most)
    ]
    errors = [length for length in lengths if isinstance(length, DataError) and not isinstance(length, Overlong)]
    bad = [str(error) for error in errors if isinstance(error, skipped)]
    refused = [str(error) for error in errors if not isinstance(error, skipped)]
    if refused:
        raise DataError(_list_bad(refused, total))
    if overlong and limit.overlong == "error":
        longest = max((length for length in overlong if isinstance(length, int)), default=most + 1)
        raise DataError(
            f"{len(overlong)} of {total} rows are over data.{limit.name}={most} tokens (the longest has {longest} or "
            f"more): raise it, or set data.truncation=drop or =right"
        )
    if total == 0:
        raise DataError("the dataset is empty: its files hold no rows")
    if not kept and bad:
        raise DataError(f"the dataset is empty: {_list_bad(bad, total)}")
    if not kept:
        measured = [length for length in overlong if isinstance(length, int)]
        most_found = f"{'' if len(measured) == len(overlong) else 'more than '}{max(measured, default=most)}"
        raise DataError(
            f"the dataset is empty: all {len(overlong)} rows were filtered out because their {limit.what}s are over "
            f"{limit.name}={most} tokens (the longest has {most_found})"
        )
    longest_kept = max(length for _, length in kept)
    left_out, cut = (0, len(overlong)) if cuts else (len(overlong), 0)
    return kept, Summary(total, len(kept), left_out, longest_kept, tuple(bad), cut=cut)


def _is_overlong(length: int | DataError, limit: int) -> bool:
    return length > limit if isinstance(length, int) else isinstance(length, Overlong)


def _list_bad(reasons: list[str], total: int) -> str:
    more = len(reasons) - _SHOWN
    lines = [f"{len(reasons)} of {total} rows cannot be used:", *(f"  {reason}" for reason in reasons[:_SHOWN])]
    return "\n".join([*lines, f"  ... and {more} more"] if more > 0 else lines)
