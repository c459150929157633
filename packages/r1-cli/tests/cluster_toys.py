"""What the tests of actors let them hold; here, because an actor imports it by name."""

import os
import signal
import time
from typing import Any

import numpy as np


class Toy:
    """Answers, fails or ends as it is told."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        print(f"toy {rank} is made", flush=True)

    def about(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "folder": os.getcwd(),
            "title": open("/proc/self/cmdline").read().rstrip("\0"),
            "threads": os.environ["OMP_NUM_THREADS"],
            "gpus": os.environ["CUDA_VISIBLE_DEVICES"],
        }

    def total(self, column: Any) -> tuple[float, bool]:
        values = column.load()["x"]
        return float(values.sum()), bool(values.flags.writeable)

    def put_down(self, put: Any) -> Any:
        return put({"x": np.arange(10**6)})

    def fail(self, rank: int | None, kind: type[Exception], *args: str) -> None:
        """Raise such an error in one rank, for which the others wait, or in all."""
        if rank in (None, self.rank):
            raise kind(*args)
        time.sleep(600)

    def close(self) -> None:
        print(f"toy {self.rank} is closed", flush=True)

    def sleep(self) -> None:
        time.sleep(600)

    def stop(self, rank: int) -> None:
        """Stop one rank's process without ending it; the others answer."""
        if rank == self.rank:
            os.kill(os.getpid(), signal.SIGSTOP)

    def leave(self, rank: int) -> None:
        """End one rank's process; the others fail over it, as in a collective."""
        if rank == self.rank:
            os._exit(3)
        time.sleep(0.1)
        raise ConnectionError("closed by peer")


class LastingToy(Toy):
    """Lasts while its run starts again, and counts how often that was."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1

    def count(self) -> int:
        return self.resets


class Unpicklable(Exception):
    """An error that is another one after pickling."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")
