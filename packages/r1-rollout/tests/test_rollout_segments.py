"""Segments of keys and values: mixed lengths are exact, and nobody pays for the longest."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from embedded_cases import END, assert_exact, engine_for, mixed_prompts, sample, text_prompt
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from r1_rollout.embedded import products, segments
from r1_rollout.embedded.kv import GroupCache, KeysValues
from r1_rollout.embedded.prefill import prefill_batches
from r1_rollout.embedded.segments import close_gaps, cut
from r1_rollout.embedded.softmax import LOG2_E
from r1_rollout.types import SamplingParams
from r1_rollout.weights import LocalWeights

HEADS, SIZE = 2, 8
CPU = torch.device("cpu")


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of 4, 4, 8, 16, … columns."""
    monkeypatch.setattr(segments, "FIRST", 4)


@pytest.fixture(params=["text_model", "vision_model"])
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def test_segments_double_and_end_at_the_limit() -> None:
    assert [(one.first, one.last) for one in cut(4, 1000)] == [(0, 128), (128, 256), (256, 512), (512, 1000)]
    assert [(one.first, one.last) for one in cut(4, 5)] == [(0, 5)]


@pytest.mark.parametrize(("count", "leaving"), [(5, []), (5, [0, 1, 2, 3, 4]), (6, [1, 5]), (6, [0, 2, 4]), (1, [0])])
def test_gaps_are_closed_by_the_last_places(count: int, leaving: list[int]) -> None:
    places: list[int | None] = [*range(count)]
    sources, targets = close_gaps(count, leaving)
    for source, target in zip(sources, targets, strict=True):
        places[target] = source
    assert sorted(places[: count - len(leaving)]) == sorted({*range(count)} - {*leaving})


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("few", [0, 1 << 20], ids=["sums of embeddings", "products"])
@pytest.mark.parametrize("max_sequences", [64, 5])
def test_logprobs_stay_exact_over_many_segments_and_ages(model, max_sequences, few, monkeypatch):
    monkeypatch.setattr(products, "_FEW", few)
    prompts, params = mixed_prompts(model), SamplingParams(max_tokens=30, n=4)
    groups = sample(model, prompts, params, max_sequences=max_sequences, end_token_ids={END, 8, 9})
    assert_exact(model, prompts, groups, 1.0)
    lengths = {len(completion.token_ids) for completion in chain.from_iterable(groups)}
    assert min(lengths) <= 4, "none ended in the first segment"
    assert max(lengths) > 16, "none came to the fourth"


@pytest.mark.usefixtures("short_segments")
def test_a_samples_tokens_do_not_depend_on_how_long_others_are(text_model):
    short, long = text_prompt("short", 3), text_prompt("long", 90)
    params = SamplingParams(max_tokens=20, n=3, seed=4)
    ((*alone,),) = sample(text_model, [short], params)
    _, beside, _ = sample(text_model, [long, short, text_prompt("other", 17)], params, max_sequences=6)
    assert [one.token_ids.tolist() for one in beside] == [one.token_ids.tolist() for one in alone]


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=str)
def test_attention_over_segments_is_that_over_whole_rows(dtype, tolerance, monkeypatch):
    """Rows of several prompts enter, end and change places at random, against one plain attention a row."""
    monkeypatch.setattr(products, "_FEW", 0)  # all products of float32 are sums of embeddings
    monkeypatch.setattr(products, "_WHOLE", 0)
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    lengths = [3, 30, 5, 11]
    past = [torch.randn(2, HEADS, length, SIZE, dtype=dtype) for length in lengths]  # keys and values
    cache = GroupCache(12, 40)
    padded = [F.pad(one, (0, 0, 0, max(lengths) - one.shape[2])) for one in past]
    cache.insert([KeysValues(*torch.stack(padded, dim=1))], lengths, 0)
    slots = np.arange(12) % 4
    rows = [past[slot] for slot in slots]
    ages = torch.zeros(12, dtype=torch.int64)
    cache.arrange(slots, lengths, CPU)
    for step in range(36):
        key, value = torch.randn(2, len(rows), HEADS, 1, SIZE, dtype=dtype)
        query = torch.randn(len(rows), HEADS, 3, SIZE, dtype=dtype)
        cache.aim(ages.numpy())
        cache.place(ages)
        cache.write(key[:, :, 0], value[:, :, 0], 0)
        found = cache.attend(LOG2_E * query)
        for index, row in enumerate(rows):
            rows[index] = row = torch.cat([row, torch.stack([key[index], value[index]])], dim=2)
            torch.testing.assert_close(
                found[index], F.scaled_dot_product_attention(query[index], row[0], row[1], scale=1.0),
                rtol=tolerance, atol=tolerance,
            )  # fmt: skip
        ages += 1
        if step % 3 == 0 and len(rows) > 4:  # one leaves, whichever: there stay two of each prompt at least
            (leaving,) = torch.randint(4, len(rows), (1,), generator=draw).tolist()
            sources, targets = close_gaps(len(rows), [leaving])
            for source, target in zip(sources, targets, strict=True):
                rows[target], slots[target], ages[target] = rows[source], slots[source], ages[source]
            rows, slots, ages = rows[:-1], slots[:-1], ages[:-1]
            if step % 2:  # and its sample is begun again
                rows.append(past[0])
                slots, ages = np.append(slots, 0), torch.cat([ages, torch.tensor([0])])
            cache.remove_rows([leaving], sources, targets)
            cache.arrange(slots, lengths, CPU)


