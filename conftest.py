"""Holds for every test: one thread a process, and the whole suite in two processes."""

import os

import pytest

# Read by torch when it is loaded, in this process and in all that tests start: models this small take longer with more.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many processes share the tests: two for the whole suite, none for files that are named."""
    return 2 if config.args_source is pytest.Config.ArgsSource.TESTPATHS else 0
