"""A worker process: `python -m r1_rewards.worker SOCKET PARENT` loads one reward and scores what it is sent.

It speaks JSON frames over the inherited socket. Whatever the reward prints goes to stderr.
"""

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from r1_rewards import frames
from r1_rewards.functions import load_function, score_samples
from r1_rewards.spec import RewardSpec, RewardSpecError

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Serve until the pool closes the socket; the first message is the reward, each later one a list of samples."""
    _die_with(parent)
    os.set_inheritable(descriptor, False)  # a child process of the reward must not keep the connection open
    connection = socket.socket(fileno=descriptor)
    setup = frames.receive(connection)
    spec = RewardSpec(setup["function"], Path(setup["path"]) if setup["path"] else None)
    try:
        function = load_function(spec, setup["kwargs"])
    except RewardSpecError as error:
        frames.send(connection, {"error": str(error)})
        return
    frames.send(connection, {"name": function.name, "batch": function.batch})
    while True:
        try:
            samples: list[dict[str, Any]] = frames.receive(connection)
        except EOFError:
            return
        frames.send(connection, score_samples(function, samples))


def _die_with(parent: int) -> None:
    """Ask Linux to kill this process when the parent's thread that started it ends (the pool keeps those threads)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
