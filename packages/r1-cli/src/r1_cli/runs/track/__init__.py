"""Where a run's numbers and samples go: console, files, tensorboard, wandb and the like."""

from r1_cli.runs.track.tracker import Tracker
from r1_cli.runs.track.types import Generation, Logger, Record, RunInfo

__all__ = ["Generation", "Logger", "Record", "RunInfo", "Tracker"]
