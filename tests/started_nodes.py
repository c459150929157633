"""Two Ray nodes on this machine, started by the commands of docs/many-devices.md and stopped at the end."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from endtoend import QUICKSTART, ROOT
from patience import LONG

LINES = re.findall(
    r"^((?:export RAY_|ray start |r1 train .*trainer\.nnodes=2).*?) {2,}#",
    (ROOT / "docs/many-devices.md").read_text(),
    re.M,
)


class Nodes:
    """Two nodes of one Ray, the first of which is the head."""

    def __init__(self, folder: str) -> None:
        """Start nothing yet. The folder needs a short name, as sockets in it do."""
        export, head, other, train = LINES
        self._export = export.replace("A_LONG_RANDOM_WORD", os.urandom(16).hex())
        self._train = train.replace("config.yaml", QUICKSTART).replace("n_gpus_per_node=4", "n_gpus_per_node=1")
        # What tests in this process have set for clusters of their own is none of these machines' business.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "GLOO_"))}
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {**kept, "PATH": programs, "COLUMNS": "200", "RAY_TMPDIR": folder}
        self._environment |= {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        self._environment |= {"RAY_memory_monitor_refresh_ms": "0"}  # as conftest.py has it
        self._head, self._other = head.replace("6379", "0"), other  # a port that nobody else has

    def start(self) -> None:
        """Type the lines of both."""
        self._type(self._head)
        address = Path(self._environment["RAY_TMPDIR"], "ray/ray_current_cluster").read_text()
        self._type(self._other.replace("FIRST:6379", address))

    def _type(self, line: str) -> None:
        done = subprocess.run(
            ["bash", "-c", f"{self._export}; {line}"], env=self._environment, text=True, timeout=LONG,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout

    @contextmanager
    def train(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """A run of one rank on each node."""
        line = f"{self._export}; exec {self._train} {shlex.join(words)}"
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(["bash", "-c", line], cwd=ROOT, env=self._environment, text=True, **streams)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def processes(self) -> list[psutil.Process]:
        """All that has been started on the nodes, runs included."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it lived for a moment only, or is another user's
                if process.environ().get("RAY_TMPDIR") == self._environment["RAY_TMPDIR"]:
                    found.append(process)
        return found

    def actors(self) -> list[str]:
        """The titles of the runs' actors that are alive."""
        titles = []
        for process in self.processes():
            with suppress(psutil.Error):
                titles += re.findall(r"^ray::(?:learner|engine|media|machine)\b.*", " ".join(process.cmdline()))
        return titles

    def close(self) -> None:
        """End all processes of the nodes."""
        while left := self.processes():
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=LONG)


@contextmanager
def started_nodes() -> Iterator[Nodes]:
    """Two nodes for as long as the block lasts."""
    with TemporaryDirectory(prefix="r1-", ignore_cleanup_errors=True) as folder:
        nodes = Nodes(folder)
        try:
            nodes.start()
            yield nodes
        finally:
            nodes.close()
