"""Cutting a step: budgets are kept, nothing is lost, and a forward's tensors are laid out as promised."""

import math
import random
from dataclasses import replace

import pytest
import torch
from core_models import IMAGE_TOKEN, Fetched, picture_samples, text_samples
from hypothesis import given
from hypothesis import strategies as st

from r1_core.learner.batching import MicroLimit, balance, count, fillers, rounds, split
from r1_core.learner.microbatch import collate, pack, pad
from r1_core.learner.pack import SharedPrompts
from r1_core.types import Sample, join_inputs

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)
LIMITS = st.one_of(st.builds(MicroLimit, st.integers(1, 9)), st.builds(MicroLimit, tokens=st.integers(1, 120)))
RANKS = st.integers(1, 5)


def loads(parts, lengths):
    return [sum(lengths[i] for i in part) for part in parts]


@given(LENGTHS, LIMITS, RANKS, st.booleans())
def test_every_index_is_in_one_micro_batch_and_rounds_are_whole(lengths, limit, ranks, padded):
    parts = split(lengths, limit, ranks, padded=padded)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert len(parts) % ranks == 0
    assert all(parts[:-ranks])
    assert any(parts[-ranks:])
    assert all(part == sorted(part) for part in parts)


@given(LENGTHS, LIMITS, RANKS, st.booleans())
def test_only_a_single_sample_goes_over_the_limit(lengths, limit, ranks, padded):
    for part in split(lengths, limit, ranks, padded=padded):
        longest = max((lengths[i] for i in part), default=0)
        tokens = len(part) * longest if padded else sum(lengths[i] for i in part)
        assert len(part) <= 1 or (len(part) <= limit.samples if limit.tokens is None else tokens <= limit.tokens)


@given(LENGTHS.flatmap(lambda lengths: st.tuples(st.just(lengths), st.permutations(lengths))), LIMITS, RANKS)
def test_the_order_of_the_samples_changes_no_load(both, limit, ranks):
    lengths, shuffled = both
    parts = split(lengths, limit, ranks)
    assert loads(split(shuffled, limit, ranks), shuffled) == loads(parts, lengths)
    assert split(lengths, limit, ranks) == parts


@given(LENGTHS, st.integers(1, 6), RANKS, st.booleans())
def test_a_budget_of_so_many_longest_samples_needs_no_more_rounds_than_so_many_samples(lengths, many, ranks, padded):
    by_tokens = split(lengths, MicroLimit(tokens=many * max(lengths)), ranks, padded=padded)
    assert len(by_tokens) <= len(split(lengths, MicroLimit(many), ranks, padded=padded))


@given(LENGTHS, st.integers(1, 6), RANKS, st.booleans())
def test_rounds_are_as_few_as_the_limit_of_samples_allows(lengths, samples, ranks, padded):
    parts = split(lengths, MicroLimit(samples), ranks, padded=padded)
    assert len(parts) // ranks == -(-len(lengths) // (samples * ranks))
    last = sorted(map(len, parts[-ranks:]))
    assert last[-1] - last[0] <= 1


def test_the_rest_is_spread_evenly_over_the_ranks():
    lengths = [30, 20, 10, 10, 10, 10, 5, 5]
    assert loads(split(lengths, MicroLimit(tokens=30), ranks=2), lengths) == [30, 30, 20, 20]


def test_padded_micro_batches_are_of_similar_length():
    assert split([9, 1, 8, 2, 7], MicroLimit(samples=2), padded=True) == [[0, 2], [3, 4], [1]]
    assert split([9, 1, 8, 2, 7], MicroLimit(tokens=20), padded=True) == [[0, 2], [3, 4], [1]]
    assert split([9, 1, 8, 2, 7, 7], MicroLimit(tokens=18), ranks=2, padded=True) == [[0, 4], [2, 5], [3], [1]]


def typical(number, seed):
    """Tokens like GSM8K's: prompts of 60 to 250, answers around 200 with the spread of its solutions."""
    draw = random.Random(seed)
    prompts = [min(max(round(draw.lognormvariate(math.log(105), 0.38)), 60), 250) for _ in range(number)]
    return [prompt + max(round(draw.lognormvariate(math.log(200), 0.49)), 1) for prompt in prompts]


def long_tailed(number, seed, most=4096):
    """Every fiftieth is cut off at the limit, the others are log-normal with sigma 1."""
    draw = random.Random(seed)
    free = [min(60 + round(draw.lognormvariate(math.log(500), 1)), most) for _ in range(number)]
    return [most if i % 50 == 0 else length for i, length in enumerate(free)]


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("tokens", [4096, 8192, 16384, 32768])
@pytest.mark.parametrize("draw", [typical, long_tailed])
def test_at_least_97_percent_of_the_tokens_that_a_round_pays_for_are_useful(draw, tokens, ranks):
    for number in (64, 256, 1024, 2048):
        lengths = draw(number, seed=number)
        parts = loads(split(lengths, MicroLimit(tokens=tokens), ranks), lengths)
        full = parts[:-ranks]
        assert sum(full) >= 0.97 * len(full) * tokens, "all rounds but the last are filled"
        # A GPU that waits for the slowest pays for the heaviest micro-batch of each round.
        paid = ranks * sum(max(parts[k : k + ranks]) for k in range(0, len(parts), ranks))
        assert sum(lengths) >= 0.97 * paid


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


