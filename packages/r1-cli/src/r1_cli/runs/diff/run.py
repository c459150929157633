"""One run as its folder tells it: numbers, settings and starts, as far as they are there."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r1_cli.config.section import flatten
from r1_cli.runs.diagnose.history import History, NoHistoryError, read_history
from r1_cli.runs.record.manifest import read_manifest


@dataclass(frozen=True, slots=True)
class Run:
    """A run's numbers by step, and each of its starts, the first one first."""

    history: History
    starts: list[dict[str, Any]]

    def known(self, name: str) -> dict[str, Any]:
        """Return what the last start says under a name, in one level of dotted keys; empty where it says nothing."""
        found = self.starts[-1].get(name) if self.starts else None
        if found is None:
            return {}
        return dict(flatten(found)) if isinstance(found, Mapping) else {name: found}

    def settings(self) -> dict[str, Any]:
        """Return the resolved settings by their dotted keys; empty where none are recorded."""
        return dict(flatten(self.history.config)) or self.known("config")


def read_run(path: Path) -> Run:
    """Read a run's folder, its log, or TRL's `trainer_state.json`. One that has not taken a step yet has no numbers.

    Raises:
        NoHistoryError: it holds neither numbers nor a manifest; names what was looked for.
    """
    starts = [one for one in read_manifest(path) if isinstance(one, dict)] if path.is_dir() else []
    try:
        return Run(read_history(path), starts)
    except NoHistoryError:
        if not starts:
            raise
        return Run(History(str(path), "r1", [], starts[-1].get("config") or {}, path), starts)
