"""Read the folder of a run: the names of its files, and `RunReader`."""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from r1_cli.config.section import flatten
from r1_cli.runs.history import CONFIG_FILE, LOG_FILE, LOG_FILES, History, JsonObject, NoHistoryError, read_history

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "ANSWERS",
    "CONFIG_FILE",
    "EVALUATIONS",
    "GENERATIONS_FILE",
    "LOG_FILE",
    "MANIFEST_FILE",
    "MEDIA",
    "SAMPLES",
    "Phase",
    "RunReader",
    "run_of",
    "sample_file",
]

Phase = Literal["train", "validation", "sample", "sft"]
Row = dict[str, Any]  # of the record, by column: see `schema.COLUMNS`

MANIFEST_FILE = "manifest.json"
GENERATIONS_FILE = "generations.jsonl"
SAMPLES, MEDIA, ANSWERS, EVALUATIONS = "samples", "media", "answers", "evaluations"  # folders
FORKED = "forked"  # in the column `stop_reason`: the row is a fork of an episode, whose answer is another row
MEDIA_KINDS = {".png": "image/png", ".webp": "image/webp"}


def sample_file(step: int, phase: Phase) -> str:
    """Return the file name of a step's answers; names sort by step."""
    return f"{step:09}-{phase}.parquet"


def run_of(checkpoint: Path) -> Path | None:
    """Return the folder of the run that wrote a checkpoint, or a folder inside one; None if it has no configuration."""
    folder = checkpoint.absolute()
    inside = [one for one in (folder, *folder.parents[:2]) if (one / "actor").is_dir()]
    run = inside[-1].parent if inside else folder
    return run if inside and (run / CONFIG_FILE).is_file() else None


class RunReader:
    """The folder of a finished or running run.

    `path` is r1's folder, or for the numbers alone a folder or log of EasyR1, veRL or TRL.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def settings(self) -> JsonObject:
        """Return the settings of the last start; {} if missing. Raises ValueError for a damaged file."""
        path = self.path / CONFIG_FILE
        try:
            settings: object = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error})") from error
        if not isinstance(settings, dict):
            raise ValueError(f"{path} is damaged (it holds a {type(settings).__name__}, not settings by name)")
        return settings

    def records(self) -> Iterator[JsonObject]:
        """Yield the records of r1's log, then those of `r1 eval --watch`, which are further ones of the same steps.

        Incomplete lines are skipped, as the files may still grow.
        """
        for path in (self.path / name for name in LOG_FILES):
            for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
                with suppress(ValueError):
                    yield json.loads(line)

    def starts(self) -> list[JsonObject]:
        """Return the starts in the manifest in order; [] without a readable manifest."""
        try:
            found = json.loads((self.path / MANIFEST_FILE).read_text(encoding="utf-8"))["starts"]
            return [start for start in found if isinstance(start, dict)]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    @cached_property
    def history(self) -> History:
        """The numbers by step. Raises NoHistoryError if there are none."""
        return read_history(self.path)

    def history_or_start(self) -> History:
        try:
            return self.history
        except NoHistoryError:
            if not (starts := self.starts()):
                raise
            return History(str(self.path), "r1", [], starts[-1].get("config") or {})

    def flat_settings(self) -> JsonObject:
        return dict(flatten(self.history_or_start().config)) or self.flat_start("config")

    def flat_start(self, name: str) -> JsonObject:
        """Return the entry `name` of the last start by dotted keys; {} if missing."""
        starts = self.starts()
        found = starts[-1].get(name) if starts else None
        if found is None:
            return {}
        return dict(flatten(found)) if isinstance(found, Mapping) else {name: found}

    def sample_path(self, step: int, phase: Phase = "train") -> Path:
        return self.path / SAMPLES / sample_file(step, phase)

    def sample_paths(self, phase: Phase = "train") -> list[Path]:
        return sorted((self.path / SAMPLES).glob(f"[0-9]*-{phase}.parquet"))

    def recorded_steps(self, phase: Phase = "train") -> list[int]:
        return sorted(int(path.name.split("-")[0]) for path in self.sample_paths(phase))

    def samples(self, step: int, phase: Phase = "train", columns: Sequence[str] | None = None) -> list[JsonObject]:
        """Return the answers of a step as rows, group by group. `columns` are of `schema.COLUMNS`, None: all.

        Raises FileNotFoundError, which names the recorded steps, for a missing step; KeyError for an unknown column.
        """
        rows: list[Row] = self.sample_table(step, phase, columns).to_pylist()
        for row in rows:
            if "parts" in row:
                row["parts"] = dict(row["parts"] or ())
        return rows

    def readable_samples(self, step: int, phase: Phase, columns: Sequence[str]) -> list[Row]:
        """Return the answers of a step without forks; [] if its file is damaged or was removed meanwhile."""
        import pyarrow as pa

        try:
            rows = self.samples(step, phase, [*{**dict.fromkeys(columns), "stop_reason": None}])
        except (OSError, pa.ArrowException):
            return []
        return [row for row in rows if row["stop_reason"] != FORKED]

    def sample_table(
        self, step: int, phase: Phase = "train", columns: Sequence[str] | None = None, encoded: Sequence[str] = ()
    ) -> "pa.Table":
        """Return the answers of a step as a table; columns that an older record lacks are null. Raises as `samples`.

        `encoded` columns come as dictionaries: of a text that all answers of a group share, one copy is read.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        from r1_cli.runs.schema import SCHEMA

        path = self.sample_path(step, phase)
        if unknown := sorted({*(columns or ())} - {*SCHEMA.names}):
            raise KeyError(f"the record has no column {unknown[0]!r}; it has {', '.join(SCHEMA.names)}")
        if not path.is_file():
            steps = self.recorded_steps(phase)
            there = f"steps {steps[0]} to {steps[-1]} are" if steps else "none is"
            raise FileNotFoundError(f"{self.path}: step {step} is not in the record ({phase}); {there}")
        wanted = SCHEMA.names if columns is None else list(columns)
        metadata = pq.read_metadata(path)
        written = {*metadata.schema.to_arrow_schema().names}
        with pq.ParquetFile(
            path, metadata=metadata, read_dictionary=[name for name in encoded if name in written]
        ) as file:
            table = file.read([name for name in wanted if name in written])
        for place, name in enumerate(wanted):
            if name not in written:  # a column that this record is older than
                table = table.add_column(place, SCHEMA.field(name), pa.nulls(table.num_rows, SCHEMA.field(name).type))
        return table

    def media_path(self, name: str) -> Path:
        return self.path / MEDIA / Path(name).name

    def embed_media(self, name: str, most_bytes: int) -> str | None:
        """Return a recorded picture as a `data:` URL; None if it is missing or larger than `most_bytes`."""
        path = self.media_path(name)
        if path.suffix not in MEDIA_KINDS or not path.is_file() or path.stat().st_size > most_bytes:
            return None
        return f"data:{MEDIA_KINDS[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"
