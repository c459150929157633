"""Critics for tests, samples for them, and cases that ranks run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from core_models import in_float64, picture_samples, qwen2, qwen25_vl, reads_pack, text_samples, with_siblings
from core_ranks import ONE_BY_ONE, SHARING, Form
from core_sequences import Attending
from core_toy import Toy, samples
from ranks import patches
from torch import nn

from r1_core.advantages import GAE, assign
from r1_core.learner.critic import Critic, give_value_head
from r1_core.learner.optim import build_optimizer
from r1_core.learner.parallel import Parallel, Shard, find_blocks, shard_model
from r1_core.losses import ValueLoss
from r1_core.types import Sample

MODELS = {"text": lambda: qwen2(tied=True), "pictures": qwen25_vl}


def draw_head(head: nn.Linear) -> None:
    """Give a head weights of its own: one of zeros has nothing to say, and hands no gradient to what is below it."""
    torch.manual_seed(5)
    nn.init.normal_(head.weight)
    nn.init.normal_(head.bias)


def make_critic(
    model: nn.Module, parallel: Parallel | None = None, shard: Shard | None = None, **more: object
) -> Critic:
    """A critic of a model that has a value head."""
    if parallel is not None:
        assert parallel.mesh is not None
        shard_model(model, find_blocks(model), parallel.mesh, shard or Shard())
    optimizer = build_optimizer(model.named_parameters(), lr=1e-2)
    settings = {"batching": ONE_BY_ONE, "max_grad_norm": 0.1, "parallel": parallel, "device": torch.device("cpu")}
    return Critic(model, optimizer, lambda step: 1.0, **(settings | more))


def exact_critic(name: str = "text", parallel: Parallel | None = None, shard: Shard | None = None, **more) -> Critic:
    """One in float64. Ranks share prompts, one process does not unless it is told to."""
    patches.undo()
    model = reads_pack(MODELS[name]())
    more = ({} if parallel is None else {"batching": SHARING}) | more
    draw_head(give_value_head(model))
    fillers = picture_samples((1,), seed=9) if name == "pictures" else ()
    return make_critic(in_float64(model, patches), parallel, shard, fillers=fillers, **more)


def step_samples(name: str) -> list[Sample]:
    return with_siblings(text_samples() if name == "text" else picture_samples((0, 0, 2, 0, 0)))


def forecast(critic: Critic, given: list[Sample]) -> list[Sample]:
    """The samples with values, advantages and returns."""
    return assign(critic.add_values(given), GAE(0.9, 0.8))


Course = tuple[list[torch.Tensor], list[dict[str, float]], dict[str, torch.Tensor]]


def take_steps(critic: Critic, given: list[Sample]) -> Course:
    """Values before each of three steps, the steps' metrics, and the weights after them."""
    values, metrics = [], []
    for _ in range(3):
        given = forecast(critic, [replace(s, values=None, advantages=None, returns=None) for s in given])
        values.append(torch.cat([sample.values for sample in given]))
        metrics.append(critic.forward_backward(given) | critic.optim_step())
    weights = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in critic.model.named_parameters()}
    return values, metrics, {name: tensor.detach().clone() for name, tensor in weights.items()}


def assert_same_course(found: Course, expected: Course) -> None:
    """The same to the rounding of what crosses, which is float32."""
    for here, there in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(here, there, atol=1e-6, rtol=0)
    assert found[1] == [pytest.approx(metrics, abs=1e-9) for metrics in expected[1]]
    for name, tensor in expected[2].items():
        torch.testing.assert_close(found[2][name], tensor, atol=1e-9, rtol=0)


# --- cases ----------------------------------------------------------------------------------------------------------


class ToyCritic(Toy):
    """The toy with a value in place of a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 1)
        draw_head(self.head)


def learn(shard_size: int | None = None, aggregation: str = "token") -> Course:
    """Three steps of the toy; of one process without a `shard_size`."""
    parallel = None if shard_size is None else Parallel.join("cpu", shard_size=shard_size)
    critic = make_critic(ToyCritic().double(), parallel, aggregation=aggregation, loss=ValueLoss(0.1))
    given = [replace(sample, reward=float(i)) for i, sample in enumerate(samples())]
    return take_steps(critic, given)


class AttendingCritic(Attending):
    """The toy whose tokens look at one another, with a value in place of a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 1)
        draw_head(self.head)


def learn_together(actors: int | None = None, own: int = 1) -> Course:
    """Three steps of ranks of which `own` share a sequence of the critic's, and `actors` one of the actor's."""
    parallel = None if actors is None else Parallel.join("cpu", sequence_size=actors).with_sequence_size(own)
    critic = make_critic(AttendingCritic().double(), parallel)
    if own > 1:
        with pytest.raises(
            ValueError, match="padded micro-batches are not possible where ranks share sequences: use packed ones"
        ):
            critic.set_layout("padded")
    return take_steps(critic, [replace(sample, reward=float(i)) for i, sample in enumerate(samples())])


def learn_exactly(name: str, form: Form | None = None) -> Course:
    """Three steps of a Hugging Face model."""
    parallel = None if form is None else form.join()
    return take_steps(exact_critic(name, parallel, form and form.shard), step_samples(name))


def save_after_one(folder: Path) -> None:
    """A step on ranks, then a checkpoint."""
    critic = exact_critic("text", Parallel.join("cpu"))
    given = forecast(critic, step_samples("text"))
    critic.forward_backward(given)
    critic.optim_step()
    critic.save(folder)
