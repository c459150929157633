"""Faults of a run's processes: notice them, record them, and start the run again."""
