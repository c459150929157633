"""Where a run's numbers and samples go: console, files, tensorboard, wandb and the like."""

from r1_cli.track.tracker import Generation, Tracker

__all__ = ["Generation", "Tracker"]