@given(LENGTHS, st.integers(1, 5), st.sampled_from([MicroLimit(1), MicroLimit(3), MicroLimit(tokens=60)]))
def test_ranks_share_every_sample_once_in_the_same_number_of_micro_batches(lengths, world, limit):
    samples = [
        Sample(torch.zeros(n, dtype=torch.int64), torch.ones(n).bool(), torch.arange(n)[None], group_id=0, reward=0.0)
        for n in lengths
    ]
    cut = rounds(samples, limit, world)
    assert sorted(i for parts in cut for part in parts for i in part) == list(range(len(lengths)))
    assert all(len(parts) == world for parts in cut)


def test_fillers_bring_the_missing_pictures_and_train_nothing():
    samples = picture_samples((2, 0, 1, 0))
    [filler] = fillers([samples[1]], samples)
    assert torch.equal(filler.token_ids, samples[2].token_ids)
    assert not filler.loss_mask.any()
    assert fillers([samples[0]], samples) == []
    assert len(fillers([], text_samples())) == 1


def test_tiny_fillers_are_taken_where_the_round_has_their_kind_and_no_other():
    large, text = (replace(sample, advantages=torch.ones(sample.token_ids.shape)) for sample in picture_samples((2, 0)))
    [tiny] = picture_samples((1,), seed=5)
    moving = replace(tiny, model_inputs=tiny.model_inputs | {"pixel_values_videos": torch.zeros(1)})
    [filler] = fillers([text], [text, large], [moving, tiny])
    assert torch.equal(filler.token_ids, tiny.token_ids)
    assert filler.advantages.shape == tiny.token_ids.shape  # or the micro-batch would be of two kinds
    assert filler.old_logprobs is None
    predictors = collate([text, filler], padding_free=True).predictors
    assert torch.equal(predictors, collate([text], padding_free=True).predictors)
    assert fillers([text], [text, text], [moving, tiny]) == []
    [alone] = fillers([], [text, text], [moving, tiny])
    assert torch.equal(alone.token_ids, text.token_ids)
    assert len(fillers([], [large], [moving, tiny])) == 1


def test_fillers_bring_the_pictures_that_other_samples_have_behind_their_prompts():
    text, late = picture_samples((0, 1))
    late = replace(late, model_inputs={}, later_inputs=late.model_inputs)
    [filler] = fillers([text], [text, late])
    assert filler.later_inputs is late.later_inputs
    assert fillers([late], [text, late]) == []


def test_a_shared_prompt_brings_its_inputs_once_and_each_sample_its_later_ones():
    def one(answer: int, later: list[float]) -> Sample:
        ids, inputs = torch.tensor([1, 2, 3, *[answer] * answer]), {"pixels": torch.tensor(later)} if later else {}
        mask = torch.arange(len(ids)) >= 3
        return Sample(
            ids, mask, torch.arange(len(ids))[None], 0, 0.0, prompt, prompt_length=3, later_inputs=inputs
        )  # fmt: skip

    prompt = {"pixels": torch.tensor([1.0]), "grid": torch.tensor([7])}
    samples = [one(4, [2.0, 3.0]), one(5, []), one(6, [4.0])]
    for share, pixels in ((True, [1, 2, 3, 4]), (False, [1, 2, 3, 1, 1, 4])):
        forward = collate(samples, padding_free=True, share_prompts=share).forward
        assert (forward["pixels"].tolist(), len(forward["grid"])) == (pixels, 1 if share else 3)
    assert collate(samples, padding_free=False).forward["pixels"].tolist() == [1, 2, 3, 1, 1, 4]


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


@pytest.mark.parametrize("padding_free", [True, False])
def test_inputs_that_are_elsewhere_are_fetched_once_and_for_their_own_micro_batch_only(padding_free):
    plain = picture_samples()
    samples = [replace(sample, model_inputs=Fetched(sample.model_inputs)) for sample in plain]
    count(samples)
    rounds(samples, MicroLimit(2), 2)
    fillers([samples[3]], samples)
    assert not any(sample.model_inputs.read for sample in samples)
    found, expected = (collate(batch[:2], padding_free=padding_free).forward for batch in (samples, plain))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert [sorted(sample.model_inputs.read) for sample in samples] == [sorted(plain[0].model_inputs)] * 2 + [[]] * 3


