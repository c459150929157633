"""Holds for every test: one thread a process, because models this small take longer with more."""

import os

# Read by torch when it is loaded, in this process and in all that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
