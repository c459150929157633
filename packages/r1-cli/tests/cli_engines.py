"""Engines behind a `RemoteEnginePool` without Ray: each in this process, asked by one caller at a time, by pickles."""

import pickle
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from cli_ranks import Stored, build
from core_models import qwen2

from r1_cli.cluster import rank as rank_module
from r1_cli.cluster.direct import DirectBackend
from r1_cli.cluster.engine import EngineHost
from r1_cli.cluster.engines import RemoteEnginePool
from r1_cli.cluster.rank import Rank
from r1_cli.cluster.weights import RankedWeights
from r1_cli.cluster.worker_group import ClusterError
from r1_core.learner.parallel import Parallel
from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.weight_checks import expected_checksums

END = 7


def build_engine(stack: ExitStack, *, max_sequences: int = 8) -> EmbeddedEngine:
    return EmbeddedEngine(qwen2(5), end_token_ids={END}, max_sequences=max_sequences)


@dataclass
class OneHost:
    """The `WorkerGroup` of one engine's process, which serves one call after the other."""

    host: EngineHost
    asked: list[str] = field(default_factory=list)
    dies_in: str = ""  # the verb
    turn: Any = field(default_factory=threading.Lock)

    def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        sent = pickle.dumps((args, kwargs), protocol=5)
        with self.turn:
            self.asked.append(verb)
            if verb == self.dies_in:
                raise ClusterError("engine-1 on 127.0.0.1 died in " + verb)
            arrived, named = pickle.loads(sent)
            return pickle.loads(pickle.dumps(getattr(self.host, verb)(*arrived, **named), protocol=5))

    def call_all(self, verb: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [self.call(verb, *args, **kwargs)]

    def put(self, value: Any) -> Stored:
        return Stored.put(value)

    @property
    def remote_caller(self) -> Any:
        HOSTS[id(self)] = self
        return partial(ask_host, id(self))

    @property
    def remote_put(self) -> Any:
        return Stored.put

    def close(self) -> None:
        self.host.close()


HOSTS: dict[int, OneHost] = {}  # that were asked from elsewhere


def ask_host(number: int, verb: str, *args: Any) -> Any:
    return HOSTS[number].call(verb, *args)


def hosts(count: int, **options: Any) -> list[OneHost]:
    return [OneHost(EngineHost(partial(build_engine, **options))) for _ in range(count)]


def as_set(
    members: list[OneHost],
    max_sequences: int = 8,
    dtype: torch.dtype | None = None,
    backend: DirectBackend | None = None,
    start: Any = None,
) -> RemoteEnginePool:
    named = [(f"engine-{number}", member) for number, member in enumerate(members)]
    return RemoteEnginePool(named, max_sequences=max_sequences, dtype=dtype, direct=backend, start=start)


def weights_reach_engines(dtype: torch.dtype | None) -> list[str]:
    """A case of `ranks`: two ranks hand their shards over to two engines of rank 0; return what went wrong.

    Rank 1 calls by itself what a driver would ask it.
    """
    rank_module.BUCKET = 20_000
    parallel = Parallel.join("cpu")
    rank = Rank(partial(build, "text", "KL"), parallel.rank, parallel.world)
    rank.learner, rank.objective = build("text", "KL", parallel)
    if parallel.rank > 0:
        rank.begin_weights(dtype)
        while rank.next_weights(None) is not None:
            pass
        for _ in rank.learner.weights():
            pass
        return []
    members = hosts(2)
    as_set(members, dtype=dtype).load_weights(
        RankedWeights(lambda verb, *args: getattr(rank, verb)(*args), Stored.put, 3)
    )
    whole = {name: tensor.clone() for name, tensor in rank.learner.weights()}
    kept = whole if dtype is None else {name: tensor.to(dtype) for name, tensor in whole.items()}
    expected = expected_checksums({name: tensor.float() for name, tensor in kept.items()}.items(), ["float32"])
    return [
        f"{number}: {name}"
        for number, member in enumerate(members)
        for name in (*member.host.compare(expected).differing, *member.host.compare(expected).unread)
    ]
