"""What is sampled, what is reported, and that noise belongs to the sample."""

import pickle
from dataclasses import replace

import pytest
import torch

from r1_rollout.sampling import banned_tokens, choose_tokens, noise_key, uniform
from r1_rollout.types import Completion, SamplingParams

PROBS = torch.tensor([0.05, 0.4, 0.1, 0.15, 0.3])
LOGITS = PROBS.log() + 1.7  # unnormalised


def params(**changes: float) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 4, **changes})  # type: ignore[arg-type]


def frequencies(params: SamplingParams, banned: tuple[int, ...] = (), draws: int = 4096) -> torch.Tensor:
    """Share of each token when the noise sweeps [0, 1) evenly: the sampling distribution itself, no chance left."""
    noise = (torch.arange(draws) + 0.5) / draws
    tokens, _ = choose_tokens(LOGITS.expand(draws, -1), banned_tokens(5, banned), noise, params)
    return tokens.bincount(minlength=5) / draws


@pytest.mark.parametrize(
    ("changes", "banned", "expected"),
    [
        ({}, (), [0.05, 0.4, 0.1, 0.15, 0.3]),
        ({}, (1, 3), [1 / 9, 0, 2 / 9, 0, 6 / 9]),
        ({"top_k": 2}, (), [0, 4 / 7, 0, 0, 3 / 7]),
        ({"top_k": 2}, (1,), [0, 0, 0, 1 / 3, 2 / 3]),  # the ban comes first
        ({"top_k": 99}, (), [0.05, 0.4, 0.1, 0.15, 0.3]),
        ({"top_p": 0.39}, (), [0, 1, 0, 0, 0]),
        ({"top_p": 0.69}, (), [0, 4 / 7, 0, 0, 3 / 7]),
        ({"top_p": 0.71}, (), [0, 8 / 17, 0, 3 / 17, 6 / 17]),
        ({"top_p": 0.49}, (1,), [0, 0, 0, 0, 1]),  # 0.3 of the 0.6 left passes 0.49
        ({"top_k": 3, "top_p": 0.8}, (), [0, 4 / 7, 0, 0, 3 / 7]),  # 0.7 of the 0.85 left passes 0.8
        ({"min_p": 0.3}, (), [0, 8 / 17, 0, 3 / 17, 6 / 17]),  # 0.15 is more than 0.3 of 0.4, 0.1 is less
        ({"min_p": 0.3}, (1,), [0, 0, 2 / 11, 3 / 11, 6 / 11]),  # the likeliest that is allowed counts
        ({"min_p": 1.0}, (), [0, 1, 0, 0, 0]),
        ({"min_p": 0.3, "top_p": 0.8}, (), [0, 4 / 7, 0, 0, 3 / 7]),  # 0.7 of the 0.85 left passes 0.8
        ({"temperature": 0.5}, (), (PROBS**2 / (PROBS**2).sum()).tolist()),
        ({"temperature": 0}, (), [0, 1, 0, 0, 0]),
        ({"temperature": 0}, (1,), [0, 0, 0, 0, 1]),
    ],
)
def test_tokens_come_up_as_often_as_the_distribution_says(changes, banned, expected):
    assert frequencies(params(**changes), banned).tolist() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "temperature"),
    [({}, 1.0), ({"temperature": 0.7}, 0.7), ({"top_k": 2, "top_p": 0.5}, 1.0), ({"temperature": 0}, 1.0)],
)
def test_the_reported_logprob_is_the_plain_one_whatever_is_banned_or_cut(changes, temperature):
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = choose_tokens(
        logits, banned_tokens(5, {2}), torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9, 0.99]), params(**changes)
    )
    plain = (logits / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, plain)
    assert 2 not in tokens


@pytest.mark.parametrize("noise", [0.0, 1 - 2**-24])
def test_the_ends_of_the_noise_pick_tokens_that_have_probability(noise):
    logits = torch.full((1, 1000), -1e9)
    logits[0, 500] = 3.0
    tokens, _ = choose_tokens(logits, banned_tokens(1000, ()), torch.tensor([noise]), params())
    assert tokens.tolist() == [500]


def test_a_vocabulary_of_several_blocks_is_cut_where_its_whole_cumulative_distribution_is():
    vocabulary, draws = 300, 4096
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(3)) * 2
    logits[100:260] = -torch.inf  # a whole block in which nothing can be sampled
    edges = logits.double().softmax(-1).cumsum(0)
    noise = torch.cat([(torch.arange(draws) + 0.5) / draws, torch.tensor([0.0, 1 - 2**-24])])
    tokens, _ = choose_tokens(logits.expand(len(noise), -1), banned_tokens(vocabulary, ()), noise, params())
    clear = (noise[:, None] - edges).abs().amin(dim=1) > 1e-6
    assert clear.sum() > 0.9 * draws
    assert torch.equal(tokens[clear], torch.searchsorted(edges, noise.double(), right=True)[clear])
    assert logits[tokens].isfinite().all()


def test_noise_that_rounds_up_to_the_whole_picks_nothing_behind_it():
    rows = 4096
    logits = torch.randn(rows, 40, generator=torch.Generator().manual_seed(5))
    logits[:, 30:] = -torch.inf
    noise = torch.full((rows,), 1 - 2**-24)
    tokens, logprobs = choose_tokens(logits, banned_tokens(40, ()), noise, params())
    assert int(tokens.max()) < 30
    assert logprobs.isfinite().all()


def test_a_ban_holds_even_when_the_banned_token_has_all_the_probability():
    logits = torch.tensor([[200.0, 0.0, 1.0]])
    tokens, logprobs = choose_tokens(logits, banned_tokens(3, {0}), torch.tensor([0.9]), params())
    assert tokens.tolist() == [2]
    assert logprobs.item() == pytest.approx(-199.0)


