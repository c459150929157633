"""Send log records to all configured loggers in the background."""

import importlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from r1_cli.checkpoint.background import Background
from r1_cli.runs.history import JsonObject
from r1_cli.runs.track.files import FileLogger
from r1_cli.runs.track.types import Generation, Logger, Record, RunInfo

if TYPE_CHECKING:
    from r1_cli.runs.track.console import ConsoleReporter

BEHIND = 64  # records that may wait to be written; a service that takes longer than a step holds the run up then

log = logging.getLogger("r1")


class Tracker:
    """All loggers of a run.

    The console shows a record at once. A thread writes records in order, to the run's own files before services.
    """

    def __init__(self, names: Sequence[str], info: RunInfo, console: "ConsoleReporter") -> None:
        # These two are always there: resuming without gap or repeat is decided by what the files hold, and the console
        # knows by itself what to show where it was not asked for.
        self.files = FileLogger(info)
        self.console = console
        self.loggers: list[Logger] = [self.files, console]
        for name in names:
            if name not in ("console", "file"):
                self.loggers += _open(name, info)
        self._thread = Background("r1-tracking", BEHIND)
        self._failure: Exception | None = None  # why the run's own files lack what came since

    def has(self, step: int) -> bool:
        """Whether this step's record was written, also by an earlier process."""
        return self.files.has(step)

    def log(self, step: int, record: Record, generations: Sequence[Generation] = ()) -> None:
        """Log one step's record and its responses.

        The run's own file receives all responses, other loggers the first of each validation prompt. Raises
        CheckpointError if an earlier record could not be written to the run's own files.
        """
        if self._failure:
            raise self._failure
        first = [_flat(asdict(one)) for one in generations if one.split == "val" and one.sample == 0]
        if self.console in self.loggers:
            self.console.show(generations)
            self._log_to(self.console, step, record, first)
        self._thread.do(partial(self._write, step, dict(record), tuple(generations), first))

    def flush(self) -> None:
        self._thread.do(lambda: None).result()
        if self._failure:
            raise self._failure

    def close(self) -> None:
        self._thread.do(lambda: None).result()
        self._thread.close()
        for logger in self.loggers:
            logger.close()

    def _write(self, step: int, record: Record, generations: Sequence[Generation], first: list[JsonObject]) -> None:
        """Write one record, unless an earlier one is missing in the run's own files."""
        if self._failure:
            return
        try:
            # Generations first: a step counts as written once its record is.
            if generations:
                self.files.log_generations(step, [asdict(generation) for generation in generations])
            self.files.log(step, record)
        except Exception as error:  # is raised where the run can end
            self._failure = error
            return
        for logger in list(self.loggers):
            if logger not in (self.files, self.console):
                self._log_to(logger, step, record, first)

    def _log_to(self, logger: Logger, step: int, record: Record, rows: list[JsonObject]) -> None:
        """Log to one logger; drop it if it fails."""
        try:
            if rows:
                logger.log_generations(step, rows)
            logger.log(step, record)
        except Exception as error:
            log.warning("%s is off from step %d: %s: %s", type(logger).__name__, step, type(error).__name__, error)
            self.loggers.remove(logger)


def _flat(row: JsonObject) -> JsonObject:
    return {**row, "parts": json.dumps(row["parts"])}


def _open(name: str, info: RunInfo) -> list[Logger]:
    try:
        return [importlib.import_module(f"r1_cli.runs.track.loggers.{name}").open_logger(info)]
    except ImportError as error:
        log.warning("logger %s is off: %s (pip install %s)", name, error, name)
    except Exception as error:  # a service that is down, misconfigured or new must not cost a training run
        log.warning("logger %s is off: %s: %s", name, type(error).__name__, error)
    return []
