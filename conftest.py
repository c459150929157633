"""Holds for every test: one thread a process, the whole suite in three, and the same random numbers in every run."""

import gc
import os
import random
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import Any

import pytest
from hypothesis import settings

# Read by torch when it is loaded, in this process and in all that tests start: models this small take longer with more.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ray ends its actors when the whole machine's memory is nearly full, whoever uses it: a reason for no test to fail.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

# Without bytecode files, each of the hundreds of processes that tests start compiles torch and all it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A busy machine is no reason for a property to fail, nor is the day: what is tried is the same in every run.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")


gc.disable()  # until all is imported


def pytest_collection_finish() -> None:
    """Keep what was imported and the thousands of tests out of every later collection of garbage."""
    gc.enable()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seed(str(item.path.name))  # of fixtures that several tests of a module share
    if item.get_closest_marker("vllm") and find_spec("vllm"):
        inspect_models_here()


@cache
def inspect_models_here() -> None:
    """Let vLLM look at a model's class in this process; it would import itself in another one for each architecture.

    It does so because a look may initialize CUDA, which tests do not use.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")  # as an engine's import would
        registry: Any = import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    seed(item.nodeid)


def seed(name: str) -> None:
    """Start every generator that draws without being given one."""
    number = zlib.crc32(name.encode())
    random.seed(number)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add the faults that a test has made to its report, which the process that prints the summary gets."""
    report: Any = yield
    if (table := sys.modules.get("faults_table")) and report.when == "call":
        report.user_properties += [("fault", line) for line in table.TESTED]
        table.TESTED.clear()
    return report


@pytest.fixture(autouse=True)
def libraries_are_put_back() -> Iterator[None]:
    """What the cases of ranks change in libraries ends with the test that called them."""
    yield
    if ranks := sys.modules.get("ranks"):
        ranks.patches.undo()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many processes share the tests: three for the whole suite, none for files that are named.

    Three keep two cores busy, because tests often wait: for a process that starts, for a time limit to pass.
    """
    return 3 if config.args_source is pytest.Config.ArgsSource.TESTPATHS else 0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the faults that passed tests have made, and the modules that took longest."""
    print_faults(terminalreporter)
    print_slowest_modules(terminalreporter)


def print_faults(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the rows of the table in `docs/faults.md` that this run has made."""
    passed = terminalreporter.stats.get("passed", ())
    lines = {line: None for report in passed for name, line in report.user_properties if name == "fault"}
    if lines:
        terminalreporter.write_sep("=", f"{len(lines)} faults: fault | noticed | lost work | outcome")
        for line in lines:
            terminalreporter.write_line(line)


def print_slowest_modules(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the modules that took longest, in seconds of all phases of their tests."""
    seconds, reports = Counter[str](), chain.from_iterable(terminalreporter.stats.values())
    for report in (one for one in reports if isinstance(one, pytest.TestReport)):
        seconds[report.location[0]] += report.duration
    if len(seconds) > 1:
        terminalreporter.write_sep("=", "slowest modules")
        for module, total in seconds.most_common(30):
            terminalreporter.write_line(f"{total:7.1f}s {module}")
