"""Weights are zero inside the block, and back to the bit after it."""

import pytest
import torch
from core_models import qwen2

from r1_core.learner.ablation import zeroed

NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_only_the_rows_named_are_zero_and_only_inside_the_block():
    model = qwen2(tied=True)
    before = state_of(model)
    with zeroed(model, {NORM: None, EMBEDDING: [1, 3]}):
        inside = state_of(model)
        assert not inside[NORM].any()
        assert not inside[EMBEDDING][[1, 3]].any()
        rest = [row for row in range(len(before[EMBEDDING])) if row not in (1, 3)]
        assert torch.equal(inside[EMBEDDING][rest], before[EMBEDDING][rest])
        assert torch.equal(inside["lm_head.weight"], inside[EMBEDDING])
        assert all(torch.equal(inside[n], t) for n, t in before.items() if n not in (NORM, EMBEDDING, "lm_head.weight"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(model).items())


def test_an_error_inside_the_block_loses_nothing():
    model = qwen2()
    before = state_of(model)
    with pytest.raises(RuntimeError, match="inside"), zeroed(model, {NORM: None}):
        raise RuntimeError("inside")
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(model).items())


def test_no_row_at_all_changes_nothing():
    model = qwen2()
    before = state_of(model)
    with zeroed(model, {EMBEDDING: []}):
        assert torch.equal(model.model.embed_tokens.weight, before[EMBEDDING])


def test_a_tensor_that_is_not_there_is_an_error():
    with pytest.raises(KeyError, match="nowhere"), zeroed(qwen2(), {"nowhere": None}):
        pass
