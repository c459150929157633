"""A step's work in the driver around N stand-in ranks: seconds, messages and bytes."""

import gc
import tempfile
import time
from pathlib import Path

from driver import ANSWERS, PROMPT, Engine, make_run

from r1_cli.train import loop
from r1_cli.train.groups.stream_position import StreamPosition
from r1_cli.train.types import Position
from r1_core.filtering import KeepAll
from r1_core.kl_control import FixedKL
from r1_core.reward_shaping import RewardNormalizer
from scale_parts.ranks import StandInRanks

ROUNDS = 2


def measure(ranks: int, sequences: int, tokens: int) -> dict[str, float]:
    """Take steps of `sequences` of `tokens`; return the fastest one's seconds, and its messages and bytes."""
    group = StandInRanks(ranks, tokens=tokens - PROMPT)
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Engine(sequences // ANSWERS, tokens - PROMPT), group, Path(folder))
        at = Position(0, StreamPosition(), FixedKL(0.01), KeepAll(), RewardNormalizer())
        for _ in range(ROUNDS):
            group.traffic = type(group.traffic)()
            gc.collect()
            begun = time.process_time()
            loop.take_step(run, at)
            seconds.append(time.process_time() - begun)
    traffic = group.traffic
    return {
        "step processor s": min(seconds),
        "step messages": traffic.messages.total(),
        "step MB of requests": traffic.sent / 1e6,
        "step MB of results": traffic.returned / 1e6,
        "step MB stored": traffic.stored / 1e6,
        "describe kB": _describe_kb(ranks),
    }


def _describe_kb(ranks: int) -> float:
    """Return what the ranks return of their memory and their balance, once a step."""
    group = StandInRanks(ranks)
    group.call_all("call", "policy", "describe", None, {})
    return group.traffic.returned / 1e3
