"""Weights from N stand-in ranks to N stand-in engines, with all proofs: messages, bytes, and the driver's seconds."""

import time
from typing import Any

from r1_cli.cluster.direct import DirectBackend, EngineWorkers
from r1_cli.cluster.rank_client import RankClient, RankedPolicy
from r1_cli.train.sampling.weight_check import CheckedGenerator, LearnerReference
from r1_rollout.probes import text_probes
from r1_rollout.transports.direct import GroupSender
from r1_rollout.types import Expected
from r1_rollout.weight_checks import TOLERANCE, Canary
from scale_parts.counted import Traffic, bytes_of
from scale_parts.engines import open_pool
from scale_parts.ranks import BUCKETS, StandInRanks, tensors_of_7b

RESPONSE = 24  # tokens of a probe's response


class StandInGroup:
    """A process group without processes."""

    init_info: dict[str, Any] = {"master_address": "127.0.0.1", "rank_offset": 1}  # noqa: RUF012

    def connect(self) -> None: ...
    def send(self, tensors: list[Any]) -> None: ...
    def destroy(self) -> None: ...


class SyncRanks(StandInRanks):
    """Ranks that have weights by name, and know their checksums."""

    def answer(self, verb: str, args: tuple[Any, ...], label: str) -> Any:
        if verb == "run_with_weights":
            sums = range(1 << 62, 1 << 63, 1 << 52)
            each = zip(tensors_of_7b().items(), sums[::2], sums[1::2], strict=False)
            return {name: Expected(shape[0], {"float32": a, "bfloat16": b}) for (name, shape), a, b in each}
        if verb == "send_weights":
            backend, engines, _ = args
            sender = GroupSender(EngineWorkers(engines.load(), backend.workers), StandInGroup(), self.buckets)
            sender.send()
        return super().answer(verb, args, label)

    def buckets(self) -> Any:
        import torch

        for number in range(BUCKETS):
            yield f"bucket-{number}", torch.empty(1 << 26, device="meta", dtype=torch.float32)


def measure(count: int, *, direct: bool) -> dict[str, float]:
    """Sync twice; return what the second took, which a step takes, too."""
    traffic = Traffic()
    ranks = SyncRanks(count, traffic, tokens=RESPONSE)
    policy = RankedPolicy(RankClient(ranks))
    backend = DirectBackend("nccl", 1) if direct else None
    probes = text_probes([*range(100, 1000)], longest_prompt=512, longest_response=RESPONSE, response=RESPONSE)
    canary = Canary(probes, probes, max(TOLERANCE.values()))
    pool = open_pool(count, traffic, direct=backend)
    engine = CheckedGenerator(pool, LearnerReference(policy), canary)
    for version in range(2):
        traffic.messages.clear()
        traffic.sent = traffic.returned = traffic.stored = 0
        begun = time.process_time()
        with engine.active(policy.source(version)):
            seconds = time.process_time() - begun
    form = "direct" if direct else "store"
    return {
        f"sync ({form}) messages": traffic.messages.total(),
        f"sync ({form}) MB through the driver": traffic.through_driver / 1e6,
        f"sync ({form}) processor s": seconds,
        f"sync ({form}) kB of checksums to an engine": bytes_of(ranks.answer("run_with_weights", (), "")) / 1e3,
    }
