"""The worker side: `python -m r1_rewards.workers.worker SOCKET` loads one reward, then forks workers on request."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from r1_rewards.spec import RewardSpec
from r1_rewards.types import Failure, RewardSpecError
from r1_rewards.workers import frames
from r1_rewards.workers.forks import limit_processor_time, receive_setup, serve
from r1_rewards.workers.frames import Job
from r1_rewards.workers.functions import RewardFunction, load_function, score_samples


def main(descriptor: int) -> None:
    pool, setup = receive_setup(descriptor)
    spec = RewardSpec(setup["function"], Path(setup["path"]) if setup["path"] else None)
    try:
        function = load_function(spec, setup["kwargs"])
    except RewardSpecError as error:
        frames.send(pool, {"error": str(error)})
        return
    described = {"name": function.name, "batch": function.batch, "shape": function.shape, "wants": function.wants}
    serve(pool, described, setup["memory_mib"], lambda connection: score(connection, function))


def score(pool: socket.socket, function: RewardFunction) -> None:
    """Score jobs: {"samples": […], "whole": whether in one call, "cpu_seconds": for each sample}.

    Sends one message per sample, or one for a whole call.
    """
    worker = os.getpid()
    while True:
        try:
            job = frames.receive(pool)
            for message in _outcomes(job, function):
                if os.getpid() != worker:  # the reward forked, and came back twice
                    os._exit(0)
                frames.send(pool, message)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _outcomes(job: Job, function: RewardFunction) -> Iterator[object]:
    samples = job["samples"]
    if job["whole"]:
        found = score_samples(function, samples)
        yield frames.pack(found) if isinstance(found, Failure) else [frames.pack(outcome) for outcome in found]
        return
    for sample in samples:
        limit_processor_time(job["cpu_seconds"])
        found = score_samples(function, [sample])
        yield frames.pack(found if isinstance(found, Failure) else found[0])


if __name__ == "__main__":
    main(int(sys.argv[1]))
