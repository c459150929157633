"""MLflow, to the server in MLFLOW_TRACKING_URI or to files in the run's folder."""

import os
from typing import Any

from r1_cli.track.types import Record, RunInfo


class MlflowLogger:
    """One MLflow run."""

    def __init__(self, info: RunInfo) -> None:
        import mlflow

        mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{info.folder / 'mlflow.db'}")
        mlflow.set_experiment(info.project)
        mlflow.start_run(run_name=info.experiment)
        self._mlflow = mlflow

    def log(self, step: int, record: Record) -> None:
        self._mlflow.log_metrics(record, step=step)

    def log_generations(self, step: int, rows: list[dict[str, Any]]) -> None:
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        self._mlflow.log_table(columns, f"generations/step_{step}.json")

    def close(self) -> None:
        self._mlflow.end_run()


def open_logger(info: RunInfo) -> MlflowLogger:
    return MlflowLogger(info)
