"""Open the sources of a configuration: their rows, and the row format found in them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from r1_cli.config.sources import Source, count_rows
from r1_data.formats import Columns, Detected, detect
from r1_data.messages import RowReader
from r1_data.references import Downloads, Video
from r1_data.sources import read_sources
from r1_data.tables.table import Rows
from r1_data.types import DataError

SEEN = 64  # rows whose columns decide which format a source has


@dataclass(frozen=True, slots=True)
class OpenSource:
    source: Source
    rows: Sequence[tuple[str, dict[str, Any]]]
    detected: Detected

    @property
    def reader(self) -> RowReader:
        _, _, images, videos = self.source.columns
        template = self.source.format_prompt
        return RowReader(
            replace(self.detected.columns, images=images, videos=videos),
            explicit_columns=True,
            format_prompt=Path(template).read_text("utf-8") if template else None,
            format_prompt_name=template or "",
            system_prompt=self.source.system_prompt,
            image_dir=self.source.image_dir,
            downloads=Downloads() if self.source.allow_urls else None,
            source=self.source.name,
        )


def open_sources(sources: Sequence[Source]) -> list[OpenSource]:
    """Open the files, and find each source's row format from its first rows.

    Raises:
        DataError: names the source: there is no such file, or rows do not have the `row_format` that is set.
    """
    if not sources:
        return []
    opened = []
    for source, rows in zip(sources, read_sources([list(source.files) for source in sources]), strict=True):
        seen = list(islice(_readable(rows), SEEN))
        keys = {key for row in seen for key in row}
        try:
            detected = detect(
                keys,
                Columns(*source.columns),
                explicit=source.explicit_columns,
                row_format=source.row_format if keys else None,
            )
            _require_columns(detected.columns, seen, keys)
        except DataError as error:
            raise DataError(f"{source.label}: {error}") from error
        opened.append(OpenSource(source, rows, detected))
        _require_media(opened[-1])
    return opened


def _require_columns(columns: Columns, seen: Sequence[Mapping[str, Any]], keys: set[str]) -> None:
    if not seen:
        return
    found = f"columns found: {', '.join(sorted(keys))}"
    for key, name in (("prompt_key", columns.prompt), ("answer_key", columns.ground_truth)):
        if not {name, name.partition(".")[0]} & keys:
            where = f"data.{key}={name}{near(name, keys)}"
            raise DataError(f"none of the first {len(seen)} rows has the column {where}; {found}")
    prompts = [str(row.get(columns.prompt)) for row in seen]
    media = (("image_key", columns.images, "<image>", "image"), ("video_key", columns.videos, "<video>", "video"))
    for key, name, marker, other in media:
        if not {name, other} & keys and 2 * sum(marker in prompt for prompt in prompts) > len(seen):
            where = f"data.{key}={name}{near(name, keys)}"
            raise DataError(f"most prompts hold {marker}, but no row has the column {where}; {found}")


def _require_media(opened: OpenSource) -> None:
    """Raise DataError if the media of the first rows are in another folder; names the `image_dir` to set."""
    source = opened.source
    home = source.image_dir or "."
    names = [os.path.relpath(path, home) for path in _media_paths(opened) if source.image_dir or not path.is_absolute()]
    if not names or any(Path(home, name).exists() for name in names):
        return
    for spec in source.files:
        rows = Path(spec).expanduser()
        for folder in (rows if rows.is_dir() else rows.parent, rows.parent.parent):
            if (folder / names[0]).is_file():
                key = f"{source.key}.image_dir" if source.key.startswith("data.sources") else "data.image_dir"
                where = f"is in {Path(home).absolute()}, but there is {folder / names[0]}: set {key}={folder}"
                raise DataError(f"{source.label}: none of the {len(names)} files that its first rows name {where}")


def _media_paths(opened: OpenSource) -> Iterator[Path]:
    for index in range(min(len(opened.rows), SEEN)):
        try:
            media = opened.reader(*opened.rows[index]).media
        except DataError:
            continue
        for reference in media:
            path = reference.source if isinstance(reference, Video) else reference
            if isinstance(path, Path):
                yield path


def near(name: str, keys: set[str]) -> str:
    close = get_close_matches(name, keys, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def open_local(sources: Sequence[Source]) -> list[OpenSource | None]:
    """Open the sources whose files are local; None stands for each source that would be downloaded."""
    local = [source for source in sources if count_rows([source]) is not None]
    opened = dict(zip((source.name for source in local), open_sources(local), strict=True))
    return [opened.get(source.name) for source in sources]


def _readable(rows: Rows) -> Iterator[Mapping[str, Any]]:
    for index in range(len(rows)):
        try:
            yield rows[index][1]
        except DataError:
            continue
