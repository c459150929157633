"""Writes the record beside the run: a parquet file a step, complete or not there, within a bound."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq

from r1_cli.background import Background
from r1_cli.groups.group import Group
from r1_cli.record import MEDIA, SAMPLES
from r1_cli.record.media import MediaFolder
from r1_cli.record.rows import Phase, to_table
from r1_core.types import Sample

log = logging.getLogger("r1")

ROOM = 2  # steps that may wait to be written, whose samples stay in memory as long
# Columns of few values, or of values that come once an answer of a group; tokens compress better as they are.
REPEATED = ["phase", "prompt_id", "source", "prompt", "ground_truth", "finish_reason"]
Ended = Callable[[str, float, float], None]  # is told of what was done its name, and when it began and ended


class Recorder:
    """The samples of a run's steps on disk, under `samples/` and `media/` of its folder.

    A step that is reached again after a resume replaces its file. What cannot be written is said once, and nothing more
    is recorded: the run goes on, as no part of it reads the record.
    """

    def __init__(self, folder: Path, most: int, ended: Ended = lambda name, begin, end: None) -> None:
        """Record into a run's folder, of which the oldest steps leave where it comes to more than `most` bytes.

        Args:
            most: 0: nothing is recorded.
        """
        self._samples, self._media, self._most, self._ended = folder / SAMPLES, MediaFolder(folder / MEDIA), most, ended
        self._thread = Background("r1-recording", ROOM)
        self._on = most > 0
        self._dropped = False
        self._taken: int | None = None  # bytes on the disk, when they were last counted, and since

    def take(self, step: int, phase: Phase, groups: Sequence[Group], samples: Sequence[Sample] = ()) -> None:
        """Have a step's answers written; see `rows.to_table`. Waits only while the steps before it are not begun."""
        if self._on:
            self._thread.do(partial(self._write, step, phase, groups, samples))

    def flush(self) -> None:
        """Wait until all that was taken is written."""
        if self._on:
            self._thread.do(lambda: None).result()

    def close(self) -> None:
        """Write what was taken, and nothing more."""
        self.flush()
        self._thread.close()

    def _write(self, step: int, phase: Phase, groups: Sequence[Group], samples: Sequence[Sample]) -> None:
        if not self._on:
            return
        begin = time.perf_counter()
        try:
            table = to_table(step, phase, groups, samples, self._media.keep)
            self._samples.mkdir(parents=True, exist_ok=True)
            path = self._samples / file_name(step, phase)
            draft = path.with_name(f".draft_{path.name}")
            pq.write_table(table, draft, compression="zstd", use_dictionary=REPEATED)
            os.replace(draft, path)
            if self._count(path) > self._most:
                self._make_room(path)
        except Exception as error:
            self._on = False
            log.warning("samples are not recorded from step %d on: %s: %s", step, type(error).__name__, error)
        finally:
            self._ended("record", begin, time.perf_counter())

    def _count(self, written: Path) -> int:
        """Return the bytes of the record, of which all files are looked at once only."""
        if self._taken is None:
            self._taken = sum(path.stat().st_size for path in self._files())
        else:
            self._taken += written.stat().st_size + self._media.written
        self._media.written = 0
        return self._taken

    def _files(self) -> list[Path]:
        return [*self._samples.glob("*.parquet"), *self._media.folder.glob("*.*")]

    def _make_room(self, newest: Path) -> None:
        """Let the oldest steps leave, a tenth at once, and pictures that no step shows any more."""
        if not self._dropped:
            log.warning("the record is as large as trainer.record_gb lets it be: its oldest steps leave it")
            self._dropped = True
        sizes = {path: path.stat().st_size for path in self._files()}
        steps = [path for path in sorted(self._samples.glob("*.parquet")) if path != newest]
        while steps and sum(sizes.values()) > self._most:
            leaving, steps = steps[: 1 + len(steps) // 10], steps[1 + len(steps) // 10 :]
            shown = {name for path in (*steps, newest) for name in _media_of(path)}
            for path in [*leaving, *(one for one in sizes if one.parent != self._samples and one.name not in shown)]:
                path.unlink()
                del sizes[path]
        self._taken = sum(sizes.values())


def file_name(step: int, phase: Phase) -> str:
    """Return the name of a step's file; in the order of names they are in the order of steps."""
    return f"{step:09}-{phase}.parquet"


def _media_of(path: Path) -> set[str]:
    column = pq.read_table(path, columns=["media"])["media"]
    return {name for names in column.to_pylist() for name in names or ()}
