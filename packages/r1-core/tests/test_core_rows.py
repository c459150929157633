"""Fields of samples, flat tokens and rows are the same numbers in three layouts, and mixtures are refused."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from r1_core.advantages.inputs import ESTIMATOR_FIELDS
from r1_core.learner.microbatch import collate
from r1_core.learner.pack import Pack
from r1_core.needs import all_needs
from r1_core.types import (
    LOSS_FIELDS,
    PER_TOKEN,
    TOP_FIELDS,
    Sample,
    TokenTable,
    known,
    ranges,
    rows,
    to_rows,
    tokens,
    trained,
    with_tokens,
)


def sample(prompt: int, response: int, group_id: int = 0) -> Sample:
    length = prompt + response
    return Sample(
        token_ids=torch.arange(length),
        loss_mask=torch.arange(length) >= prompt,
        position_ids=torch.arange(length)[None],
        group_id=group_id,
        reward=0.0,
        advantages=10.0 * group_id + torch.arange(length),
    )


SAMPLES = [sample(2, 2), sample(1, 1, group_id=1), sample(3, 0, group_id=2)]


def test_rows_are_flat_tokens_are_fields() -> None:
    assert trained(SAMPLES).tolist() == [[True, True], [True, False], [False, False]]
    assert tokens(SAMPLES, "advantages").tolist() == [2, 3, 11]
    assert rows(SAMPLES, "advantages").tolist() == [[2, 3], [11, 0], [0, 0]]
    back = with_tokens(SAMPLES, advantages=rows(SAMPLES, "advantages")[trained(SAMPLES)])
    assert [one.advantages.tolist() for one in back] == [[0, 0, 2, 3], [0, 11], [0, 0, 0]]


def test_samples_that_train_nothing_have_a_row_of_one_place() -> None:
    assert rows([sample(2, 0)], "advantages").tolist() == [[0]]
    assert with_tokens([]) == []


def test_a_gradient_passes_from_rows_to_tokens() -> None:
    flat = torch.ones(3, requires_grad=True)
    (to_rows(flat, trained(SAMPLES)) * torch.tensor([[1.0, 2], [3, 4], [5, 6]])).sum().backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [1, 2, 3]


@pytest.mark.parametrize("name", ["advantages", "old_logprobs", "ref_logprobs", "weights", "selected"])
def test_a_field_that_only_some_samples_have_is_refused_by_name(name: str) -> None:
    mixed = [replace(one, **{name: torch.zeros(len(one.token_ids))}) for one in SAMPLES]
    mixed[1] = replace(mixed[1], **{name: None})
    with pytest.raises(ValueError, match=rf"sample 1 \(group 1\) has no {name}, which 2 of 3 samples have"):
        collate(mixed, padding_free=True)
    with pytest.raises(ValueError, match=rf"sample 1 \(group 1\) has no {name}"):
        rows(mixed, name)
    assert not known(SAMPLES, "old_logprobs")


def test_a_table_takes_micro_batches_in_any_order_and_adds_up_ranks() -> None:
    table = TokenTable(SAMPLES, ("old_logprobs", "squared_probs"), torch.device("cpu"))
    table.put([1, 2], torch.tensor([[7.0, 8.0]]))
    table.put([0], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    columns = table.columns(lambda values: 2 * values)
    assert {name: column.tolist() for name, column in columns.items()} == {
        "old_logprobs": [2, 6, 14], "squared_probs": [4, 8, 16],
    }  # fmt: skip
    found = with_tokens(SAMPLES, **columns)
    assert [one.old_logprobs.tolist() for one in found] == [[0, 0, 2, 6], [0, 14], [0, 0, 0]]
    assert [one.squared_probs.tolist() for one in found] == [[0, 0, 4, 8], [0, 16], [0, 0, 0]]


def test_ranges_of_any_length_follow_one_another() -> None:
    assert ranges([5, 9, 0], [2, 0, 3]).tolist() == [5, 6, 0, 1, 2]
    assert ranges([], []).tolist() == []


@pytest.mark.parametrize("attempt", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_sample_refuses_to_be_pickled_with_the_tensors_of_its_whole_step(attempt) -> None:
    with pytest.raises(TypeError, match="send the fields of all samples together"):
        attempt(SAMPLES[0])


def test_a_per_token_field_is_declared_once_and_where_it_is_read():
    lists = {"losses": LOSS_FIELDS, "estimators": tuple(ESTIMATOR_FIELDS), "needs": all_needs()[6:]}
    assert lists == {
        "losses": ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs", "weights", "selected"),
        "estimators": ("values", "old_logprobs", "squared_probs", "ref_logprobs", "full_kl", "rollout_logprobs"),
        "needs": ("rollout_logprobs", "old_logprobs", "ref_logprobs", "squared_probs", "full_kl", "values"),
    }
    of_turns = {"token_rewards", "turn_ids", "state_ids"}  # which estimators get in a form of their own
    others = {
        "entropies",
        "returns",
        "teacher_logprobs",
        *TOP_FIELDS,
        "routed_experts",
    }  # of which `advantages.distillation` reads the third
    assert {*PER_TOKEN} == {*LOSS_FIELDS, *ESTIMATOR_FIELDS} | others | of_turns


def test_chunks_of_a_row_begin_where_its_sequences_do() -> None:
    """Tokens see those of their chunk, before them in their own sequence."""
    pack = Pack.of([6, 3, 6, 9, 4, 2], "cpu", behind=[-1, 0, 0, -1, -1, 4])
    cut = pack.chunked(4)
    assert cut.lengths == [4, 2, 2, 1, 2, 4, 4, 4, 1, 4, 2]
    assert cut.behind == [-1, -1, 1, -1, 1, -1, -1, -1, -1, -1, -1]
    chunk = pack.places // 4
    assert torch.equal(cut.visible(), pack.visible() & (chunk[:, None] == chunk))
    assert pack.places.tolist()[:15] == [*range(6), *range(6, 9), *range(6, 12)]
    assert pack.grouped
    assert not cut.grouped
