"""Weights are compared byte by byte, whatever the precision and however an engine has fused them."""

import copy
from typing import Any

import pytest
import torch
from embedded_cases import END

from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.types import Comparison
from r1_rollout.weight_checks import ByteProof, checksum, compare, expected_checksums, merged
from r1_rollout.weights import Adapter, LocalWeights


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


def test_changes_that_balance_each_other_change_the_sum() -> None:
    one, other = torch.tensor([2.0, 3.0, 4.0, 5.0]), torch.tensor([6.0, 5.0, 4.0, 3.0])
    assert checksum(one) != checksum(other)
    pairs = {checksum(torch.tensor([a, b, 9 - 2 * b - a])) for a in range(30) for b in range(30)}
    assert len(pairs) == 900
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        signs = torch.ones(64, dtype=dtype)
        signs[[3, 40]] = -1
        assert checksum(signs) != checksum(torch.ones(64, dtype=dtype))


def test_blocks_of_a_large_tensor_cannot_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("r1_rollout.weight_checks._BLOCK", 64)
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    swapped = torch.cat([tensor[64:128], tensor[:64], tensor[128:]])
    assert checksum(tensor) == checksum(tensor.clone()) != checksum(swapped)


def test_parts_of_fused_tensors_are_compared_one_by_one() -> None:
    parts = {
        f"model.layers.0.self_attn.{name}_proj.weight": torch.randn(rows, 4)
        for name, rows in zip("qkv", (8, 2, 2), strict=True)
    }
    own = {"model.layers.0.self_attn.qkv_proj.weight": torch.cat([*parts.values()]).bfloat16()}
    expected = expected_checksums(parts.items(), ["bfloat16"])
    assert [*compare(own, expected).differing] == []
    own["model.layers.0.self_attn.qkv_proj.weight"][9, 0] += 1
    assert [*compare(own, expected).differing] == ["model.layers.0.self_attn.k_proj.weight"]


def test_an_engine_behind_by_less_than_rounding_shows_is_found_in_half_precision(text_model: Any) -> None:
    learner = copy.deepcopy(text_model)
    engine = EmbeddedEngine(copy.deepcopy(text_model).bfloat16(), end_token_ids={END})
    engine.load_weights(LocalWeights(learner.state_dict, 0))
    precisions = engine.precisions
    assert precisions == ("bfloat16",)
    assert [*engine.compare(expected_checksums(learner.state_dict().items(), precisions)).differing] == []
    weight = learner.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight[0, 0] *= 1.01
    stale = [*engine.compare(expected_checksums(learner.state_dict().items(), precisions)).differing]
    assert stale == ["model.layers.0.mlp.up_proj.weight"]
    engine.load_weights(LocalWeights(learner.state_dict, 1))
    assert [*engine.compare(expected_checksums(learner.state_dict().items(), precisions)).differing] == []


def test_what_cannot_be_compared_is_named() -> None:
    expected = expected_checksums({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}.items(), ["bfloat16"])
    own = {
        "a": torch.zeros(0),
        "b": torch.ones(2).half(),
    }  # packed elsewhere; in a precision nobody asked about; absent
    assert compare(own, expected).unread == ("a", "b", "c")


LEARNER = [torch.arange(1.0, 9.0) * step for step in (1, 2, 3)]  # one tensor at three syncs


def shown(
    copies: list[torch.Tensor], learner: list[torch.Tensor] = LEARNER, *, keeps_layout: bool = False
) -> list[list[str]]:
    """The tensors that are found stale at each sync, of an engine that shows `copies`."""
    proof, stale = ByteProof(keeps_layout), []
    for weight, copy_ in zip(learner, copies, strict=False):
        expected = expected_checksums({"w": weight}.items(), [])
        found = compare({"w": copy_}, expected)
        stale.append(proof.stale(found))
        proof.take(found, expected)
    return stale


def test_a_layout_of_the_engines_own_passes_while_it_changes_with_the_weights() -> None:
    assert shown([weight.flip(0) for weight in LEARNER]) == [[], [], []]


def test_a_tensor_that_was_stale_at_the_first_sync_is_found_at_the_second() -> None:
    assert shown([torch.full((8,), 5.0)] * 2) == [[], ["w"]]


def test_a_tensor_that_is_one_sync_behind_from_the_first_is_found_at_the_second() -> None:
    assert shown([torch.full((8,), 5.0), LEARNER[0]]) == [[], ["w"]]


def test_a_tensor_that_was_equal_once_must_stay_so() -> None:
    assert shown([LEARNER[0], LEARNER[1].flip(0)]) == [[], ["w"]]
    assert shown([LEARNER[0].flip(0), LEARNER[1], LEARNER[2].flip(0)]) == [[], [], ["w"]]


def test_an_engine_in_the_learners_layout_may_differ_in_nothing() -> None:
    assert shown([LEARNER[0].flip(0)], keeps_layout=True) == [["w"]]


def test_weights_that_did_not_change_prove_nothing_against_an_engine() -> None:
    proof, expected = ByteProof(keeps_layout=False), expected_checksums({"w": LEARNER[0]}.items(), [])
    found = compare({"w": LEARNER[0].flip(0)}, expected)
    for _ in range(3):
        assert proof.stale(found) == []
        proof.take(found, expected)


def test_a_tensor_of_equal_elements_does_not_show_the_engines_layout() -> None:
    learner = [torch.zeros(8), torch.ones(8), LEARNER[0], LEARNER[1]]  # as a new bias is
    turned = [weight.flip(0) for weight in learner]
    assert shown(turned, learner) == [[], [], [], []]
    assert shown(learner, learner) == [[], [], [], []]
    assert shown([*learner[:3], turned[3]], learner) == [[], [], [], ["w"]], "its layout had shown by then"


def test_a_tensor_of_equal_elements_that_stays_behind_is_found_at_once() -> None:
    assert shown([torch.zeros(8), torch.zeros(8)], [torch.zeros(8), LEARNER[0]]) == [[], ["w"]]
    assert shown([torch.zeros(8), torch.zeros(8)], [torch.zeros(8), torch.ones(8)]) == [[], ["w"]]


def test_a_tensor_that_is_right_on_one_server_and_differs_on_another_is_stale_at_the_first_sync() -> None:
    expected = expected_checksums({"w": LEARNER[0]}.items(), [])
    right, wrong = compare({"w": LEARNER[0]}, expected), compare({"w": LEARNER[1]}, expected)
    assert ByteProof(keeps_layout=False).stale(merged([right, wrong])) == ["w"]
    assert ByteProof(keeps_layout=False).stale(merged([wrong, wrong])) == []
    assert merged([right, Comparison({}, ("w",))]).unread == ("w",)


def test_an_adapters_factors_are_compared_only_where_the_engine_keeps_them_as_they_came() -> None:
    adapter = Adapter(2, 4.0, ("q_proj",), [("q_proj.lora_A.weight", torch.ones(2, 8))])
    assert [*expected_checksums(adapter, [], keeps_layout=True)] == ["q_proj.lora_A.weight"]
    assert expected_checksums(adapter, []) == {}, "an engine that adds the product to its weights has no factors"
