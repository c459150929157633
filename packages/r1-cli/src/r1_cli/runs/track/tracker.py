"""Send log records to all configured loggers in the background."""

import importlib
import json
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from r1_cli.checkpoint.background import Background
from r1_cli.checkpoint.folders import CheckpointError
from r1_cli.runs.history import LOG_FILE, JsonObject
from r1_cli.runs.processes import last_seen
from r1_cli.runs.track.files import FileLogger
from r1_cli.runs.track.metrics_server import open_metrics, process_metrics, summarize
from r1_cli.runs.track.types import Generation, Logger, Record, RunInfo

if TYPE_CHECKING:
    from r1_cli.runs.track.console import ConsoleReporter

BEHIND = 64  # records that may wait to be written
CLOSING = 60.0  # seconds that the end of a run waits for a service

log = logging.getLogger("r1")


class Tracker:
    """All loggers of a run.

    The console shows a record at once. A thread writes records in order to the run's own files; one for each service
    sends them, and a service that is slow or down holds nothing up. Records that a full disk refuses wait in memory.
    """

    def __init__(self, names: Sequence[str], info: RunInfo, console: "ConsoleReporter") -> None:
        # These two are always there: resuming without gap or repeat is decided by what the files hold, and the console
        # knows by itself what to show where it was not asked for.
        self.files = FileLogger(info)
        self.console = console
        self.loggers: list[Logger] = [self.files, console]
        trainer = info.config.get("trainer", {})
        self.loggers += open_metrics(info.folder, trainer.get("metrics_host", ""), trainer.get("metrics_port"))
        for name in names:
            if name not in ("console", "file"):
                self.loggers += _open(name, info)
        self._services = [Service(one) for one in self.loggers if one not in (self.files, console)]
        self._thread = Background("r1-tracking", BEHIND)
        self._unwritten: deque[tuple[int, Record, Sequence[Generation]]] = deque()
        self._failure: Exception | None = None  # why the run's own files lack these

    def has(self, step: int) -> bool:
        """Whether this step's record was written, also by an earlier process."""
        return self.files.has(step)

    def log(self, step: int, record: Record, generations: Sequence[Generation] = ()) -> None:
        """Log one step's record and its responses.

        The run's own file receives all responses, other loggers the first of each validation prompt. Raises
        CheckpointError if too many earlier records could not be written to the run's own files.
        """
        if self._failure and (len(self._unwritten) >= BEHIND or not isinstance(self._failure, CheckpointError)):
            raise self._failure
        first = [_flat(asdict(one)) for one in generations if one.split == "val" and one.sample == 0]
        when, processes = last_seen()
        record = {**record, **process_metrics(processes, when)}
        if self.console in self.loggers:
            self.console.show(generations)
            if processes:
                self.console.show_processes(summarize(processes, when))
            self._log_to(self.console, step, record, first)
        for service in self._services:
            service.log(step, dict(record), first)
        self._thread.do(partial(self._write, step, dict(record), tuple(generations)))

    def flush(self) -> None:
        """Wait until all records are in the run's own files. Raises CheckpointError if one could not be written."""
        self._thread.do(self._write_waiting).result()
        if self._failure:
            raise self._failure

    def close(self) -> None:
        self._thread.do(self._write_waiting).result()
        self._thread.close()
        for logger in (self.files, self.console):
            logger.close()
        for service in self._services:
            service.close()

    def _write(self, step: int, record: Record, generations: Sequence[Generation]) -> None:
        self._unwritten.append((step, record, generations))
        self._write_waiting()

    def _write_waiting(self) -> None:
        """Write the records in order, up to the first that fails."""
        while self._unwritten:
            step, record, generations = self._unwritten[0]
            try:
                # Generations first: a step counts as written once its record is.
                if generations:
                    self.files.log_generations(step, [asdict(generation) for generation in generations])
                self.files.log(step, record)
            except Exception as error:  # is raised where the run can end
                if self._failure is None:
                    log.warning("%s; the log of step %d waits in memory, and the run goes on", error, step)
                self._failure = error
                return
            self._unwritten.popleft()
        if self._failure is not None:
            log.warning("the run's log is written again, with the steps that waited")
        self._failure = None

    def _log_to(self, logger: Logger, step: int, record: Record, rows: list[JsonObject]) -> None:
        """Log to one logger; drop it if it fails."""
        try:
            if rows:
                logger.log_generations(step, rows)
            logger.log(step, record)
        except Exception as error:
            log.warning("%s is off from step %d: %s: %s", type(logger).__name__, step, type(error).__name__, error)
            self.loggers.remove(logger)


class Service:
    """A logger in a thread of its own, which holds up neither a step nor another logger."""

    def __init__(self, logger: Logger) -> None:
        self._logger, self._name = logger, type(logger).__name__
        self._thread = Background(f"r1-{self._name}", BEHIND)
        self._off = False
        self._left_out = 0  # records, in a row

    def log(self, step: int, record: Record, rows: list[JsonObject]) -> None:
        """Send a record later; without waiting, leave it out if too many wait."""
        if self._off:
            return
        if self._thread.offer(partial(self._send, step, record, rows)) is not None:
            self._left_out = 0
            return
        if not self._left_out:
            log.warning(
                "%s has not answered for %d records: it gets none from step %d on until it does. %s has all of them",
                self._name, BEHIND, step, LOG_FILE,
            )  # fmt: skip
        self._left_out += 1

    def _send(self, step: int, record: Record, rows: list[JsonObject]) -> None:
        """Log, and end the service if it fails."""
        if self._off:
            return
        try:
            if rows:
                self._logger.log_generations(step, rows)
            self._logger.log(step, record)
        except Exception as error:
            log.warning("%s is off from step %d: %s: %s", self._name, step, type(error).__name__, error)
            self._off = True

    def close(self) -> None:
        """Wait for what is to be sent, for at most `CLOSING` seconds."""
        ended = self._thread.offer(self._logger.close, CLOSING)
        try:
            if ended is None:
                raise TimeoutError
            ended.result(CLOSING)
        except TimeoutError:
            log.warning("%s does not answer: its last records are not sent. %s has all", self._name, LOG_FILE)
        except Exception as error:
            log.warning("%s cannot be closed: %s: %s", self._name, type(error).__name__, error)
        else:
            self._thread.close()


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
