"""AdamW in bfloat16 takes float32's path, is cut and resumed without a trace, and refuses other weights."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from core_models import qwen2, text_samples
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from r1_core.advantages import GRPO, assign
from r1_core.learner import Learner, adamw_bf16
from r1_core.learner.adamw_bf16 import AdamWBF16
from r1_core.learner.optim import build_optimizer
from r1_core.objective import Objective


def gradients(steps, size=512, seed=0):
    """Gradients [size] that pull every weight its own way, under noise; ten times smaller in the second half."""
    generator = torch.Generator().manual_seed(seed)
    pull = torch.randn(size, generator=generator) * 1e-2
    for step in range(steps):
        noise = torch.randn(size, generator=generator) * 1e-2
        yield ((pull + noise) * (1.0 if step < steps // 2 else 0.1)).bfloat16()


def start(size=512):
    return torch.randn(size, generator=torch.Generator().manual_seed(1)).bfloat16()


def descend(param, optimizer, steps):
    for gradient in gradients(steps):
        param.grad = gradient.to(param.dtype)
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize(("lr", "weight_decay"), [(1e-5, 0.0), (1e-6, 0.01), (1e-5, 1.0)])
def test_thousands_of_updates_too_small_for_bfloat16_add_up_as_in_float32(lr, weight_decay):
    steps, settings = 3000, {"lr": lr, "weight_decay": weight_decay}
    exact = nn.Parameter(start().float())
    moved = descend(exact, reference := torch.optim.AdamW([exact], **settings), steps) - start().float()
    naive = nn.Parameter(start())
    stuck = descend(naive, torch.optim.AdamW([naive], **settings), steps).float() - start().float()
    ours = nn.Parameter(start())
    descend(ours, optimizer := AdamWBF16([ours], **settings), steps)
    state = {name: tensor.float() for name, tensor in optimizer.state[ours].items()}
    path = ours.detach().float() - start().float() + state["compensation"]
    assert (stuck - moved).norm() > 0.9 * moved.norm()
    assert (path - moved).norm() < 0.05 * moved.norm()
    # What shows is the path to bfloat16's 8 digits.
    assert (ours - exact).abs().le(2**-8 * exact.abs() + 5e-4).all()
    expected = reference.state[exact]
    for name, tolerance in (("exp_avg", 0.02), ("exp_avg_sq", 0.05)):
        assert (state[name] - expected[name]).norm() < tolerance * expected[name].norm()


def test_everything_kept_is_bfloat16_but_the_count():
    param = nn.Parameter(start())
    descend(param, optimizer := AdamWBF16([param], lr=1e-3), 2)
    state = optimizer.state[param]
    assert param.dtype == torch.bfloat16
    assert {name: tensor.dtype for name, tensor in state.items() if name != "step"} == dict.fromkeys(
        ("exp_avg", "exp_avg_sq", "compensation"), torch.bfloat16
    )
    assert state["step"] == 2


def test_rounding_is_right_on_average_and_leaves_bfloat16_numbers_alone():
    values = torch.tensor([1.001, -1.001, 3e-5, -0.3333, 1e-30])
    rounded = torch.stack([adamw_bf16._round(values.clone(), step) for step in range(4096)])
    assert torch.equal(rounded, rounded.bfloat16().float())
    torch.testing.assert_close(rounded.double().mean(0).float(), values, rtol=5e-6, atol=0)
    exact = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-130, torch.inf, -torch.inf])
    assert all(torch.equal(adamw_bf16._round(exact.clone(), step), exact) for step in range(9))


@pytest.mark.parametrize("shape", [(512,), (8, 64), (64, 8), (4, 4, 32)])
def test_chunks_do_not_change_a_bit(shape, monkeypatch):
    results = []
    for chunk in (1 << 24, 100, 1):
        monkeypatch.setattr(adamw_bf16, "CHUNK", chunk)
        param = nn.Parameter(start().view(shape))
        optimizer = AdamWBF16([param], lr=1e-3)
        for gradient in gradients(3):
            param.grad = gradient.view(shape)
            optimizer.step()
        results.append(param.detach())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_number_and_an_empty_shard_are_weights_too():
    params = [nn.Parameter(torch.tensor(1.0).bfloat16()), nn.Parameter(torch.zeros(0, 8).bfloat16())]
    for param in params:
        param.grad = torch.ones_like(param)
    AdamWBF16(params, lr=0.5, weight_decay=0.0).step()
    assert params[0] == 0.5


def test_a_sharded_weight_takes_the_steps_of_a_whole_one(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = nn.Parameter(start())
        sharded = nn.Parameter(distribute_tensor(start(), mesh, [Shard(0)]))
        optimizers = AdamWBF16([whole], lr=1e-3), AdamWBF16([sharded], lr=1e-3)
        for gradient in gradients(5):
            whole.grad, sharded.grad = gradient, distribute_tensor(gradient, mesh, [Shard(0)])
            for optimizer in optimizers:
                optimizer.step()
        states = optimizers[0].state[whole], optimizers[1].state[sharded]
        assert torch.equal(sharded.full_tensor(), whole)
        for name in adamw_bf16.STATES:
            assert isinstance(states[1][name], DTensor)
            assert torch.equal(states[1][name].full_tensor(), states[0][name])
    finally:
        dist.destroy_process_group()


def learner_for(seed=0):
    model = qwen2(seed).bfloat16()
    optimizer = build_optimizer(model.named_parameters(), lr=1e-3, strategy="adamw_bf16")
    return Learner(model, optimizer, lambda step: 1.0)


def step(learner, seed):
    samples = assign(learner.add_logprobs(text_samples(seed=seed)), GRPO())
    return {**learner.forward_backward(samples, Objective()), **learner.optim_step()}


def test_loading_goes_on_to_the_bit(tmp_path: Path):
    learner = learner_for()
    for seed in (1, 2):
        step(learner, seed)
    learner.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | load_file(tmp_path / "optimizer.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert any(tensor.any() for name, tensor in tensors.items() if name.startswith("compensation."))
    resumed = learner_for(seed=9)
    resumed.load(tmp_path)
    assert step(resumed, 3) == step(learner, 3)
    assert all(torch.equal(tensor, dict(resumed.weights())[name]) for name, tensor in learner.weights())
    for ours, theirs in zip(resumed.optimizer.state.values(), learner.optimizer.state.values(), strict=True):
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_weights_that_are_not_bfloat16_are_refused_by_name():
    model = qwen2().bfloat16()
    model.lm_head.float()
    with pytest.raises(ValueError, match=r"'lm_head\.weight' is torch\.float32"):
        build_optimizer(model.named_parameters(), lr=1e-3, strategy="adamw_bf16")
    with pytest.raises(ValueError, match=r"one of shape \[64, 16\] is torch\.float32"):
        AdamWBF16(model.parameters(), lr=1e-3)
    model.lm_head.requires_grad_(False)
    build_optimizer(model.named_parameters(), lr=1e-3, strategy="adamw_bf16")
