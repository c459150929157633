"""What `r1 view` shows first of a run: its state, progress and gains, and what `r1 diagnose` finds."""

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath

import psutil

from r1_cli.runs.diagnose.answers import diagnose_run
from r1_cli.runs.diff import SECTIONS, differing
from r1_cli.runs.history import History, JsonObject, NoHistoryError, WindowMean, find_logs
from r1_cli.runs.processes import Process, newest_of, read_processes
from r1_cli.runs.reader import MANIFEST_FILE, SAMPLES, RunReader
from r1_cli.runs.report.chart import thin
from r1_cli.runs.report.page import SETTINGS, SFT_SETTINGS, describe_restart
from r1_cli.runs.report.validation import Measured, measure
from r1_cli.runs.track.view import RECENT, seconds_left, seconds_of

QUIET = 600.0  # seconds without a write after which a run without an end may have been killed
MOST_POINTS = 60  # of a small curve
LEAST = 6  # values from which means are compared rather than single ones
PHASES = 3  # of a process, the longest first
PAUSE = 10  # times what a summary took, before it is made anew
# The number that a run is about, and its validation: the first that is logged.
TRAINED = (("reward/overall", "reward", "up"), ("sft/nll", "loss", "down"), ("reward_loss", "loss", "down"))
VALIDATED = (("val/reward_score", "up"), ("val/nll", "down"), ("val/rewards/accuracies", "up"), ("val/accuracy", "up"))
OTHERS = (("timing_s/step", "seconds a step"), ("response_length/mean", "tokens an answer"))


def status(run: RunReader, recent: Sequence[float]) -> dict[str, str]:
    """Return {"state", "told"}: `waiting`, `live`, `finished`, `stopped` or `silent`, and the reason or "".

    A killed run cannot report its end. On this machine its process is gone; elsewhere it is `silent` after `QUIET`
    seconds, and three times the longest of the `recent` steps, without output.
    """
    if (written := _written(run)) is None:
        told = "nothing is written there yet" if run.path.is_dir() else "this folder does not exist yet"
        return {"state": "waiting", "told": told}
    starts = run.starts()
    last = starts[-1] if starts else {}
    if last.get("ended"):
        end = str(last.get("end"))
        return {"state": "finished", "told": ""} if end == "complete" else {"state": "stopped", "told": end}
    quiet = time.time() - written
    if (last.get("host") or {}).get("name") == platform.node() and not psutil.pid_exists(last.get("process") or 0):
        return {"state": "stopped", "told": "its process is gone without an end: it was killed, or out of memory"}
    if quiet > max([QUIET, *(3 * seconds for seconds in recent)]):
        why = "it may have been killed" if starts else "a log without r1's manifest does not tell how its run ended"
        return {"state": "silent", "told": f"nothing written for {quiet / 60:,.0f} minutes; {why}"}
    return {"state": "live", "told": ""}


def _written(run: RunReader) -> float | None:
    files = [*_log_of(run)[:1], run.path / MANIFEST_FILE, run.path / SAMPLES]
    return max((path.stat().st_mtime for path in files if path.exists()), default=None)


def _log_of(run: RunReader) -> list[Path]:
    try:
        return find_logs(run.path)
    except NoHistoryError:
        return []


class Overview:
    """The summary of a run, made anew when its log or manifest has grown, and not too often if that takes long."""

    def __init__(self, run: RunReader) -> None:
        self._path = run.path
        self._state: tuple[int, ...] = ()
        self._until = 0.0
        self._found: JsonObject = {}
        self._measured: dict[int, Measured] = {}

    def read(self) -> JsonObject:
        files = [*_log_of(RunReader(self._path)), self._path / MANIFEST_FILE]
        state = tuple(path.stat().st_mtime_ns if path.is_file() else 0 for path in files)
        if not self._found or (state != self._state and time.monotonic() > self._until):
            begin = time.monotonic()
            self._found, self._state = self._summary(RunReader(self._path)), state
            self._until = begin + (PAUSE + 1) * (time.monotonic() - begin)
        return self._found

    def _summary(self, run: RunReader) -> JsonObject:
        starts = run.starts()
        last = starts[-1] if starts else {}
        try:
            history, findings = run.history, diagnose_run(run)
            history = history if history.config else replace(history, config=last.get("config") or {})
        except NoHistoryError:
            history, findings = History(str(run.path), "r1", [], last.get("config") or {}), []
        step = int(history.steps[-1]["step"]) if history.steps else last.get("from_step", 0)
        plan = last.get("plan") or {}
        total = plan.get("steps") or history.setting("trainer.max_steps")
        seconds = [value for row in history.steps[-RECENT:] if "timing_s/step" in row for value in [seconds_of(row)]]
        return {
            "step": step,
            "total": total,
            "began": last.get("began"),
            "ended": last.get("ended"),
            "left": seconds_left(seconds, step, total) if isinstance(total, int) else None,
            "model": PurePath(str(history.setting("worker.actor.model.model_path") or "")).name,
            "algorithm": _algorithm(history),
            "rows": _rows(last, history),
            "gains": self._gains(run, history),
            "findings": [{"what": one.what, "evidence": one.evidence, "advised": one.advised} for one in findings],
            "records": len(history.steps),
            "facts": _facts(last, history),
        }

    def _gains(self, run: RunReader, history: History) -> list[JsonObject]:
        found = [gain(history, *one) for one in TRAINED if history.series(one[0])][:1]
        found += [self._validation(run, history, *one) for one in VALIDATED if history.series(one[0])][:1]
        return found + [gain(history, *one, "") for one in OTHERS if history.series(one[0])]

    def _validation(self, run: RunReader, history: History, name: str, better: str) -> JsonObject:
        """Return the first, last and best validation; of recorded answers with their 95 % intervals."""
        points = history.series(name)
        if name == "val/reward_score":
            new = [step for step in run.recorded_steps("validation") if step not in self._measured]
            self._measured |= {one.step: one for one in measure(run, new)}
            if self._measured:
                points = [(one.step, one.value) for _, one in sorted(self._measured.items())]
        ranked = sorted(points, key=lambda one: one[1], reverse=better == "up")
        first, now, best = (self._point(one) for one in (points[0], points[-1], ranked[0]))
        return _gain(name, "validation", better, first, now, best, points)

    def _point(self, point: tuple[int, float]) -> JsonObject:
        step, value = point
        one = self._measured.get(step)
        sure = {"low": one.low, "high": one.high} if one and one.value == value else {}
        return {"value": value, "from": step, "to": step, **sure}


