"""Pools over fake servers, with what is pushed to them, asked of them and expected."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from fake_vllm import END, FakeServer, answer, serving
from patience import eventually

from r1_rollout.lora import Adapter
from r1_rollout.sampling import sample_seed
from r1_rollout.types import Completion, SamplingParams
from r1_rollout.vllm.client import Endpoint
from r1_rollout.vllm.servers.pool import ServerPool
from r1_rollout.vllm.servers.pooled_server import Deadlines
from r1_rollout.vllm.servers.server import LocalServer
from r1_rollout.weights import BucketWriter, LocalWeights, Shapes, Weights

QUICK = Deadlines(stall=60.0, load=60.0, probe=0.01, recovery=120.0)
PARAMS = SamplingParams(max_tokens=6, n=2, seed=5)


def weights(count: int = 3) -> list[tuple[str, torch.Tensor]]:
    return [(f"w{i}", torch.full((4,), float(i))) for i in range(count)]


def weights_over_there(task: Callable[[Weights], Any]) -> Any:
    return task(weights(3))


def spread_over_there(*args: Any) -> Shapes:
    return LocalWeights(weights(3), 3).spread(*args)


class WeightsElsewhere:
    """A `WeightSource` whose tensors never leave a process of their own."""

    version = 3

    def names(self) -> Weights:
        return []

    def tensors(self) -> Weights:
        raise AssertionError("a tensor was asked for here")

    def run_with_weights(self, task: Callable[[Weights], Any]) -> Any:
        return self.call(weights_over_there, task)

    def spread(self, write: BucketWriter, max_bytes: int, dtype: torch.dtype | None) -> Shapes:
        shapes: Shapes = self.call(spread_over_there, write, max_bytes, dtype)
        return shapes

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            return process.submit(function, *args).result()


def prompts(count: int) -> list[Any]:
    return [
        SimpleNamespace(id=f"row {i}", token_ids=[5] * (1 + i % 7), model_inputs={}, position_ids=None)
        for i in range(count)
    ]


def expected(prompt: Any, params: SamplingParams = PARAMS) -> list[tuple[list[int], list[float]]]:
    return [answer(sample_seed(params.seed, prompt.id, 0), i, params.max_tokens)[:2] for i in range(params.n)]


def adapter() -> Adapter:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.default.weight"
    return Adapter(2, 4.0, ("q_proj",), [(name.format("A"), torch.ones(2, 8)), (name.format("B"), torch.ones(8, 2))])


def told(group: list[Completion]) -> list[tuple[list[int], list[float]]]:
    return [(one.token_ids.tolist(), one.logprobs.tolist()) for one in group]


class Pools:
    """Opens fake servers and pools over them, and closes everything."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack

    def open(
        self,
        *servers: FakeServer | LocalServer,
        deadlines: Deadlines = QUICK,
        max_attempts: int = 50,
        **options: Any,
    ) -> ServerPool:
        pool = ServerPool(
            [
                Endpoint(self.stack.enter_context(serving(one)), one.token) if isinstance(one, FakeServer) else one
                for one in servers
            ],
            end_token_ids={END},
            banned_token_ids={60},
            deadlines=deadlines,
            max_attempts=max_attempts,
            **options,
        )
        return self.stack.enter_context(pool)


def all_ready(pool: ServerPool) -> bool:
    return all(server.state == "ready" for server in pool._supervisor.servers)


def take(groups: Any, count: int) -> Any:
    for _ in range(count):
        yield next(groups)


def wait_for(condition: Any) -> None:
    assert eventually(condition), "waited in vain"