def test_half_precision_logits_are_reported_in_float32():
    _, logprobs = choose_tokens(LOGITS[None].bfloat16(), banned_tokens(5, ()), torch.tensor([0.5]), params())
    assert logprobs.dtype == torch.float32


def test_banning_the_whole_vocabulary_is_refused():
    with pytest.raises(ValueError, match="all 3 tokens"):
        banned_tokens(3, {0, 1, 2})


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99])
def test_a_nucleus_of_any_width_is_that_of_a_full_sort(top_p):
    vocabulary, draws = 3000, 512
    logits = torch.randn(2, vocabulary, generator=torch.Generator().manual_seed(2)) * torch.tensor([[0.3], [6.0]])
    for row in logits:  # a flat one, whose nucleus has thousands of tokens, and a sharp one
        probs, order = row.softmax(-1).sort(descending=True, stable=True)
        kept = probs * (probs.cumsum(0) - probs < top_p)
        share = torch.zeros(vocabulary).scatter(0, order, kept / kept.sum())
        noise = (torch.arange(draws) + 0.5) / draws
        tokens, _ = choose_tokens(row.expand(draws, -1), banned_tokens(vocabulary, ()), noise, params(top_p=top_p))
        assert share[tokens].min() > 0
        assert (tokens.bincount(minlength=vocabulary) / draws - share).abs().max() < 2.1 / draws
    together, _ = choose_tokens(logits, banned_tokens(vocabulary, ()), torch.tensor([0.4, 0.4]), params(top_p=top_p))
    for row, token in zip(logits, together, strict=True):
        alone, _ = choose_tokens(row[None], banned_tokens(vocabulary, ()), torch.tensor([0.4]), params(top_p=top_p))
        assert alone[0] == token


def test_logits_that_leave_nothing_allowed_have_no_finite_logprob():
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    for temperature in (0.0, 1.0):
        _, logprobs = choose_tokens(logits, banned_tokens(3, {0}), torch.tensor([0.5]), params(temperature=temperature))
        assert not logprobs.isfinite().any()


def noise_of(key: int, count: int) -> torch.Tensor:
    return uniform(torch.full((count,), key), torch.arange(count))


def test_noise_differs_between_seeds_prompts_samples_and_steps():
    keys = {noise_key(seed, prompt, sample) for seed in (0, 1) for prompt in ("a", "b") for sample in (0, 1)}
    assert len(keys) == 8
    assert len({value for key in keys for value in noise_of(key, 100).tolist()}) > 790


def test_noise_is_the_same_on_every_machine_and_in_every_version():
    assert noise_key(7, "val.parquet:3", 2) == -2588575403078053083
    words = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # SplitMix64's published test, seed 1234567
    assert noise_of(1234567, 3).tolist() == [(word >> 40) / 2**24 for word in words]


def test_noise_is_uniform():
    values = torch.cat([noise_of(noise_key(0, "p", sample), 500) for sample in range(20)])
    assert values.min() >= 0
    assert values.max() < 1
    shares = torch.histc(values, bins=10, min=0, max=1) / len(values)
    assert torch.allclose(shares, torch.full((10,), 0.1), atol=0.015)


def test_noise_of_neighbours_is_not_correlated():
    noise = torch.stack([noise_of(noise_key(0, "p", sample), 500) for sample in range(20)])
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.2
    assert torch.corrcoef(torch.stack([noise[:, :-1].flatten(), noise[:, 1:].flatten()]))[0, 1].abs() < 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 0}, "n=0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_p": 0.0}, r"top_p=0\.0"),
        ({"min_p": 1.1}, r"min_p=1\.1"),
        ({"min_p": -0.1}, r"min_p=-0\.1"),
        ({"top_k": 0}, "top_k=0"),
        ({"stop": "END"}, "stop must be a tuple .* 'END'"),
        ({"stop": ("",)}, "stop must be a tuple"),
        ({"stop_token_ids": (-1,)}, r"stop_token_ids .* \(-1,\)"),
        ({"n": 2.0}, r"n must be a whole number, got 2\.0"),
        ({"n": True}, "n must be a whole number, got True"),
        ({"max_tokens": None}, "max_tokens must be a whole number, got None"),
        ({"seed": None}, "seed must be a whole number"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"top_p": None}, "top_p must be a number"),
        ({"temperature": "1"}, "temperature must be a number"),
        ({"temperature": -0.1}, r"temperature=-0\.1"),
        ({"temperature": 1e-45}, "temperature=1.*e-45"),
        ({"stop": None}, "stop must be a tuple .* None"),
        ({"stop_token_ids": 7}, "stop_token_ids must be a tuple .* 7"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        params(**changes)


def test_seeds_and_ids_of_any_size_and_spelling_name_a_noise():
    keys = {
        noise_key(seed, name, 0) for seed in (0, -5, 2**63, 2**80) for name in ("p", "", "\ud800.parquet:1", "ü" * 999)
    }
    assert len(keys) == 16
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_a_completion_takes_eight_bytes_a_token_and_no_others_storage() -> None:
    long = Completion(range(4096), [-0.5] * 4096, "length", weight_version=3)
    part = Completion(long.token_ids[:1000], long.logprobs[:1000], "stop", 3)
    assert (long.token_ids.dtype, long.logprobs.dtype) == ("int32", "float32")
    assert 8000 < len(pickle.dumps(part)) < 8500
    assert pickle.loads(pickle.dumps(part)) == part
    assert part != replace(part, weight_version=4)
    with pytest.raises(ValueError, match=r"a log-prob for each token, got shapes \(2,\), \(1,\)"):
        Completion([1, 2], [-0.5], "stop", 0)
