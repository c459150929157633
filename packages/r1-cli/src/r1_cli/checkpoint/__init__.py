"""Checkpoints of a run: their folders, saving, stopping, and the file system that nodes share."""