def held(cache: GroupCache) -> int:
    """Columns of keys that the cache has room for, in one layer."""
    parts = [segment.layers[0].keys for segment in (*cache._prompts, *cache._answers) if segment.layers]
    return sum(keys.shape[0] * keys.shape[3] for keys in parts)


def read(cache: GroupCache) -> int:
    """Columns of keys that a step reads, in one layer."""
    return sum(len(segment.owners) * segment.width for segment, _ in (*cache._prompt_readers, *cache._answer_readers))


def test_one_long_prompt_among_short_ones_costs_its_own_length(text_model, monkeypatch):
    monkeypatch.setattr(segments, "FIRST", 8)
    monkeypatch.setattr(segments, "APART", 1)  # as 16 are to 128
    prompts = [text_prompt(f"p{index}", 6) for index in range(31)] + [text_prompt("long", 200)]
    found: list[tuple[int, int]] = []
    aim = GroupCache.aim

    def watched(cache: GroupCache, columns: Any) -> None:
        aim(cache, columns)
        found.append((held(cache), read(cache)))

    monkeypatch.setattr(GroupCache, "aim", watched)
    engine = engine_for(text_model, max_sequences=32)
    with engine.active(LocalWeights(text_model.state_dict().items(), 0)):
        list(engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True)))
    own = sum(len(prompt.token_ids) for prompt in prompts) + 12 * len(prompts)
    assert max(read_ for _, read_ in found) <= own + 8 * len(prompts)
    assert max(held_ for held_, _ in found) <= 2 * own + 2 * 8 * len(prompts), (
        "of which the longest alone takes 32 × 200"
    )


def test_a_short_prompt_is_not_padded_to_the_longest():
    lengths = [2048, *[40] * 20, 70, 5]
    assert all(
        max(lengths[one] for one in batch) <= max(64, 2 * min(lengths[one] for one in batch))
        for batch in prefill_batches(lengths)
    )


class Copies(TorchDispatchMode):
    """Counts what a GPU waits for: lists and numbers that become tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.lift_fresh.default, torch.ops.aten._to_copy.default)
        return func(*args, **(kwargs or {}))


def copies_of(layers: int) -> tuple[int, int]:
    """Of the entry of three prompts and the departure of two rows."""
    cache, own = GroupCache(8, 40), torch.randn(3, HEADS, 5, SIZE)
    with Copies() as entering:
        cache.insert([KeysValues(own, own)] * layers, [5, 3, 4], 0)
    cache.arrange(np.arange(8) % 3, [5, 3, 4], CPU)
    cache.aim(np.zeros(8, np.int64))
    with Copies() as leaving:
        cache.remove_rows([0, 2], [6, 7], [0, 2])
    return entering.count, leaving.count


def test_waits_for_entries_and_departures_do_not_grow_with_the_layers() -> None:
    assert copies_of(2) == copies_of(30) == (1, 2)
    assert copies_of(0) == (1, 0), "of recurrent models, whose layers have no keys"


def test_a_step_without_comings_and_goings_hands_a_device_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The readers and places of rows are there already; columns and masks are computed on the device."""
    monkeypatch.setattr(segments, "FIRST", 4)
    cache, own, handed = GroupCache(8, 40, replayed=True), torch.randn(2, HEADS, 5, SIZE), [0]
    cache.insert([KeysValues(own, own)] * 3, [5, 4], 0)
    cache.arrange(np.arange(6) % 2, [5, 4], CPU)
    right = torch.from_numpy

    def count(array: Any) -> Any:
        handed[0] += 1
        return right(array)

    monkeypatch.setattr(torch, "from_numpy", count)
    counts = []
    for step in range(12):
        handed[0] = 0
        cache.aim(np.full(6, step))
        cache.place(torch.full((6,), step))
        counts.append(handed[0])
    # A segment that begins needs three tensors of readers, and the places of the rows that write to it.
    assert counts == [4, 0, 0, 0] * 3
