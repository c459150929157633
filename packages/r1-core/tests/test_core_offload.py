"""Offload: which bytes are on the device in which phase, and that no number changes by it."""

from dataclasses import replace

import pytest
import torch
from core_models import qwen2, text_samples
from core_ranks import offloaded_steps
from ranks import run

from r1_core.advantages import GRPO, assign
from r1_core.learner import Learner
from r1_core.learner import offload as offload_module
from r1_core.learner.offload import Offload, OffloadableTensors, bytes_on_device, slab_sizes, states_of, tensors_of
from r1_core.learner.optim import build_optimizer
from r1_core.objective import Objective

ALL = Offload(weights=True, optimizer=True, reference=True)


def build(offload: Offload | None, strategy: str = "adamw", seed: int = 0) -> Learner:
    dtype = torch.bfloat16 if strategy == "adamw_bf16" else torch.float32
    model, reference = qwen2(seed, tied=True).to(dtype), qwen2(1).to(dtype)
    optimizer = build_optimizer(model.named_parameters(), lr=1e-2, strategy=strategy)
    return Learner(model, optimizer, lambda step: 1.0, reference=reference, offload=offload)


def held(learner: Learner) -> tuple[bool, bool, bool]:
    """Whether weights, optimizer states and the reference have their bytes on the device."""
    assert learner.reference is not None
    owners = tensors_of(learner.model), states_of(learner.optimizer), tensors_of(learner.reference)
    weights, states, reference = map(bytes_on_device, owners)
    return weights > 0, states > 0, reference > 0


def step(learner: Learner) -> dict[str, float]:
    samples = assign(learner.add_logprobs(text_samples()), GRPO())
    return learner.forward_backward(samples, Objective(kl_penalty="low_var_kl", kl_coef=0.1)) | learner.optim_step()


def sample(learner: Learner) -> dict[str, torch.Tensor]:
    """Do what an engine does between two steps; return what it got."""
    taken = {name: tensor.clone() for name, tensor in learner.weights()}
    learner.offload()
    return taken


def test_in_each_phase_only_what_computes_is_on_the_device() -> None:
    learner = build(ALL)
    weights = bytes_on_device(tensors_of(learner.model))
    step(learner)
    assert held(learner) == (True, True, False)
    assert bytes_on_device(states_of(learner.optimizer)) >= 2 * sum(p.nbytes for p in learner.model.parameters())
    passing = learner.weights()
    next(passing)
    assert held(learner) == (True, False, False)
    learner.offload()
    assert held(learner) == (False, False, False)
    samples = learner.add_logprobs(text_samples())
    assert held(learner) == (True, False, False)
    learner.forward_backward(assign(samples, GRPO()), Objective())
    assert held(learner) == (True, False, False)
    learner.optim_step()
    assert held(learner) == (True, True, False)
    assert bytes_on_device(tensors_of(learner.model)) == weights


def test_without_offload_everything_stays() -> None:
    learner = build(None)
    step(learner)
    learner.offload()
    assert held(learner) == (True, True, True)


def test_the_reference_is_fetched_for_a_full_kl_in_the_update() -> None:
    learner = build(ALL)
    samples = assign(learner.add_logprobs(text_samples(), ["old_logprobs"]), GRPO())
    learner.offload()
    learner.forward_backward(samples, Objective(kl_penalty="full", kl_coef=0.1))
    assert held(learner) == (True, False, False)


@pytest.mark.parametrize("strategy", ["adamw", "adamw_bf16"])
def test_steps_and_a_resume_are_the_same_to_the_bit(strategy: str, tmp_path) -> None:
    staying, moving = build(None, strategy), build(ALL, strategy)
    for _ in range(2):
        expected, found = sample(staying), sample(moving)
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        assert step(staying) == step(moving)
    moving.offload()
    moving.save(tmp_path)  # asks for what is away
    resumed = build(replace(ALL, optimizer=False), strategy, seed=5)
    resumed.offload()
    resumed.load(tmp_path)
    assert step(staying) == step(moving) == step(resumed)
    expected, found, again = sample(staying), sample(moving), sample(resumed)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert all(torch.equal(expected[name], again[name]) for name in expected)


def test_rows_are_set_to_zero_and_back_while_the_weights_rest() -> None:
    learner = build(ALL)
    name, before = next((name, tensor.clone()) for name, tensor in learner.weights() if tensor.dim() == 2)
    learner.offload()
    learner.zero_weights({name: [0]})
    assert dict(learner.weights())[name][0].eq(0).all()
    learner.offload()
    learner.restore_weights()
    assert torch.equal(dict(learner.weights())[name], before)


@pytest.mark.parametrize("shard_size", [-1, 1])
def test_ranks_offload_their_shards_and_compute_the_same(shard_size: int) -> None:
    for share, staying, moving in run(offloaded_steps, shard_size):
        assert staying == moving
        assert share == (0, 0, 0)


# Of Qwen2.5-7B in float32: the embedding and the head, and each layer's matrices and vectors.
LAYER = [3584 * 3584] * 2 + [512 * 3584] * 2 + [18944 * 3584] * 3 + [3584] * 4 + [512] * 2
SIZES = [4 * count for count in [152064 * 3584] * 2 + LAYER * 28]


def test_host_memory_is_what_is_asked_where_torch_rounds_allocations_to_powers_of_two() -> None:
    total = sum(SIZES)
    assert sum(1 << (size - 1).bit_length() for size in SIZES) > 1.8 * total, "one allocation for each tensor"
    slabs = slab_sizes(total)
    assert all(size & (size - 1) == 0 for size in slabs)
    assert total <= sum(slabs) <= 1.01 * total
    assert slab_sizes(0) == []
    assert slab_sizes(1) == [1 << 20]


def test_tensors_that_cross_slabs_come_back_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_module, "SLAB", 64)
    monkeypatch.setattr(offload_module, "SMALLEST", 8)
    tensors = [torch.randn(3), torch.randn(2, 25), torch.arange(5), torch.randn(1)]
    kept = [tensor.clone() for tensor in tensors]
    movable = OffloadableTensors(lambda: tensors)
    for _ in range(2):
        movable.offload()
        assert bytes_on_device(tensors) == 0
        assert sum(map(len, movable._slabs)) < sum(tensor.nbytes for tensor in kept) + 8
        slabs = [slab.data_ptr() for slab in movable._slabs]
        movable.load()
        assert all(torch.equal(tensor, before) for tensor, before in zip(tensors, kept, strict=True))
    assert [slab.data_ptr() for slab in movable._slabs] == slabs, "allocated anew in the second round"
    tensors.append(torch.randn(100))
    movable.offload()
    movable.load()
    assert torch.equal(tensors[0], kept[0])
