"""A linear head's statistics in chunks are those of all logits at once, with gradients, however they are taken."""

import pytest
import torch

from r1_core.learner import linear_head as room
from r1_core.learner.linear_head import ENTROPY, LOGPROB, SQUARED_PROBS, HeadSettings, token_stats

VOCABULARY, WIDTH = 11, 5
WAYS = ("recomputed", "token_wise", "frozen")
TOKENS = (0, 1, 3, 7)  # chunks hold 3


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Three tokens going forward; going backward, some of the vocabulary that does not divide it."""
    monkeypatch.setattr(room, "CHUNK_BYTES", 3 * VOCABULARY * 8)


def make(tokens, *, bias=False, dtype=torch.float64, scale=1.0):
    draw = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, WIDTH, generator=draw, dtype=torch.float64).mul(scale).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    shift = torch.randn(VOCABULARY, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    slopes = torch.randn(tokens, 3, generator=draw, dtype=torch.float64)
    return hidden, weight, shift, torch.randint(VOCABULARY, (tokens,), generator=draw), slopes


def plain_stats(hidden, weight, bias, targets, temperature):
    """Written out, in float64."""
    logits = (hidden.double() @ weight.double().t() + (0.0 if bias is None else bias.double())) / temperature
    logprobs = logits.log_softmax(-1)
    terms = torch.where(logprobs.isneginf(), 0.0, logprobs) * logprobs.exp()
    columns = logprobs.gather(-1, targets[:, None])[:, 0], -terms.sum(-1), logprobs.exp().square().sum(-1)
    return torch.stack(columns, dim=-1)


def chunked(way, tensors, settings, slopes=None, **more):
    hidden, weight, bias, targets = tensors
    if way == "frozen":
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    if way == "token_wise":
        more["loss_gradient"] = lambda stats: slopes
    return token_stats(hidden, weight, bias, targets, settings, **more)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients_are_those_of_all_logits(way, entropy_gradient, bias, tokens):
    *tensors, slopes = make(tokens, bias=bias)
    slopes[:, SQUARED_PROBS] = 0
    if not entropy_gradient:
        slopes[:, ENTROPY] = 0
    settings = HeadSettings(torch.float64, 0.7, entropy_gradient, squared_probs=True)
    expected, found = plain_stats(*tensors, 0.7), chunked(way, tensors, settings, slopes)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    leaves = tensors[:1] if way == "frozen" else [t for t in tensors[:3] if t is not None]
    for one, other in zip(
        torch.autograd.grad((found * slopes).sum(), leaves),
        torch.autograd.grad((expected * slopes).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("way", ["recomputed", "frozen"])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_gradcheck(way, entropy_gradient):
    hidden, weight, bias, targets, _ = make(4, bias=True)
    settings = HeadSettings(torch.float64, 1.3, entropy_gradient)
    columns = [LOGPROB, ENTROPY] if entropy_gradient else [LOGPROB]

    def stats(hidden, *head):
        return chunked(way, (hidden, *(head or (weight, bias)), targets), settings)[:, columns]

    assert torch.autograd.gradcheck(stats, (hidden,) if way == "frozen" else (hidden, weight, bias))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 0.03)])
def test_less_than_float64_is_as_near_as_its_digits_allow(way, dtype, tolerance):
    *tensors, slopes = make(7, dtype=dtype)
    slopes[:, LOGPROB + 1 :] = 0
    found = chunked(way, tensors, HeadSettings(dtype), slopes.float())
    assert found.dtype == torch.float32
    exact = plain_stats(*tensors, 1.0)
    torch.testing.assert_close(found[:, :2].double(), exact[:, :2], atol=tolerance, rtol=tolerance)
    leaves = tensors[:1] if way == "frozen" else tensors[:2]
    for one, other in zip(
        torch.autograd.grad((found * slopes.float()).sum(), leaves),
        torch.autograd.grad((exact * slopes).sum(), leaves),
        strict=True,
    ):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other.double(), atol=tolerance * 3, rtol=tolerance)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("banned", [False, True])
def test_logits_of_ten_thousand_and_banned_tokens_stay_finite_and_right(way, banned):
    hidden, weight, bias, targets, slopes = make(6, bias=True, dtype=torch.float32, scale=1e4)
    targets = targets.clamp(max=8)
    slopes[:, SQUARED_PROBS] = 0
    if banned:
        bias = bias.detach().index_fill(0, torch.tensor([9]), -torch.inf)
    settings = HeadSettings(torch.float32, entropy_gradient=True, squared_probs=True)
    found = chunked(way, (hidden, weight, bias, targets), settings, slopes.float())
    expected = plain_stats(hidden, weight, bias, targets, 1.0)
    # Logits of 1e4 have a resolution of 1e-3.
    torch.testing.assert_close(found.double(), expected, atol=0.05, rtol=1e-5)
    (grad,) = torch.autograd.grad((found * slopes.float()).sum(), hidden)
    (other,) = torch.autograd.grad((expected * slopes).sum(), hidden)
    torch.testing.assert_close(grad.double(), other.double(), atol=0.05, rtol=1e-3)


@pytest.mark.parametrize("way", ["recomputed", "token_wise"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_store_takes_the_gradient_of_the_weight_in_place(way, dtype):
    *tensors, slopes = make(7, dtype=dtype)
    slopes[:, LOGPROB + 1 :] = 0
    weight, slopes = tensors[1], slopes.to(dtype)
    (expected,) = torch.autograd.grad((chunked(way, tensors, HeadSettings(dtype), slopes) * slopes).sum(), weight)
    weight.grad = torch.ones_like(weight)
    place = weight.grad.data_ptr()
    (chunked(way, tensors, HeadSettings(dtype), slopes, store=weight.grad) * slopes).sum().backward()
    assert weight.grad.data_ptr() == place
    torch.testing.assert_close(weight.grad, expected + 1, atol=1e-5, rtol=0)


@pytest.mark.parametrize("way", ["recomputed", "token_wise"])
def test_a_store_of_half_precision_is_left_to_autograd(way):
    *tensors, slopes = make(7, dtype=torch.bfloat16)
    weight, slopes = tensors[1], slopes.float()
    store = torch.zeros_like(weight)
    (grad,) = torch.autograd.grad(
        (chunked(way, tensors, HeadSettings(torch.bfloat16), slopes, store=store) * slopes).sum(), weight
    )
    assert not store.any()
    assert grad.any()


def test_float32_weights_are_read_in_half_precision_where_asked_and_get_float32_gradients():
    *tensors, slopes = make(7, dtype=torch.float32)
    slopes[:, LOGPROB + 1 :] = 0
    exact = torch.autograd.grad((plain_stats(*tensors, 1.0) * slopes).sum(), tensors[:2])
    for way in ("recomputed", "token_wise"):
        found = chunked(way, tensors, HeadSettings(torch.bfloat16), slopes.float())
        grads = torch.autograd.grad((found * slopes.float()).sum(), tensors[:2])
        for one, other in zip(grads, exact, strict=True):
            assert one.dtype == torch.float32
            assert not torch.equal(one, other)
            torch.testing.assert_close(one, other, atol=0.1, rtol=0.05)


def test_all_ways_give_the_same_bits():
    *tensors, slopes = make(7, dtype=torch.float32)
    settings = HeadSettings(torch.float32, 0.9)
    with torch.no_grad():
        plain = chunked("recomputed", tensors, settings)
    assert all(torch.equal(chunked(way, tensors, settings, slopes.float()), plain) for way in WAYS)


def test_a_loss_that_was_not_foreseen_is_refused():
    *tensors, slopes = make(7)
    stats = chunked("token_wise", tensors, HeadSettings(torch.float64), slopes)
    with pytest.raises(RuntimeError, match="set `token_wise` to False"):
        (stats[:, LOGPROB] * slopes[:, LOGPROB]).sum().mul(1.01).backward()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_is_passed_on(value):
    *tensors, slopes = make(7)
    slopes[:, LOGPROB + 1 :] = 0
    slopes[3, LOGPROB] = value
    stats = chunked("token_wise", tensors, HeadSettings(torch.float64), slopes)
    (stats[:, LOGPROB] * slopes[:, LOGPROB]).sum().backward()
    assert not tensors[1].grad.isfinite().all()


def test_a_gradient_that_is_not_the_one_foreseen_is_refused_beside_one_that_is_not_finite():
    *tensors, slopes = make(7)
    slopes[3, LOGPROB] = float("nan")
    for other in (slopes.clone(), slopes.clone()):
        other[5, LOGPROB] = float("nan") if other[5, LOGPROB].isfinite() else 0.0
        stats = chunked("token_wise", tensors, HeadSettings(torch.float64), slopes)
        with pytest.raises(RuntimeError, match="set `token_wise` to False"):
            (stats[:, LOGPROB] * other[:, LOGPROB]).sum().backward()


def test_the_gradient_of_the_weight_is_handed_over_without_a_copy():
    *tensors, slopes = make(7)
    slopes[:, LOGPROB + 1 :] = 0
    stats = chunked("token_wise", tensors, HeadSettings(torch.float64), slopes)
    place = stats.grad_fn.sums.data_ptr()
    (stats * slopes).sum().backward()
    assert tensors[1].grad.data_ptr() == place
