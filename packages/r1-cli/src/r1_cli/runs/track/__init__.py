"""Log a run's numbers and samples to the console, files, tensorboard, wandb and others."""

from r1_cli.runs.track.tracker import Tracker
from r1_cli.runs.track.types import Generation, Logger, Record, RunInfo

__all__ = ["Generation", "Logger", "Record", "RunInfo", "Tracker"]
