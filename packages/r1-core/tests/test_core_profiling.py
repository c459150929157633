"""A profiling pass: what it measures, and that it changes no state."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from core_critics import make_critic, step_samples
from core_models import qwen2
from core_toy import Toy, memory_ending, samples
from torch import nn

from r1_core.learner import Learner
from r1_core.learner.adamw_bf16 import AdamWBF16
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.critic import give_value_head
from r1_core.learner.offload import Offload, distinct_storages
from r1_core.learner.optim import build_optimizer
from r1_core.learner.profiling import PassProfile, is_out_of_memory, merge_profiles, optimizer_bytes
from r1_core.objective import Objective

KL = Objective(kl_penalty="low_var_kl", kl_coef=0.1)


class Remembering(nn.Dropout):
    """Draws numbers, counts its tokens in a buffer, replaces another, and remembers its longest row."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.longest = 0
        self.register_buffer("tokens", torch.zeros(()))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.tokens += hidden.shape[1]
        self.last = hidden.detach()
        self.longest = max(self.longest, hidden.shape[1])
        return super().forward(hidden)


def learner_of(**more: object) -> Learner:
    models = [Toy() for _ in range(2)]
    for model in models:
        model.layers.append(Remembering())
    optimizer = build_optimizer(models[0].named_parameters(), lr=1e-2)
    batching = Batching(True, MicroLimit(1), MicroLimit(2))
    return Learner(models[0], optimizer, lambda step: 1.0, reference=models[1], batching=batching, **more)


def state_of(learner: Learner) -> dict[str, object]:
    """All that the next step depends on."""
    modules = [module for model in (learner.model, learner.reference) for module in model.modules()]
    return deepcopy(
        {
            "weights": learner.model.state_dict(),
            "optimizer": learner.optimizer.state_dict(),
            "gradients": [param.grad is None for param in learner.model.parameters()],
            "buffers": [dict(module._buffers) for module in modules],
            "longest": [getattr(module, "longest", 0) for module in modules],
            "random": torch.get_rng_state(),
            "batching": repr(learner.batching),
            "steps": (learner.step, learner.skipped_steps),
        }
    )


def assert_same(found: object, expected: object) -> None:
    """To the bit."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        assert_same(list(found.values()), list(expected.values()))
    elif isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("stepped", [False, True])
def test_a_profiling_pass_changes_no_state_even_if_it_fails(stepped: bool) -> None:
    learner = learner_of()
    given = learner.add_logprobs(samples())
    if stepped:
        learner.forward_backward(given, KL)
        learner.optim_step()
    before = state_of(learner)
    for objective in (KL, None):
        assert learner.profile_pass(given, objective, MicroLimit(tokens=40)).seconds > 0
    with memory_ending(learner.model.layers[0]), pytest.raises(torch.OutOfMemoryError):
        learner.profile_pass(given, KL, MicroLimit(2))
    assert_same(state_of(learner), before)


def test_states_that_are_away_are_away_again() -> None:
    learner = learner_of(offload=Offload(weights=True, optimizer=True, reference=True))
    given = learner.add_logprobs(samples())
    learner.forward_backward(given, KL)
    learner.optim_step()
    owners = learner.model, learner.reference, learner.optimizer
    learner._offloads.load(*owners)
    before = state_of(learner)
    learner.offload()
    assert not distinct_storages(learner.model.parameters())
    learner.profile_pass(given, KL, MicroLimit(3))
    learner.offload()
    assert not distinct_storages([*learner.model.parameters(), *learner.reference.parameters()])
    learner._offloads.load(*owners)
    assert_same(state_of(learner) | {"buffers": 0}, before | {"buffers": 0})


def test_nothing_remains_of_a_critics() -> None:
    steps = []
    for profiles in (False, True):
        model = qwen2(tied=True)
        give_value_head(model)
        critic = make_critic(model)
        given = [
            replace(sample, returns=torch.ones(len(sample.token_ids)))
            for sample in critic.add_values(step_samples("text"))
        ]
        for gradient in (True, False) if profiles else ():
            assert critic.profile_pass(given, MicroLimit(2), gradient=gradient).seconds > 0
        critic.forward_backward(given)
        steps.append([param.grad for param in critic.model.parameters()])
    assert all(map(torch.equal, *steps))


def test_new_micro_batch_limits_apply_to_the_next_pass() -> None:
    learner = learner_of()
    learner.set_micro_batch_limits(MicroLimit(5), MicroLimit(tokens=7))
    assert learner.batching == Batching(True, MicroLimit(5), MicroLimit(tokens=7))
    assert learner.describe().micro_batch == 5


def test_the_optimizers_states_are_counted_before_they_are_there() -> None:
    half = torch.bfloat16
    params = [
        nn.Parameter(torch.zeros(3, 4, dtype=half)),
        nn.Parameter(torch.zeros(5, dtype=half), requires_grad=False),
    ]
    assert optimizer_bytes(torch.optim.AdamW(params)) == (24, 48)
    assert optimizer_bytes(AdamWBF16(params, lr=0.1)) == (24, 72)


def test_of_ranks_the_slowest_and_the_fullest_count() -> None:
    assert merge_profiles([PassProfile(1.0, 5, 90), PassProfile(2.0, 4, 80)]) == PassProfile(2.0, 5, 80)
    assert merge_profiles([PassProfile(1.0, 5)]) == PassProfile(1.0, 5, None)


def test_the_end_of_memory_is_known_by_its_kinds() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(error.value)
    assert not is_out_of_memory(RuntimeError("shapes differ"))
