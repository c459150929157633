"""N engines that sample nothing: pool, dispatch and hosts are real; the engines take time and return fixed answers."""

import heapq
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from r1_cli.cluster.engine import EngineHost
from r1_cli.cluster.engines import RemoteEnginePool
from r1_rollout.probes import ProbePrompt
from r1_rollout.types import Comparison, Completion, Expected, PromptLike, SamplingParams
from r1_rollout.weights import DirectWeights
from scale_parts.counted import Kept, Traffic
from scale_parts.ranks import LOGPROB

SEQUENCES = 64  # that an engine decodes at once


class StandInEngine:
    """Reads all weights that it is sent, and waits as long as each prompt says."""

    precisions, keeps_layout = ("bfloat16",), True

    def __init__(self, answer: int) -> None:
        self.answer = np.zeros(answer, np.int32)
        self.seconds = 0.0  # of the groups that it has sampled

    @contextmanager
    def active(self, source: Any = None) -> Iterator[None]:
        if source is not None:
            self.load_weights(source)
        yield

    def load_weights(self, source: Any) -> None:
        for _ in source.calls() if isinstance(source, DirectWeights) else source.tensors():
            pass

    def compare(self, expected: Mapping[str, Expected]) -> Comparison:
        return Comparison({}, ())

    def logprobs_of(
        self, prompts: Sequence[Any], responses: Sequence[Sequence[int]], temperature: float
    ) -> list[list[float]]:
        return [[LOGPROB] * len(response) for response in responses]

    def generate(self, prompts: Sequence[PromptLike], params: SamplingParams) -> Iterator[tuple[int, Any]]:
        begun, running = 0, list[tuple[float, int]]()
        while begun < len(prompts) or running:
            while begun < len(prompts) and (len(running) + 1) * params.n <= SEQUENCES:
                heapq.heappush(running, (time.monotonic() + seconds_of(prompts[begun]), begun))
                begun += 1
            end, index = heapq.heappop(running)
            time.sleep(max(0.0, end - time.monotonic()))
            self.seconds += seconds_of(prompts[index])
            yield index, self.group(params.n)

    def group(self, count: int) -> list[Completion]:
        return [Completion(self.answer, self.answer.astype(np.float32), "stop", 0) for _ in range(count)]

    def open_session(self, params: SamplingParams) -> "StandInSession":
        return StandInSession(self)


@dataclass
class StandInSession:
    engine: StandInEngine
    steps: None = None
    prefilled: int = 0
    waiting: list[tuple[float, str, int]] = field(default_factory=list)

    def submit(self, key: str, prompt: PromptLike, *, n: int = 1, **kwargs: Any) -> None:
        heapq.heappush(self.waiting, (time.monotonic() + seconds_of(prompt), key, n))

    def poll(self, timeout: float) -> list[tuple[str, list[Completion]]]:
        due = min(time.monotonic() + timeout, self.waiting[0][0] if self.waiting else float("inf"))
        time.sleep(max(0.0, due - time.monotonic()))
        finished = []
        while self.waiting and self.waiting[0][0] <= time.monotonic():
            _, key, n = heapq.heappop(self.waiting)
            finished.append((key, self.engine.group(n)))
        return finished

    def cancel(self, key: str) -> None: ...
    def close(self) -> None: ...


@dataclass
class StandInProcess:
    """The `WorkerGroup` of one engine's process: a real `EngineHost`, called one call after the other."""

    traffic: Traffic
    answer: int = 1  # tokens
    payload: bytes = b""  # what makes a reference to this process as large as Ray's

    def __post_init__(self) -> None:
        self.engine = StandInEngine(self.answer)
        self.host = EngineHost(lambda stack: self.engine)
        self.turn = threading.Lock()

    def call(self, verb: str, *args: Any, label: str = "") -> Any:
        with self.turn:
            answer = getattr(self.host, verb)(*args)
        self.traffic.add(verb, args, [answer])
        return answer

    def call_all(self, verb: str, *args: Any, label: str = "") -> list[Any]:
        return [self.call(verb, *args)]

    def put(self, value: Any) -> Kept:
        return self.traffic.put(value)

    @property
    def remote_put(self) -> Any:
        return Kept

    @property
    def remote_caller(self) -> "Caller":
        return Caller(self, self.payload)

    def close(self) -> None:
        self.host.close()


@dataclass
class Caller:
    """A reference to an engine's process, by which rank 0 calls it past the driver."""

    process: StandInProcess | None
    payload: bytes

    def __call__(self, verb: str, *args: Any) -> Any:
        assert self.process is not None
        with self.process.turn:
            return getattr(self.process.host, verb)(*args)

    def __reduce__(self) -> tuple[type, tuple[None, bytes]]:
        return Caller, (None, self.payload)


def open_pool(count: int, traffic: Traffic, answer: int = 1, **options: Any) -> RemoteEnginePool:
    members = [(f"engine-{number}", StandInProcess(traffic, answer, bytes(1200))) for number in range(count)]
    return RemoteEnginePool(members, max_sequences=SEQUENCES, dtype=torch.bfloat16, **options)


def prompts_of(count: int, mean: float) -> list[PromptLike]:
    """Return prompts whose answers take a long-tailed time, which their ids end with."""
    draw = np.random.default_rng(0)
    times = draw.lognormal(0.0, 0.6, count)
    positions = torch.zeros(1, 1, dtype=torch.int64)
    return [
        ProbePrompt(f"{row} {time}", [*range(512)], positions)
        for row, time in enumerate((times / times.mean() * mean).tolist())
    ]


def seconds_of(prompt: PromptLike) -> float:
    return float(prompt.id.split()[1])