def gain(history: History, name: str, label: str, better: str) -> JsonObject:
    """Return a number now and at the start: of many values, means of the last quarter and first eighth."""
    points = history.series(name)
    early, late = history.early(name), history.late(name)
    if len(points) < LEAST or early is None or late is None:
        first, now = ({"value": value, "from": step, "to": step} for step, value in (points[0], points[-1]))
        return _gain(name, label, better, first, now, None, points)
    return _gain(name, label, better, _window(early), _window(late), None, points)


def _gain(
    name: str, label: str, better: str, first: JsonObject, now: JsonObject, best: JsonObject | None,
    points: Sequence[tuple[float, float]],
) -> JsonObject:  # fmt: skip
    line = [list(point) for point in thin(points, MOST_POINTS)]
    return {
        "metric": name, "label": label, "better": better, "first": first, "now": now, "best": best, "line": line
    }  # fmt: skip


def _window(mean: WindowMean) -> JsonObject:
    return {"value": mean.mean, "from": mean.first, "to": mean.last}


def _tunes(history: History) -> bool:
    return bool(history.names("sft/")) or (bool(history.names("reward_loss")) and not history.names("reward/"))


def _algorithm(history: History) -> str:
    if _tunes(history):
        return str(history.setting("sft.loss") or "")
    teachers = (history.setting("worker.teacher.model.model_path"), history.setting("worker.teacher.urls"))
    if any(teachers) and not history.setting("algorithm.distillation.task_reward"):
        return "distillation"
    return str(history.setting("algorithm.adv_estimator") or "")


def _rows(start: JsonObject, history: History) -> list[JsonObject]:
    counts = (start.get("plan") or {}).get("rows") or {}
    names = list(start.get("rows") or ()) or [str(history.setting("data.train_files") or "")]
    return [{"name": PurePath(name).name, "count": counts.get(name)} for name in names if name]


def _facts(start: JsonObject, history: History) -> list[tuple[str, str]]:
    """Return (key, value) of the settings that a report shows, and the command, commit, machine and time of a start."""
    keys = SFT_SETTINGS if _tunes(history) else SETTINGS
    found = [(key, shown(value)) for key in keys if (value := history.setting(key)) is not None]
    git, host = start.get("git") or {}, start.get("host") or {}
    changed = ", with changes that were not committed" if git.get("changed") else ""
    devices = ", ".join(host.get("devices") or ())
    more = {
        "command": start.get("command"),
        "commit": f"{git['commit'][:12]}{changed}" if git.get("commit") else None,
        "machine": f"{host.get('processors')} processors, {devices}" if host.get("processors") else None,
        "began": start.get("began"),
    }
    return found + [(name, str(value)) for name, value in more.items() if value]


def differences(runs: Sequence[RunReader]) -> JsonObject:
    """Return by section what differs between runs: {"name", "values"} with a text for each run."""
    found: JsonObject = {"settings": []}
    sections = {"settings": [one.flat_settings() if _began(one) else {} for one in runs]}
    for name, section in SECTIONS.items():
        parts = [one.flat_start(name) for one in runs]
        found.setdefault(section, [])
        sections[f"{section}/{name}"] = parts if all(parts) else []
    for section, parts in sections.items():
        rows = [{"name": name, "values": [*map(shown, values)]} for name, values in differing(parts).items()]
        found[section.partition("/")[0]] += rows
    return found


def _began(run: RunReader) -> bool:
    try:
        return bool(run.history_or_start())
    except NoHistoryError:
        return False


def shown(value: object) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def process_table(run: RunReader) -> JsonObject:
    """Return {"processes", "restarts"}; no processes if the run has ended."""
    now = time.time()
    return {
        "processes": [_process_row(one, now) for one in newest_of(read_processes(run.path))],
        "restarts": [describe_restart(one["restart"]) for one in run.starts() if "restart" in one],
    }


def _process_row(process: Process, now: float) -> JsonObject:
    longest = sorted(process.seconds.items(), key=lambda one: -one[1])[:PHASES]
    return {
        "name": process.name,
        "host": process.host,
        "pid": process.pid,
        "state": process.state(now),
        "memory": process.memory,
        "device_memory": process.device_memory,
        "tokens": process.tokens,
        "phases": [[name, seconds] for name, seconds in longest],
        "heard": max(now - process.beat, 0.0),
        "restarts": process.restarts,
    }