def test_packing_without_the_text_axis_is_refused():
    sample = picture_samples((1,))[0]
    three_axes = Sample(sample.token_ids, sample.loss_mask, sample.position_ids[1:], 8, 0.0)
    with pytest.raises(ValueError, match=r"group 8: position_ids\[0\] must count"):
        pack([three_axes])
    last = replace(sample, position_ids=sample.position_ids.roll(1, 0), group_id=9)
    with pytest.raises(ValueError, match=r"group 9: position_ids\[0\] must count"):
        pack([*picture_samples((1, 2)), last])


@pytest.mark.parametrize("padding_free", [True, False])
def test_a_trained_first_token_is_refused(padding_free):
    wrong = replace(make([], [1, 2]), group_id=5)
    for samples in ([wrong], [make([3], [1]), make([4, 4], [2]), wrong, make([3], [1])]):
        with pytest.raises(ValueError, match="group 5: its first token is trained"):
            collate(samples, padding_free=padding_free)


def test_an_empty_micro_batch_size_is_refused():
    with pytest.raises(ValueError, match="samples of a micro-batch is 0"):
        MicroLimit(0)


# --- shared prompts --------------------------------------------------------------------------------------------------


def groups_of(*sizes: int, prompt: int = 20) -> list[Sample]:
    """Groups of so many answers of 3, 4, 5, … tokens to prompts of their own."""
    samples = []
    for group, size in enumerate(sizes):
        for length in range(prompt + 3, prompt + 3 + size):
            tokens = torch.full((length,), group)
            mask = torch.arange(length) >= prompt
            samples.append(Sample(tokens, mask, torch.arange(length)[None], group, 0.0, prompt_length=prompt))
    return samples


@pytest.mark.parametrize("limit", [MicroLimit(1), MicroLimit(5), MicroLimit(tokens=60), MicroLimit(tokens=500)])
@pytest.mark.parametrize("ranks", [1, 4])
def test_groups_are_cut_within_the_limit_and_every_sample_is_in_one_micro_batch(limit, ranks):
    samples = groups_of(8, 1, 3, 8, 5)
    work = SharedPrompts.find(samples)
    parts = [part for parts in rounds(samples, limit, ranks, share_prompts=True) for part in parts]
    assert sorted(i for part in parts for i in part) == list(range(len(samples)))
    assert len(parts) % ranks == 0
    for part in parts:
        assert len(part) <= 1 or (
            len(part) <= limit.samples if limit.tokens is None else work.tokens(part) <= limit.tokens
        )


def test_a_group_stays_together_where_there_is_room_and_is_cut_where_a_rank_would_wait():
    samples = groups_of(8, 8)
    together = [list(range(8)), list(range(8, 16))]
    assert sorted(rounds(samples, MicroLimit(8), 1, share_prompts=True)) == [[together[0]], [together[1]]]
    (alone,) = rounds(groups_of(8), MicroLimit(tokens=500), 2, share_prompts=True)
    assert [len(part) for part in alone] == [4, 4]
    (even,) = rounds(samples, MicroLimit(tokens=500), 2, share_prompts=True)
    assert sorted(even) == together


def test_what_is_computed_is_each_prompt_once_and_every_answer():
    samples = groups_of(2, 1)
    work = SharedPrompts.find(samples)
    assert (work.own, work.prompt, work.lengths) == ([3, 4, 3], [0, 0, 1], [20, 20])
    assert (work.tokens([0, 1]), work.tokens([0, 2]), sum(work.in_order([0, 1, 2]))) == (27, 46, 50)
    batch = collate(samples, padding_free=True, share_prompts=True)
    assert batch.forward["input_ids"].shape == (1, 50)
    assert batch.predictors.tolist() == [19, 20, 21, 19, 23, 24, 25, 46, 47, 48]
    assert batch.pack.behind == [-1, 0, 0, -1]
    other = replace(samples[1], model_inputs={"pixel_values": torch.ones(1)})
    assert not SharedPrompts.find([samples[0], other]).shared
    assert not SharedPrompts.find(samples, share=False).shared
    with pytest.raises(ValueError, match="prompt_length is 99"):
        replace(samples[0], prompt_length=99)


def test_inputs_of_pictures_of_several_sizes_are_filled_with_zeros() -> None:
    wide, high = torch.ones(1, 3, 2, 5), torch.full((2, 3, 4, 1), 2.0)
    joined = join_inputs([{"pixels": wide, "sizes": torch.tensor([[2, 5]])}, {}, {"pixels": high}])
    assert joined["pixels"].shape == (3, 3, 4, 5)
    assert torch.equal(joined["pixels"][:1, :, :2], wide)
    assert torch.equal(joined["pixels"][1:, :, :, :1], high)
    assert float(joined["pixels"].sum()) == float(wide.sum() + high.sum())
    assert joined["sizes"].tolist() == [[2, 5]]
    with pytest.raises(ValueError, match="argument"):
        join_inputs([{"pixels": wide}, {"pixels": high[0]}])
