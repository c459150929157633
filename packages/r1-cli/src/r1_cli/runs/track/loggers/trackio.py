"""Trackio, in its local folder (`trackio show`), or in the Space TRACKIO_SPACE_ID."""

import os

from r1_cli.runs.history import JsonObject
from r1_cli.runs.track.types import Record, RunInfo


class TrackioLogger:
    """One Trackio run; a resumed run continues its charts."""

    def __init__(self, info: RunInfo) -> None:
        import trackio

        self._trackio = trackio
        space = os.environ.get("TRACKIO_SPACE_ID")
        trackio.init(project=info.project, name=info.experiment, config=info.config, space_id=space, resume="allow")

    def log(self, step: int, record: Record) -> None:
        self._trackio.log(dict(record), step=step)

    def log_generations(self, step: int, rows: list[JsonObject]) -> None:
        columns = list(rows[0])
        table = self._trackio.Table(columns=columns, data=[[row[column] for column in columns] for row in rows])
        self._trackio.log({"val/generations": table}, step=step)

    def close(self) -> None:
        self._trackio.finish()


def open_logger(info: RunInfo) -> TrackioLogger:
    """Raises ImportError if trackio is not installed."""
    return TrackioLogger(info)
