"""MLflow, to the server in MLFLOW_TRACKING_URI or to files in the run's folder."""

import os
import posixpath
import re

from r1_cli.runs.history import JsonObject
from r1_cli.runs.track.types import Record, RunInfo

FORBIDDEN = re.compile(r"[^\w\-./: ]")  # in a metric's name, as MLflow checks it; a letter of any language is allowed


class MlflowLogger:
    def __init__(self, info: RunInfo) -> None:
        import mlflow

        server = os.environ.get("MLFLOW_TRACKING_URI")
        mlflow.set_tracking_uri(server or f"sqlite:///{(info.folder / 'mlflow.db').resolve()}")
        if not server and mlflow.get_experiment_by_name(info.project) is None:
            # Else tables would be written into `mlruns`, wherever the command was typed.
            mlflow.create_experiment(info.project, (info.folder / "mlflow").resolve().as_uri())
        mlflow.set_experiment(info.project)
        # Of MLflow's own, "the" run is one that the calling thread has begun, and records come from another.
        self._run_id = mlflow.start_run(run_name=info.experiment).info.run_id
        self._mlflow = mlflow

    def log(self, step: int, record: Record) -> None:
        metrics = {metric_name(name): value for name, value in record.items()}
        self._mlflow.log_metrics(metrics, step=step, run_id=self._run_id)

    def log_generations(self, step: int, rows: list[JsonObject]) -> None:
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        self._mlflow.log_table(columns, f"generations/step_{step}.json", run_id=self._run_id)

    def close(self) -> None:
        self._mlflow.end_run()


def metric_name(name: str) -> str:
    """Return a name that MLflow accepts. Example: `metric_name("val/avg@4") == "val/avg_at_4"`.

    MLflow reads a name as a path, so a data source's name must not lead elsewhere.
    """
    allowed = FORBIDDEN.sub("_", name.replace("@", "_at_"))
    return posixpath.normpath(allowed).lstrip("./")


def open_logger(info: RunInfo) -> MlflowLogger:
    """Raises ImportError if mlflow is not installed."""
    return MlflowLogger(info)
