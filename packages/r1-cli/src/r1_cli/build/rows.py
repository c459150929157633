"""Open the sources of a configuration: their rows, and the row format found in them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from r1_cli.config.section import Tree
from r1_cli.config.sources import Source, count_rows
from r1_data.conversations import ConversationReader, OtherColumns, Tags, Wanted, require_format
from r1_data.formats import CONVERSATION_FORMATS, FORMATS, Columns, Detected, detect
from r1_data.messages import RowReader
from r1_data.references import Downloads, Video
from r1_data.sources import read_sources
from r1_data.tables.table import Rows
from r1_data.types import DataError

SEEN = 64  # rows whose columns decide which format a source has
DEFAULT_KEYS = "; set data.prompt_key=prompt data.answer_key=answer, the defaults, and their format is found"


@dataclass(frozen=True, slots=True)
class OpenSource:
    source: Source
    rows: Sequence[tuple[str, dict[str, Any]]]
    detected: Detected

    wanted: Wanted | None = None  # of fine-tuning rows: what the loss reads of them

    @property
    def reader(self) -> RowReader:
        return RowReader(self._columns, explicit_columns=True, **self._settings())

    @property
    def conversation_reader(self) -> ConversationReader:
        own = self.source.conversation
        return ConversationReader(
            self._columns,
            explicit_columns=self.source.names_conversations,
            others=OtherColumns(tools=own.tools, **own.others.model_dump()),
            tags=Tags(**own.tags.model_dump()),
            wanted=self.wanted or "any",
            **self._settings(),
        )

    @property
    def _columns(self) -> Columns:
        _, _, images, videos = self.source.columns
        return replace(self.detected.columns, images=images, videos=videos)

    def _settings(self) -> Tree:
        template = self.source.format_prompt
        return {
            "format_prompt": Path(template).read_text("utf-8") if template else None,
            "format_prompt_name": template or "",
            "system_prompt": self.source.system_prompt,
            "image_dir": self.source.image_dir,
            "downloads": Downloads() if self.source.allow_urls else None,
            "source": self.source.name,
        }


def open_sources(sources: Sequence[Source], wanted: Wanted | None = None) -> list[OpenSource]:
    """Open the files, and find each source's row format from its first rows.

    Args:
        wanted: rows are conversations, and the loss reads this of them; None: rows are prompts.

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
            detected = _detect(source, keys, conversations=wanted is not None)
            if wanted is not None and not source.names_conversations and seen:
                require_format(seen[0], detected)
            _require_columns(detected.columns, seen, keys, source, conversations=wanted is not None)
        except DataError as error:
            raise DataError(f"{source.label}: {error}") from error
        opened.append(OpenSource(source, rows, detected, wanted))
        _require_media(opened[-1])
    return opened


def _detect(source: Source, keys: set[str], *, conversations: bool) -> Detected:
    columns, explicit, own = Columns(*source.columns), source.explicit_columns, source.conversation
    if conversations and own.messages is not None:
        pair = {"chosen", own.others.rejected} <= keys
        answer = columns.ground_truth if explicit else "chosen" if pair else ""
        columns, explicit = replace(columns, prompt=own.messages, ground_truth=answer), True
    return detect(
        keys,
        columns,
        explicit=explicit,
        row_format=source.row_format if keys else None,
        formats=CONVERSATION_FORMATS if conversations else FORMATS,
    )


def _require_columns(
    columns: Columns, seen: Sequence[Mapping[str, Any]], keys: set[str], source: Source, *, conversations: bool
) -> None:
    if not seen:
        return
    found = f"columns found: {', '.join(sorted(keys))}"
    prompt_key = "messages_key" if columns.prompt == source.conversation.messages else "prompt_key"
    for key, name in ((prompt_key, columns.prompt), ("answer_key", columns.ground_truth)):
        if name and not {name, name.partition(".")[0]} & keys:
            where = f"data.{key}={name}{near(name, keys)}"
            way_out = DEFAULT_KEYS if conversations and {"messages", "chosen"} & keys else ""
            raise DataError(f"none of the first {len(seen)} rows has the column {where}; {found}{way_out}")
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
    read = opened.reader if opened.wanted is None else opened.conversation_reader
    for index in range(min(len(opened.rows), SEEN)):
        try:
            media = read(*opened.rows[index]).media
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
