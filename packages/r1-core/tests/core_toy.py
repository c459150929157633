"""A causal model without transformers, and cases over it: what ranks can be asked within seconds of their start."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.logprobs import compute_eager_logprobs
from r1_core.learner.optim import build_optimizer
from r1_core.learner.parallel import Parallel, Shard, find_blocks, full_tensor, shard_model
from r1_core.objective import Objective
from r1_core.types import LossInputs, LossOutput, Sample

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


def samples(count: int = 5) -> list[Sample]:
    """Of five, two ranks have one round in which one of them has none."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for i in range(count):
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


def build(shard_size: int | None, shard: str = "sharded", micro: int = 1, *, reference: bool = False) -> Learner:
    """A learner of one process without a `shard_size`; else of this rank."""
    models = [Toy().double() for _ in range(1 + reference)]
    parallel = None if shard_size is None else Parallel.join("cpu", shard_size=shard_size)
    for model in models if parallel is not None else ():
        shard_model(model, find_blocks(model), parallel.mesh, SHARDS[shard])
    if reference:
        with torch.no_grad():
            models[1].head.weight.mul_(0.5)
    return Learner(
        models[0], build_optimizer(models[0].named_parameters(), lr=1e-2), lambda step: 1.0,
        batching=Batching(True, MicroLimit(micro), MicroLimit(micro)), max_grad_norm=0.1, parallel=parallel,
        reference=models[1] if reference else None,
    )  # fmt: skip


def learn(shard_size: int | None = None, shard: str = "sharded") -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Metrics of three steps and the weights after them; of one process without a `shard_size`.

    Ranks profile a pass before each, which changes no state.
    """
    learner = build(shard_size, shard)
    metrics = []
    for _ in range(3):
        if shard_size is not None:
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


class MemoryEnds:
    """Lets the memory of one rank end once: in a call of a layer, or on the way back from it."""

    def __init__(self, layer: nn.Module, rank: int, call: int, *, backward: bool) -> None:
        self.left = call if dist.get_rank() == rank else -1
        self.backward, self.ended = backward, False
        self.handle = layer.register_forward_hook(self)

    def __call__(self, layer: nn.Module, inputs: object, output: torch.Tensor) -> None:
        if self.backward and not output.requires_grad:
            return
        self.left -= 1
        if self.left == 0 and self.backward:
            output.register_hook(self.end)
        elif self.left == 0:
            self.end(output)

    def end(self, gradient: torch.Tensor) -> None:
        self.ended = True
        raise torch.OutOfMemoryError("planted")


KL = Objective(kl_penalty="full", kl_coef=0.1)


def take_step(learner: Learner) -> dict[str, Any]:
    """Log-probs and entropies of a policy and a reference, and the metrics and the gradient of a step."""
    found = learner.compute_logprobs(samples(8), ["old_logprobs", "ref_logprobs", "full_kl"])
    metrics = learner.forward_backward(samples(8), KL)
    gradient = {name: full_tensor(param.grad) for name, param in learner.model.named_parameters()}
    learner.optimizer.zero_grad()
    return {"found": found, "metrics": metrics, "gradient": gradient}


# The layer, its call, whether on the way back, and the rank whose memory ends. A layer of the policy is called twice
# for log-probs and twice in the update; one of the reference also for the full KL.
ENDS = {
    "log-probs, second call": ("policy", 1, 2, False, 0),
    "reference, first call": ("reference", 0, 1, False, 1),
    "update": ("policy", 1, 3, False, 1),
    "update, second call": ("policy", 0, 4, False, 0),
    "update, the reference in it": ("reference", 1, 5, False, 1),
    "way back": ("policy", 1, 1, True, 0),
    "way back, second call": ("policy", 0, 2, True, 1),
}


def run_out_of_memory(shard_size: int, shard: str) -> dict[str, dict[str, Any]]:
    """What ranks compute if the memory of one ends."""
    learner, outcomes = build(shard_size, shard, 2, reference=True), {}
    for name, (owner, layer, call, backward, rank) in ENDS.items():
        model = learner.model if owner == "policy" else learner.reference
        ending = MemoryEnds(model.layers[layer], rank, call, backward=backward)
        outcomes[name] = take_step(learner) | {"ended": ending.ended}
        ending.handle.remove()
    ending = MemoryEnds(learner.model.layers[0], 1, 1, backward=True)
    learner.set_micro_batch_limits(MicroLimit(1), MicroLimit(1))
    with pytest.raises(torch.OutOfMemoryError) as error:
        learner.forward_backward(samples(8), KL)
    return outcomes | {"alone": {"error": str(error.value)}}


def skip_steps() -> list[tuple[dict[str, float], bool]]:
    """Steps in which one rank's loss, and then its gradient, is not finite, and one after them; what each changed."""
    learner, found = build(-1), []
    faulty = dist.get_rank() == 1
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    for fault in ("loss", "gradient", ""):
        objective = Endless() if faulty and fault == "loss" else Objective()
        handle = learner.model.layers[0].register_forward_hook(
            lambda *call, fault=fault: call[-1].register_hook(lambda grad: grad * torch.inf) and None
            if faulty and fault == "gradient" and call[-1].requires_grad
            else None
        )
        metrics = learner.forward_backward(samples(), objective) | learner.optim_step()
        handle.remove()
        same = all(torch.equal(tensor, before[name]) for name, tensor in learner.weights())
        found.append((metrics, same and not learner.optimizer.state))
    return found


class Endless(Objective):
    """Has an infinite loss with a finite gradient."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        found = super().__call__(inputs)
        return replace(found, loss=found.loss + torch.inf)


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
    learner = build(-1, shard)
    model = learner.model
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
