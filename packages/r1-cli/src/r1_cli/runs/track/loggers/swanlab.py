"""SwanLab, online with a key and in its offline mode without."""

import os

from r1_cli.runs.history import JsonObject
from r1_cli.runs.track.types import Record, RunInfo


class SwanlabLogger:
    def __init__(self, info: RunInfo) -> None:
        import swanlab

        mode = os.environ.get("SWANLAB_MODE") or ("cloud" if os.environ.get("SWANLAB_API_KEY") else "offline")
        self._swanlab = swanlab
        swanlab.init(
            project=info.project,
            experiment_name=info.experiment,
            config=info.config,
            mode=mode,
            logdir=str(info.folder / "swanlog"),
        )

    def log(self, step: int, record: Record) -> None:
        self._swanlab.log(record, step=step)

    def log_generations(self, step: int, rows: list[JsonObject]) -> None:
        texts = [self._swanlab.Text("\n".join(f"{k}: {v}" for k, v in row.items())) for row in rows]
        self._swanlab.log({"val/generations": texts}, step=step)

    def close(self) -> None:
        self._swanlab.finish()


def open_logger(info: RunInfo) -> SwanlabLogger:
    return SwanlabLogger(info)
