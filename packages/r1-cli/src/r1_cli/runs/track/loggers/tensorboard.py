"""TensorBoard scalars and sample texts."""

from r1_cli.runs.history import JsonObject
from r1_cli.runs.track.types import Record, RunInfo


class TensorBoardLogger:
    """Event files under `tensorboard/` in the run's folder."""

    def __init__(self, info: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Steps after the checkpoint are run again; purging hides the first copies.
        purge = info.resumed_from + 1 if info.resumed_from else None
        self._writer = SummaryWriter(str(info.folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, record: Record) -> None:
        for key, value in record.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def log_generations(self, step: int, rows: list[JsonObject]) -> None:
        for row in rows:
            text = "\n\n".join(f"**{key}**: {value}" for key, value in row.items())
            self._writer.add_text(f"val/generations/{row['id']}", text, step)

    def close(self) -> None:
        self._writer.close()


def open_logger(info: RunInfo) -> TensorBoardLogger:
    return TensorBoardLogger(info)
