"""Gradients of bfloat16 weights add up over micro-batches as if they were float32, and round once."""

from dataclasses import replace

import torch
import torch.distributed as dist
from core_models import qwen2, text_samples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.optim import build_optimizer
from r1_core.learner.passes import GradientSums
from r1_core.objective import Objective
from r1_core.types import LossOutput

ONE_ROUNDING = 2.0**-8  # of the value: half the distance of two neighbours in bfloat16


class TotalLogprob(Objective):
    token_wise = False

    def __call__(self, inputs):
        return LossOutput(torch.where(inputs.loss_mask, inputs.logprobs, 0.0).sum())


def ready(samples):
    """Samples with log-probs and advantages, at which the loss of this test does not look."""
    zeros = [torch.zeros(len(sample.token_ids)) for sample in samples]
    return [replace(sample, old_logprobs=z, advantages=z) for sample, z in zip(samples, zeros, strict=True)]


def gradients(model, samples):
    learner = Learner(
        model,
        build_optimizer(model.named_parameters(), lr=0.1),
        lambda step: 1.0,
        batching=Batching(update=MicroLimit(1, None)),
    )
    learner.forward_backward(samples, TotalLogprob())
    found = {name: param.grad for name, param in model.named_parameters()}
    learner.optimizer.zero_grad()
    return found


def test_64_micro_batches_err_by_one_rounding_and_no_more():
    model, samples = qwen2().bfloat16(), ready(text_samples([(3, 4), (5, 2), (2, 6), (4, 3)] * 16))
    alone = [gradients(model, [sample]) for sample in samples]
    summed = gradients(model, samples)
    for name, found in summed.items():
        exact = torch.stack([one[name].double() for one in alone]).sum(0)
        error = (found.double() - exact).abs()
        assert found.dtype == torch.bfloat16
        # Beside the one rounding, what float32 loses where terms cancel.
        terms = torch.stack([one[name].double().abs() for one in alone]).sum(0)
        assert (error <= ONE_ROUNDING * exact.abs() + 64 * 2.0**-24 * terms).all(), name
    name = "model.embed_tokens.weight"
    naive = torch.zeros_like(summed[name])
    for one in alone:
        naive += one[name]
    exact = torch.stack([one[name].double() for one in alone]).sum(0)
    assert (naive.double() - exact).norm() > 2 * (summed[name].double() - exact).norm()


def test_one_micro_batch_and_wide_weights_take_no_memory():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()])
    sums = GradientSums(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = [param.grad for param in model.parameters()]
    sums.deliver()
    assert all(param.grad is grad for param, grad in zip(model.parameters(), before, strict=True))
    sums.collect()
    assert [param.grad is None for param in model.parameters()] == [False, False, True, True]
    sums.deliver()
    assert all(param.grad.eq(1).all() for param in model.parameters())


def test_a_second_call_before_the_step_adds_to_the_first():
    model, samples = qwen2().bfloat16(), ready(text_samples())
    once = {name: grad.clone() for name, grad in gradients(model, samples).items()}
    learner = Learner(
        model, build_optimizer(model.named_parameters(), lr=0.1), lambda step: 1.0,
        batching=Batching(update=MicroLimit(1, None)),
    )  # fmt: skip
    learner.forward_backward(samples, TotalLogprob())
    learner.forward_backward(samples, TotalLogprob())
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, 2 * once[name], rtol=0.02, atol=1e-3, msg=name)


def test_sharded_gradients_are_added_up_too(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Linear(4, 4, bias=False).bfloat16()
        model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh, [Shard(0)]))
        sums = GradientSums(model)
        for _ in range(3):
            sums.collect()
            gradient = torch.full((4, 4), 1 + 2**-7).bfloat16()
            model.weight.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        sums.deliver()
        assert isinstance(model.weight.grad, DTensor)
        assert model.weight.grad.to_local().eq(torch.tensor(3 * (1 + 2**-7)).bfloat16()).all()
    finally:
        dist.destroy_process_group()
