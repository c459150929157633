"""From the sources that a configuration names to the prompts of a run: opened, formats found, checked, mixed."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from r1_cli.config import RunConfig
from r1_cli.config.sources import Source
from r1_cli.media import GIGABYTE, Media
from r1_cli.roles import Validation
from r1_data.dataset import PromptDataset
from r1_data.formats import Columns, Detected, detect, detect_columns
from r1_data.messages import compile_format_prompt, to_example
from r1_data.mixture import Mixture, WeightedStream
from r1_data.references import Downloads
from r1_data.sources import Rows, read_sources
from r1_data.stream import Stream
from r1_data.types import DataError, Example
from r1_rollout.types import SamplingParams

log = logging.getLogger("r1")

Counter = Callable[[str], Callable[[int, int], None]]  # what is counted -> (done, in all)

SEEN = 64  # rows whose columns decide which format a source has


@dataclass(frozen=True, slots=True)
class OpenSource:
    """A source whose files are open and whose row format is known."""

    source: Source
    rows: Rows
    detected: Detected

    @property
    def columns(self) -> Columns:
        """The columns of every row; where its media are is told by each row, as some have none."""
        _, _, images, videos = self.source.columns
        return replace(self.detected.columns, images=images, videos=videos)

    def settings(self) -> dict[str, Any]:
        """What turns a row into an example, as `PromptDataset` and `to_example` take it."""
        template = self.source.format_prompt
        return {
            "format_prompt": compile_format_prompt(Path(template).read_text("utf-8"), template) if template else None,
            "system_prompt": self.source.system_prompt,
            "image_dir": self.source.image_dir,
            "downloads": Downloads() if self.source.allow_urls else None,
            "source": self.source.name,
        }

    def to_example(self) -> Callable[[str, Mapping[str, Any]], Example]:
        """Return the function that turns a row, with its id, into an example."""
        settings, columns = self.settings(), self.columns

        def convert(row_id: str, row: Mapping[str, Any]) -> Example:
            return to_example(row_id, row, detect_columns(row, columns, explicit=True), **settings)

        return convert


def open_sources(sources: Sequence[Source]) -> list[OpenSource]:
    """Open the files and find each source's row format, from the columns of its first rows.

    Raises:
        DataError: names the source: no such file, or rows that are not of the `row_format` that is set.
    """
    if not sources:
        return []
    opened = []
    for source, rows in zip(sources, read_sources([list(source.files) for source in sources]), strict=True):
        keys = {key for row in islice(_readable(rows), SEEN) for key in row}
        try:
            detected = detect(
                keys,
                Columns(*source.columns),
                explicit=source.explicit_columns,
                row_format=source.row_format if keys else None,
            )
        except DataError as error:
            raise DataError(f"{source.label}: {error}") from error
        opened.append(OpenSource(source, rows, detected))
    return opened


def _readable(rows: Rows) -> Iterator[Mapping[str, Any]]:
    """The rows without those that are broken, which are named when all are checked."""
    for index in range(len(rows)):
        try:
            yield rows[index][1]
        except DataError:
            continue


def build_prompts(config: RunConfig, opened: Sequence[OpenSource], media: Media, counter: Counter) -> Mixture:
    """Check every row of every source; say how many were left out, and why.

    Raises:
        DataError: names the source, and the rows that cannot be used.
    """
    data, parts = config.data, []
    for one in opened:
        try:
            dataset = PromptDataset(
                one.rows,
                media.renderer,
                workers=media.workers,
                max_prompt_length=data.max_prompt_length,
                filter_overlong=data.filter_overlong_prompts,
                bad_rows=data.bad_rows,
                known_lengths=data.cache_dir,
                cache_bytes=int(data.media_memory_gb * GIGABYTE / len(opened)),
                columns=one.columns,
                explicit_columns=True,
                progress=counter(f"checking {one.source.name}"),
                **one.settings(),
            )
        except DataError as error:
            raise DataError(f"{one.source.label}: {error}") from error
        label, summary = one.source.label, dataset.summary
        if summary.overlong:
            message = "%s: %d of %d rows are left out, their prompts are over data.max_prompt_length=%d tokens"
            log.warning(message, label, summary.overlong, summary.read, data.max_prompt_length)
        if summary.bad:
            message = "%s: %d of %d rows are left out, they cannot be used (data.bad_rows=%s): %s"
            log.warning(message, label, len(summary.bad), summary.read, data.bad_rows, "; ".join(summary.bad[:3]))
        parts.append(dataset)
    return Mixture(parts)


def build_stream(config: RunConfig, prompts: Mixture, sources: Sequence[Source]) -> Stream | WeightedStream:
    """The order in which the prompts come; batches are what is generated at a time."""
    data = config.data
    batch = data.mini_rollout_batch_size or data.rollout_batch_size
    weights = [source.weight for source in sources if source.weight]
    if not weights:
        return Stream(len(prompts), batch, seed=data.seed, shuffle=data.shuffle)
    sizes, until = [len(part) for part in prompts.parts], data.stopping_strategy
    return WeightedStream(sizes, weights, batch, seed=data.seed, shuffle=data.shuffle, until=until)


def build_validation(prompts: Mixture, sources: Sequence[Source], sampling: SamplingParams) -> list[Validation]:
    """Each validation source with the number of answers that it asks for, else that of all."""
    return [
        Validation(part, replace(sampling, n=source.n or sampling.n))
        for part, source in zip(prompts.parts, sources, strict=True)
    ]
