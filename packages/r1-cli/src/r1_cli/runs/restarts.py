"""How often a run starts again by itself, counted in a file of its folder, and what each restart has cost."""

import json
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r1_cli.checkpoint.damage import STATE_FILE
from r1_cli.config.trainer import TrainerConfig
from r1_cli.faults.stacks import FOLDER
from r1_cli.faults.supervisor import supervised
from r1_cli.runs.reader import RunReader
from r1_cli.runs.track.files import JsonLines

log = logging.getLogger("r1")

RESTARTS_FILE = "restarts.jsonl"  # in the folder of faults
FIRST_DELAY, LONGEST_DELAY = 10.0, 300.0  # seconds before the second restart, which double with each further one


@dataclass(frozen=True, slots=True)
class Restart:
    """A start of the run by itself, after a fault."""

    number: int  # within the window, from 1
    cause: str
    step: int  # that was being taken
    noticed: float  # `time.time()`
    phases: dict[str, float] = field(default_factory=dict, compare=False)  # seconds after it was noticed, by their ends

    def end_phase(self, name: str) -> None:
        self.phases[name] = round(time.time() - self.noticed, 1)

    def describe(self, run: Path, start: Path | None, began: float) -> dict[str, Any]:
        """Return the manifest's entry of this restart, which has just been opened from the checkpoint `start`.

        Args:
            began: when the start before began; what it did up to its last checkpoint is not lost.
        """
        saved = (start / STATE_FILE).stat().st_mtime if start else 0.0
        resumed = int(start.name.rpartition("_")[2]) if start else 0
        now = time.time()
        return {
            "number": self.number,
            "cause": self.cause,
            "step": self.step,
            "steps_again": max(self.step - 1 - resumed, 0),
            "seconds_to_restart": round(now - self.noticed, 1),
            "ends_of_phases": self.phases,
            "seconds_lost": round(now - max(saved, began), 1),
        }


class Restarts:
    """Decides whether a run starts again, and waits before it does.

    The file counts the restarts of all processes that the user's command has had. The first restart of a window is
    immediate; before the second the run waits 10 seconds, and twice as long before each further one.
    """

    def __init__(self, trainer: TrainerConfig, run: Path) -> None:
        self.trainer, self.run = trainer, run
        self.began = supervised.began  # when the user typed the command
        self.begun = supervised.death is not None  # whether this run has trained: an error at its start is the user's
        self._last: tuple[int, str] | None = None  # step and kind of the last error

    def allow(self, cause: str, kind: str, *, noticed: float | None = None, repeats: bool = True) -> Restart | None:
        """Return the restart after a fault, which is then counted; None if the run is to end.

        Args:
            kind: of the fault; with `repeats` false, the same kind at the same step twice in a row ends the run.
            noticed: when; None: now.
        """
        noticed, step = time.time() if noticed is None else noticed, last_step(self.run) + 1
        again, self._last = self._last == (step, kind), (step, kind)
        if not self.begun or not self.trainer.max_restarts or (again and not repeats):
            return None
        file = JsonLines(self.run / FOLDER / RESTARTS_FILE)
        since = max(self.began, noticed - self.trainer.restart_window)
        number = 1 + sum(since <= one["time"] for one in file.read())
        if number > self.trainer.max_restarts:
            log.error(
                "%s\nThis was fault %d within trainer.restart_window=%g s, and trainer.max_restarts=%d: the run ends",
                cause, number, self.trainer.restart_window, self.trainer.max_restarts,
            )  # fmt: skip
            return None
        file.append([{"time": noticed, "step": step, "kind": kind, "cause": cause}])
        delay = 0.0 if number == 1 else min(FIRST_DELAY * 2 ** (number - 2), LONGEST_DELAY)
        wait = f" in {delay:.0f} s" if delay else ""
        log.warning(
            "fault at step %d: %s\nThe run starts again%s from its newest checkpoint (restart %d of at most %d)",
            step, cause, wait, number, self.trainer.max_restarts,
        )  # fmt: skip
        time.sleep(delay)
        return Restart(number, cause, step, noticed)

    def after_death(self) -> Restart | None:
        """Return the restart of a run whose process was killed, which the parent has started again; else None.

        Raises SystemExit if it was killed too often.
        """
        cause, supervised.death = supervised.death, None
        if cause is None:
            return None
        restart = self.allow(cause, "killed", noticed=supervised.died)
        if restart is None:
            raise SystemExit(1)
        return restart

    def begin(self) -> None:
        """Say that the run trains. A fault after this call starts it again."""
        self.begun = True
        if self.trainer.max_restarts:
            supervised.arm()


def last_step(run: Path) -> int:
    """Return the last logged step of a run, 0 without one."""
    with suppress(OSError, ValueError, IndexError, KeyError):
        return int(json.loads((run / "experiment_log.jsonl").read_text().splitlines()[-1])["step"])
    return 0


def began_before(run: Path) -> float:
    """Return when the last start of the manifest began, by `time.time`; 0.0 without one."""
    from datetime import datetime

    starts = RunReader(run).starts()
    return datetime.fromisoformat(starts[-1]["began"]).timestamp() if starts else 0.0
