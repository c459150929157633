"""Weights that are set to zero for a while are back to the bit after it, and a learner says what it is."""

import pytest
import torch
from core_heads import learner_for
from core_models import qwen2

NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_only_the_rows_named_are_zero_and_only_until_they_are_restored():
    model = qwen2(tied=True)
    learner, before = learner_for(model), state_of(model)
    learner.zero_weights({NORM: None, EMBEDDING: [1, 3]})
    inside = state_of(model)
    assert not inside[NORM].any()
    assert not inside[EMBEDDING][[1, 3]].any()
    rest = [row for row in range(len(before[EMBEDDING])) if row not in (1, 3)]
    assert torch.equal(inside[EMBEDDING][rest], before[EMBEDDING][rest])
    assert torch.equal(inside["lm_head.weight"], inside[EMBEDDING])
    assert all(torch.equal(inside[n], t) for n, t in before.items() if n not in (NORM, EMBEDDING, "lm_head.weight"))
    learner.restore_weights()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(model).items())


def test_zeroing_twice_is_refused_and_restoring_twice_does_nothing():
    model = qwen2()
    learner, before = learner_for(model), state_of(model)
    learner.zero_weights({NORM: None})
    with pytest.raises(RuntimeError, match="call restore_weights first"):
        learner.zero_weights({EMBEDDING: None})
    learner.restore_weights()
    learner.restore_weights()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(model).items())


def test_no_row_at_all_changes_nothing():
    model = qwen2()
    before = state_of(model)
    learner_for(model).zero_weights({EMBEDDING: []})
    assert torch.equal(model.model.embed_tokens.weight, before[EMBEDDING])


def test_a_tensor_that_is_not_there_is_an_error_and_changes_nothing():
    model = qwen2()
    learner, before = learner_for(model), state_of(model)
    with pytest.raises(KeyError, match="nowhere"):
        learner.zero_weights({NORM: None, "nowhere": None})
    learner.zero_weights({})
    assert torch.equal(model.model.norm.weight, before[NORM])


def test_flops_count_multiplied_weights_and_no_gradient_of_frozen_ones():
    model = qwen2()
    info = learner_for(model).describe()
    parameters = sum(p.numel() for p in model.parameters())
    multiplied = parameters - model.model.embed_tokens.weight.numel()
    assert (info.parameters, info.flops_per_token, info.device) == (parameters, 6 * multiplied, "cpu")
    assert info.peak_allocated is info.peak_reserved is None
    model.lm_head.requires_grad_(False)
    assert learner_for(model).describe().flops_per_token == 6 * multiplied - 2 * model.lm_head.weight.numel()
