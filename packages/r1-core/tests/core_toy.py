"""A causal model without transformers, and cases over it: what ranks can be asked within seconds of their start."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.logprobs import compute_eager_logprobs
from r1_core.learner.optim import build_optimizer
from r1_core.learner.parallel import Parallel, Shard, find_blocks, shard_model
from r1_core.objective import Objective
from r1_core.types import Sample

SHARDS = {"sharded": Shard(), "whole until backward": Shard(reshard=False), "offloaded": Shard(offload=True)}


class Layer(nn.Linear):
    """Mixes a token's own numbers."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + super().forward(hidden).tanh()


class Toy(nn.Module):
    """Predicts a token from the one before it."""

    _no_split_modules = ("Layer",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.Sequential(Layer(6, 6), Layer(6, 6))
        self.head = nn.Linear(6, 11, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.head(self.layers(self.embedding(input_ids))))


def samples() -> list[Sample]:
    """Five, so that two ranks have one round in which one of them has none."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for i in range(5):
        length = 4 + 2 * i
        advantages = torch.randn((), generator=generator).expand(length)
        old = -torch.rand(length, generator=generator)
        made.append(
            Sample(
                torch.randint(0, 11, (length,), generator=generator), torch.arange(length) >= 2,
                torch.arange(length)[None], group_id=0, reward=0.0, advantages=advantages, old_logprobs=old,
            )
        )  # fmt: skip
    return made


def learn(shard_size: int | None = None, shard: str = "sharded") -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Metrics of three steps and the weights after them; of one process without a `shard_size`.

    Ranks profile a pass before each, which changes no state.
    """
    model, parallel = Toy().double(), None
    if shard_size is not None:
        parallel = Parallel.join("cpu", shard_size=shard_size)
        assert parallel.mesh is not None
        shard_model(model, find_blocks(model), parallel.mesh, SHARDS[shard])
    optimizer = build_optimizer(model.named_parameters(), lr=1e-2)
    learner = Learner(
        model, optimizer, lambda step: 1.0, batching=Batching(True, MicroLimit(1)), max_grad_norm=0.1,
        parallel=parallel,
    )  # fmt: skip
    metrics = []
    for _ in range(3):
        if parallel is not None:
            profile(learner)
        metrics.append(learner.forward_backward(samples(), Objective()) | learner.optim_step())
    return metrics, {name: tensor.clone() for name, tensor in learner.weights()}


def profile(learner: Learner) -> None:
    """A pass that comes to its end, and one whose memory ends on the way back."""
    assert learner.profile_pass(samples(), Objective(), MicroLimit(2)).seconds > 0
    with memory_ending(learner.model.layers[0]), pytest.raises(torch.OutOfMemoryError):
        learner.profile_pass(samples(), Objective(), MicroLimit(1))


@contextmanager
def memory_ending(layer: nn.Module) -> Iterator[None]:
    """No room for what the layer's backward pass takes."""

    def end(gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError

    handle = layer.register_forward_hook(lambda *call: call[-1].register_hook(end) and None)
    yield
    handle.remove()


class NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this layer has no gradient")


def alone() -> list[list[float]]:
    """The log-probs that one process computes of each sample."""
    return compute_eager_logprobs(Toy().double(), samples())


def probe_gradient(shard: str) -> tuple[list[list[float]], bool, str]:
    """Eager log-probs of a sharded model, whether its gradients stayed as they were, and the fault of another."""
    model, parallel = Toy().double(), Parallel.join("cpu", shard_size=-1)
    assert parallel.mesh is not None
    shard_model(model, find_blocks(model), parallel.mesh, SHARDS[shard])
    learner = Learner(
        model, build_optimizer(model.named_parameters(), lr=1e-2), lambda step: 1.0, parallel=parallel,
        batching=Batching(True, MicroLimit(1)),
    )  # fmt: skip
    found = learner.compute_eager_logprobs(samples())
    unset = all(parameter.grad is None for parameter in model.parameters())
    learner.forward_backward(samples(), Objective())
    before = [parameter.grad for parameter in model.parameters()]
    learner.compute_eager_logprobs(samples())
    kept = unset and all(parameter.grad is own for parameter, own in zip(model.parameters(), before, strict=True))
    handle = model.layers[0].register_forward_hook(lambda *call: NoWayBack.apply(call[-1]))
    with pytest.raises(RuntimeError) as error:
        learner.compute_eager_logprobs(samples())
    handle.remove()
    return found, kept, str(error.value)


def describe(shard_size: int, seconds: float) -> dict[str, Any]:
    """What a rank is told of itself and of its mesh, and a sum over all ranks."""
    parallel = Parallel.join("cpu", shard_size=shard_size, timeout=timedelta(seconds=seconds))
    mesh = parallel.mesh
    assert mesh is not None
    parallel.barrier()
    backends = [mesh.get_group(dim)._get_backend(torch.device("cpu")) for dim in range(mesh.ndim)]
    return {
        "data": (parallel.data_rank, parallel.data_world),
        "sizes": dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)),
        "sum": parallel.sum(torch.tensor([float(parallel.rank + 1)])).item(),
        "timeouts": {backend.options._timeout.total_seconds() for backend in backends},
    }


def refusal(shard_size: int) -> str:
    """What is said to a size that does not fit."""
    with pytest.raises(ValueError, match="cannot form shards") as error:
        Parallel.join("cpu", shard_size=shard_size)
    return str(error.value)
