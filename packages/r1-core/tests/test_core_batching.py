"""Cutting a step: budgets are kept, nothing is lost, and a forward's tensors are laid out as promised."""

import pytest
import torch
from core_models import IMAGE_TOKEN, picture_samples, text_samples
from hypothesis import given
from hypothesis import strategies as st

from r1_core.batching import MicroLimit, balance, count, fillers, schedule, split
from r1_core.microbatch import collate, pack, pad
from r1_core.types import Sample

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 60))
def test_token_bins_hold_each_sample_once_and_keep_to_the_budget(lengths, budget):
    parts = split(lengths, MicroLimit(tokens=budget))
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(len(part) == 1 or sum(lengths[i] for i in part) <= budget for part in parts)
    assert all(parts)


def test_token_bins_are_as_few_as_the_budget_allows_and_balanced():
    parts = split([10, 10, 10, 10, 5, 5, 5, 5], MicroLimit(samples=1, tokens=30))
    assert [sum([10, 10, 10, 10, 5, 5, 5, 5][i] for i in part) for part in parts] == [30, 30]


def test_without_a_token_budget_micro_batches_are_consecutive_runs():
    assert split([9, 1, 9, 1, 9], MicroLimit(samples=2)) == [[0, 1], [2, 3], [4]]


def test_balance_is_close_to_even():
    lengths = [1756, 1451, 1691, 547, 359, 2039, 367, 538]
    sums = [sum(lengths[i] for i in part) for part in balance(lengths, 2)]
    assert max(sums) <= 1.02 * 4387


def dense_differencing(lengths, bins, equal_size):
    """The largest sum of Karmarkar-Karp's rule as it is usually written, with every partial answer a full row."""
    order, width = sorted(lengths, reverse=True), bins if equal_size else 1
    rows = [order[start : start + width] for start in range(0, len(order), width)]
    rows = [row + [0] * (bins - len(row)) for row in rows]
    while len(rows) > 1:
        rows.sort(key=lambda row: (row[0] - row[-1], row[0]))
        one, other = rows.pop(), rows.pop()
        rows.append(sorted((a + b for a, b in zip(one, reversed(other), strict=True)), reverse=True))
    return rows[0][0]


@given(LENGTHS, st.integers(1, 9), st.booleans())
def test_the_largest_bin_is_no_larger_than_karmarkar_karps(lengths, bins, equal_size):
    largest = max(sum(lengths[i] for i in part) for part in balance(lengths, bins, equal_size))
    assert largest <= 1.02 * dense_differencing(lengths, bins, equal_size)


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 9), st.booleans())
def test_bins_hold_each_index_once_and_are_not_empty_without_need(lengths, bins, equal_size):
    parts = balance(lengths, bins, equal_size)
    assert len(parts) == bins
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert sum(map(bool, parts)) == min(bins, len(lengths))
    assert all(part == sorted(part) for part in parts)
    if equal_size:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_ranks_get_equally_many_samples_where_the_limit_counts_samples():
    samples = [
        Sample(torch.zeros(n), torch.ones(n).bool(), torch.arange(n)[None], group_id=0, reward=0.0)
        for n in (90, 10, 10, 10, 10, 10)
    ]
    cuts = [schedule(samples, MicroLimit(samples=1), rank, world=2) for rank in range(2)]
    assert [[len(part) for part in cut] for cut in cuts] == [[1, 1, 1], [1, 1, 1]]


@given(LENGTHS, st.integers(1, 5), st.sampled_from([MicroLimit(1), MicroLimit(3), MicroLimit(tokens=60)]))
def test_ranks_share_every_sample_once_in_the_same_number_of_micro_batches(lengths, world, limit):
    samples = [
        Sample(torch.zeros(n), torch.ones(n).bool(), torch.arange(n)[None], group_id=0, reward=0.0) for n in lengths
    ]
    cuts = [schedule(samples, limit, rank, world) for rank in range(world)]
    assert sorted(i for cut in cuts for part in cut for i in part) == list(range(len(lengths)))
    assert len({len(cut) for cut in cuts}) == 1


def test_fillers_bring_the_missing_pictures_and_train_nothing():
    samples = picture_samples((2, 0, 1, 0))
    [filler] = fillers([samples[1]], samples)
    assert torch.equal(filler.token_ids, samples[2].token_ids)
    assert not filler.loss_mask.any()
    assert fillers([samples[0]], samples) == []
    assert len(fillers([], text_samples())) == 1


def test_count_leaves_out_sequences_without_trained_tokens():
    samples = text_samples()
    totals = count(samples)
    assert (totals.tokens, totals.sequences) == (4 + 1 + 5 + 3, 4)


def make(prompt, answer, **more):
    tokens = torch.tensor(prompt + answer)
    length = len(tokens)
    return Sample(tokens, torch.arange(length) >= len(prompt), torch.arange(length)[None], 0, 1.0, **more)


def test_packed_layout():
    first = make([7, 8], [4, 2], old_logprobs=torch.tensor([0, 0, -1.0, -2.0]))
    second = make([9, 1], [3], old_logprobs=torch.tensor([0, 0, -3.0]))
    batch = collate([first, second], padding_free=True)
    assert batch.forward["input_ids"].tolist() == [[7, 8, 4, 2, 9, 1, 3]]
    assert batch.forward["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert "attention_mask" not in batch.forward
    assert batch.predictors.tolist() == [1, 2, 5]
    assert batch.targets.tolist() == [4, 2, 3]
    assert batch.loss_mask.tolist() == [[True, True], [True, False]]
    assert batch.values["old_logprobs"].tolist() == [[-1, -2], [-3, 0]]
    assert batch.values.keys() == {"old_logprobs"}
    assert batch.rows(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1, 2], [3, 0]]


def test_padded_layout():
    batch = collate([make([7, 8], [4, 2]), make([9, 1], [3])], padding_free=False)
    assert batch.forward["input_ids"][0].tolist() == [7, 8, 4, 2]
    assert batch.forward["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch.forward["position_ids"].shape == (2, 4)
    assert batch.predictors.tolist() == [1, 2, 5]


def test_pictures_are_concatenated_in_the_order_of_their_samples():
    samples = picture_samples((1, 0, 2))
    for arguments in (pack(samples), pad(samples)):
        assert arguments["image_grid_thw"].shape == (3, 3)
        features = torch.cat([samples[0].model_inputs["pixel_values"], samples[2].model_inputs["pixel_values"]])
        assert torch.equal(arguments["pixel_values"], features)
        assert (arguments["input_ids"] == IMAGE_TOKEN).sum() == 12
    assert pack(samples)["position_ids"].shape[0] == 4
    assert pad(samples)["position_ids"].shape[0] == 3


def test_packing_without_the_text_axis_is_refused():
    sample = picture_samples((1,))[0]
    three_axes = Sample(sample.token_ids, sample.loss_mask, sample.position_ids[1:], 8, 0.0)
    with pytest.raises(ValueError, match=r"group 8: position_ids\[0\] must count"):
        pack([three_axes])


def test_a_trained_first_token_is_refused():
    with pytest.raises(ValueError, match="first token is trained"):
        collate([make([], [1, 2])], padding_free=True)


def test_an_empty_micro_batch_size_is_refused():
    with pytest.raises(ValueError, match="samples of a micro-batch is 0"):
        MicroLimit(0)
