"""The run's own log files: append-only JSON lines, without gaps or repeats after kills and resumes."""

import json
import math
import os
from contextlib import suppress
from pathlib import Path

from r1_cli.checkpoint.folders import CheckpointError, write_json
from r1_cli.runs.history import CONFIG_FILE, EVALUATIONS_FILE, LOG_FILE, JsonObject
from r1_cli.runs.reader import ANSWERS, EVALUATIONS, GENERATIONS_FILE, SAMPLES, RunReader
from r1_cli.runs.track.types import Record, RunInfo


class JsonLines:
    """An append-only file of JSON objects, one a line. Opening it removes the incomplete last line of a killed run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)

    def read(self) -> list[JsonObject]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def append(self, rows: list[JsonObject]) -> None:
        """Write rows to disk (fsync). Raises CheckpointError if it is full; earlier rows stay whole."""
        before: int | None = None
        try:
            before = self.path.stat().st_size
            with self.path.open("a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if before is not None:
                with suppress(OSError):  # read-only by now
                    os.truncate(self.path, before)
            raise CheckpointError(f"{self.path} could not be written: {error}; make room, then go on") from error


class FileLogger:
    """`experiment_config.json`, `experiment_log.jsonl` and `generations.jsonl` in the run's folder.

    A resumed run repeats the steps after its last checkpoint bit for bit; rows that exist are not written again. If a
    new run has other settings, older files are renamed.
    """

    def __init__(self, info: RunInfo) -> None:
        if not info.resumed_from:
            _move_aside_other_run(info)
        self._log = JsonLines(info.folder / LOG_FILE)
        self._generations = JsonLines(info.folder / GENERATIONS_FILE)
        self._steps = {row["step"] for row in self._log.read()}
        self._logged_generations = {_key(row) for row in self._generations.read()}
        write_json(info.folder / CONFIG_FILE, info.config)

    def has(self, step: int) -> bool:
        return step in self._steps

    def log(self, step: int, record: Record) -> None:
        if self.has(step):
            return
        # NaN is not JSON: readers other than Python's would refuse the line.
        values = {key: value if math.isfinite(value) else None for key, value in record.items()}
        self._log.append([{"step": step, **values}])
        self._steps.add(step)

    def log_generations(self, step: int, rows: list[JsonObject]) -> None:
        new = [row for row in ({"step": step, **row} for row in rows) if _key(row) not in self._logged_generations]
        self._generations.append(new)
        self._logged_generations.update(map(_key, new))

    def close(self) -> None:
        pass


def _key(row: JsonObject) -> tuple[int, str, str, int]:
    return row["step"], row.get("split", "val"), row["id"], row.get("sample", 0)


def _move_aside_other_run(info: RunInfo) -> None:
    config, records = info.folder / CONFIG_FILE, info.folder / LOG_FILE
    if not records.is_file() or _settings(info.folder) == info.config:
        return
    number = 1 + len(list(info.folder.glob("experiment_log.*.jsonl")))
    others = (GENERATIONS_FILE, SAMPLES, ANSWERS, EVALUATIONS_FILE, EVALUATIONS)
    for path in (config, records, *(info.folder / name for name in others)):
        if path.exists():
            path.rename(path.with_suffix(f".{number}{path.suffix}"))


def _settings(folder: Path) -> JsonObject | None:
    """Return the settings of a folder's run; None if they are damaged, as no run's are."""
    try:
        return RunReader(folder).settings()
    except ValueError:
        return None
