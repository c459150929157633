"""Weights are compared byte by byte, whatever the precision and however an engine has fused them."""

import copy
from typing import Any

import pytest
import torch
from embedded_cases import END

from r1_rollout.checksums import checksum, differing, expected_checksums
from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.handover import LocalWeights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_one_changed_or_moved_element_changes_the_sum(dtype: torch.dtype) -> None:
    tensor = (torch.arange(5000) % 7 - 3).to(dtype)
    assert checksum(tensor) == checksum(tensor.clone().reshape(50, 100))
    for place in (0, 77, 4999):
        changed = tensor.clone()
        changed[place] = not changed[place] if dtype == torch.bool else changed[place] + 1
        assert checksum(changed) != checksum(tensor)
    swapped = tensor.clone()
    swapped[[0, 1]] = tensor[[1, 0]]
    assert (checksum(swapped) != checksum(tensor)) == bool(tensor[0] != tensor[1])
    assert checksum(torch.zeros(0)) == checksum(torch.zeros(9)) == 0


def test_a_sum_does_not_depend_on_how_it_is_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = checksum(tensor)
    monkeypatch.setattr("r1_rollout.checksums._BLOCK", 64)
    assert checksum(tensor) == whole


def test_parts_of_fused_tensors_are_compared_one_by_one() -> None:
    parts = {
        f"model.layers.0.self_attn.{name}_proj.weight": torch.randn(rows, 4)
        for name, rows in zip("qkv", (8, 2, 2), strict=True)
    }
    own = {"model.layers.0.self_attn.qkv_proj.weight": torch.cat([*parts.values()]).bfloat16()}
    expected = expected_checksums(parts.items(), ["bfloat16"])
    assert differing(own, expected) == []
    own["model.layers.0.self_attn.qkv_proj.weight"][9, 0] += 1
    assert differing(own, expected) == ["model.layers.0.self_attn.k_proj.weight"]


def test_an_engine_behind_by_less_than_rounding_shows_is_found_in_half_precision(text_model: Any) -> None:
    learner = copy.deepcopy(text_model)
    engine = EmbeddedEngine(copy.deepcopy(text_model).bfloat16(), end_token_ids={END})
    engine.update(LocalWeights(learner.state_dict, 0))
    precisions = engine.precisions
    assert precisions == ("bfloat16",)
    assert engine.differing(expected_checksums(learner.state_dict().items(), precisions)) == []
    weight = learner.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight[0, 0] *= 1.01
    stale = engine.differing(expected_checksums(learner.state_dict().items(), precisions))
    assert stale == ["model.layers.0.mlp.up_proj.weight"]
    engine.update(LocalWeights(learner.state_dict, 1))
    assert engine.differing(expected_checksums(learner.state_dict().items(), precisions)) == []
