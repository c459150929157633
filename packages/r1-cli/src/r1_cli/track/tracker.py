"""One tracker for a run: passes each record to every logger that the configuration names."""

import importlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from r1_cli.track.files import FileLogger
from r1_cli.track.types import Console, Generation, Logger, Record, RunInfo

log = logging.getLogger("r1")


class Tracker:
    """All loggers of a run behind one."""

    def __init__(self, names: Sequence[str], info: RunInfo, console: Console) -> None:
        # These two are always there: resuming without gap or repeat is decided by what the files hold, and the console
        # knows by itself what to show where it was not asked for.
        self.files = FileLogger(info)
        self.console = console
        self.loggers: list[Logger] = [self.files, console]
        for name in names:
            if name not in ("console", "file"):
                self.loggers += _open(name, info)

    def has(self, step: int) -> bool:
        """Whether this step's record was already written, by this process or one before it."""
        return self.files.has(step)

    def stage(self, name: str) -> None:
        """Show what a step has come to; see `Stopwatch`."""
        self.console.stage(name)

    def log(self, step: int, record: Record, generations: Sequence[Generation] = ()) -> None:
        """Write one step's record, and responses that belong to it.

        The run's own file gets them all; other loggers the first to each prompt of the validation set.
        """
        rows = [asdict(generation) for generation in generations]
        first = [_flat(row) for row in rows if row["split"] == "val" and row["sample"] == 0]
        for logger in list(self.loggers):
            try:
                # Generations first: a step counts as written once its record is.
                shown = rows if logger is self.files else first
                if shown:
                    logger.log_generations(step, shown)
                logger.log(step, record)
            except Exception as error:  # a service that went away must not cost the run; our own files must work
                if logger is self.files:
                    raise
                log.warning("%s is off from step %d: %s: %s", type(logger).__name__, step, type(error).__name__, error)
                self.loggers.remove(logger)

    def close(self) -> None:
        for logger in self.loggers:
            logger.close()


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return a response's columns for a table whose cells are text or numbers."""
    return {**row, "parts": json.dumps(row["parts"])}


def _open(name: str, info: RunInfo) -> list[Logger]:
    """Import the service's module, which has `open_logger(info) -> Logger`, now that it is asked for."""
    try:
        return [importlib.import_module(f"r1_cli.track.loggers.{name}").open_logger(info)]
    except ImportError as error:
        log.warning("logger %s is off: %s (pip install %s)", name, error, name)
    except Exception as error:  # a service that is down, misconfigured or new must not cost a training run
        log.warning("logger %s is off: %s: %s", name, type(error).__name__, error)
    return []
