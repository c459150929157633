"""Every policy loss under every average: right gradients, finite, blind to what is masked, and whole however cut."""

import math
from dataclasses import replace

import pytest
import torch
from core_cases import SETTINGS
from core_models import text_samples

from r1_core import losses
from r1_core.learner.batching import count
from r1_core.learner.logprobs import token_logprobs
from r1_core.losses import AGGREGATIONS, POLICY_LOSSES, Correction, Rejection, ValueLoss, aggregate
from r1_core.losses.correction import correct, diagnose, effective_sample_size, importance_weights
from r1_core.losses.covariance import token_covariance
from r1_core.objective import Objective
from r1_core.types import LossInputs, Sample, Totals

NAMES = [name for name in POLICY_LOSSES if name not in ("geo_mean", "reinforce")]
LENGTHS = [5, 2, 0, 4, 1]


def build(name):
    return losses.get(name)(**SETTINGS.get(name, {}))


def random_inputs(seed=0, lengths=LENGTHS, spread=0.4):
    """Rows of these lengths in float64; the second half of the last values are of tokens that are not trained."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))

    def draw():
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    old = -draw().abs() - 0.1
    return LossInputs(
        logprobs=(old + spread * draw()).requires_grad_(),
        loss_mask=mask,
        advantages=draw(),
        old_logprobs=old,
        totals=Totals(int(mask.sum()), int(mask.any(-1).sum()), length=8),
        ref_logprobs=old + 0.2 * draw(),
        entropy=draw().abs(),
        weights=draw().abs(),
    )


def chosen_for_the_step(loss, inputs):
    """The inputs with the tokens chosen, as `Objective.prepare` does it for a whole step."""
    if not isinstance(loss, losses.policy.SelectingLoss):
        return inputs
    mask = inputs.loss_mask
    selected = loss.select(inputs.advantages[mask], inputs.old_logprobs[mask])
    return replace(inputs, selected=torch.zeros_like(mask).masked_scatter(mask, selected))


def rows_of(inputs, row, width):
    """One row as a micro-batch of its own, without the padding."""
    names = ("logprobs", "loss_mask", "advantages", "old_logprobs", "ref_logprobs", "entropy", "weights", "selected")
    columns = {name: getattr(inputs, name) for name in names}
    cut = {name: value[row : row + 1, :width] for name, value in columns.items() if value is not None}
    return LossInputs(totals=inputs.totals, **cut)


def test_gspo_token_has_the_value_of_gspo_and_with_equal_advantages_its_gradient():
    inputs = random_inputs(spread=0.1)
    inputs = replace(inputs, advantages=inputs.advantages[:, :1].expand_as(inputs.advantages), weights=None)
    results = []
    for name in ("gspo", "gspo_token"):
        loss = Objective(build(name), "seq")(inputs).loss
        results.append((loss, *torch.autograd.grad(loss, inputs.logprobs)))
    torch.testing.assert_close(results[0], results[1])
    assert results[0][1].any()


def test_cispo_keeps_the_gradient_of_tokens_whose_weight_is_clipped():
    inputs = replace(random_inputs(spread=1.5), weights=None)
    loss = losses.get("cispo")(clip_low=0.2, clip_high=0.3)
    values, metrics = loss(inputs)
    (gradient,) = torch.autograd.grad(values.sum(), inputs.logprobs)
    ratio = (inputs.logprobs - inputs.old_logprobs).detach().exp()
    expected = torch.where(inputs.loss_mask, -ratio.clamp(0.8, 1.3) * inputs.advantages, 0.0)
    torch.testing.assert_close(gradient, expected)
    assert metrics["pg_clipfrac_higher"].any()


def test_vespo_weighs_a_sequence_by_one_on_policy_and_less_on_both_sides():
    inputs = replace(random_inputs(), advantages=torch.ones(5, 5).double(), weights=None)
    phi = {}
    for shift in (-0.5, 0.0, 0.5):
        moved = replace(inputs, logprobs=inputs.old_logprobs + shift)
        phi[shift] = losses.get("vespo")()(moved)[1]["vespo_phi"][1].max().item()
    assert phi[0.0] == pytest.approx(1)
    assert phi[-0.5] == pytest.approx(math.exp(2 * -1 + 3 * (1 - math.exp(-1))))
    assert phi[0.5] < 1


def test_luspo_is_gspo_times_the_length():
    inputs = replace(random_inputs(), weights=None)
    luspo = Objective(build("luspo"), "seq")(inputs).loss
    assert luspo.item() == pytest.approx(Objective(build("gspo"), "seq-mean-token-sum")(inputs).loss.item())


def test_sapo_has_the_policy_gradient_on_policy_and_none_far_away():
    inputs = replace(random_inputs(), weights=None)
    far = inputs.old_logprobs.clone()
    far[0] += 4.0
    leaf = far.requires_grad_()
    values, _ = losses.get("sapo")()(replace(inputs, logprobs=leaf))
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    torch.testing.assert_close(gradient[1, :2], -inputs.advantages[1, :2])
    assert gradient[0].abs().max() < 1e-6


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_add_up_to_the_step(name, aggregation):
    loss = build(name)
    inputs = chosen_for_the_step(loss, random_inputs())
    objective = Objective(
        loss, aggregation, "low_var_kl", kl_coef=0.1, entropy_coef=0.01, length=8, off_policy_threshold=0.1
    )
    whole = objective(inputs)
    (expected,) = torch.autograd.grad(whole.loss, inputs.logprobs)
    parts = [objective(rows_of(inputs, row, max(width, 1))) for row, width in enumerate(LENGTHS)]
    total = sum(part.loss for part in parts)
    torch.testing.assert_close(total, whole.loss)
    torch.testing.assert_close(*torch.autograd.grad(total, inputs.logprobs), expected)
    assert expected.any()
    for key, value in whole.metrics.items():
        torch.testing.assert_close(sum(part.metrics[key] for part in parts), value, check_dtype=False)


@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_under_the_mask_change_no_loss(name):
    clean = random_inputs()
    results = []
    for noise in (0.0, float("nan"), float("-inf"), float("inf")):
        where = torch.where(clean.loss_mask, 0.0, noise)
        dirty = {
            field: getattr(clean, field) + where
            for field in ("logprobs", "advantages", "old_logprobs", "ref_logprobs", "entropy", "weights")
        }
        inputs = replace(clean, **dirty)
        for aggregation in ("token", "seq"):
            output = Objective(build(name), aggregation, "low_var_kl", 0.1, 0.01, off_policy_threshold=0.1)(inputs)
            (gradient,) = torch.autograd.grad(output.loss, clean.logprobs)
            results.append([output.loss.item(), *(m.item() for m in output.metrics.values()), *gradient.flatten()])
    for start in (2, 4, 6):
        assert results[start : start + 2] == results[:2]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token", 12 / 3),
        ("seq", (3 + 6) / 2),
        ("seq-mean-token-sum", 12 / 2),
        ("seq-mean-token-sum-norm", 12 / (2 * 4)),
    ],
)
def test_averages_by_hand(mode, expected):
    values = torch.tensor([[2.0, 4.0], [6.0, 9.0], [9.0, 9.0]])
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    assert aggregate(values, mask, mode, Totals(tokens=3, sequences=2, length=4)).item() == pytest.approx(expected)


def test_count_takes_the_longest_answer_as_the_fixed_length():
    assert count(text_samples()) == Totals(tokens=13, sequences=4, length=5)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_covariance_losses_choose_the_share_asked_for_the_same_each_time(name):
    generator = torch.Generator().manual_seed(0)
    advantages, logprobs = torch.randn(2, 1000, generator=generator)
    loss = losses.get(name)(ratio=0.02)
    chosen = loss.select(advantages, logprobs)
    covariance = token_covariance(advantages, logprobs)
    assert chosen.sum() == 20
    assert torch.equal(chosen, loss.select(advantages, logprobs))
    if name == "kl_cov":
        assert covariance[chosen].min() >= covariance[~chosen].max()
    else:
        assert covariance[chosen].min() > 1
        assert covariance[chosen].max() < 5


@pytest.mark.parametrize("clip", [0.2, None])
def test_value_loss_has_the_gradient_of_its_loss_and_ignores_the_mask(clip):
    inputs = random_inputs()
    mask = inputs.loss_mask
    noise = torch.where(mask, 0.0, float("nan"))

    def scalar(values):
        errors, _ = ValueLoss(clip)(values + noise, inputs.old_logprobs, inputs.advantages + noise, mask)
        return aggregate(errors, mask, "token", inputs.totals)

    assert torch.autograd.gradcheck(scalar, inputs.logprobs)


def test_value_loss_is_clipped_around_the_old_values():
    values, mask = torch.tensor([[1.0, 1.0]]), torch.tensor([[True, True]])
    errors, metrics = ValueLoss(0.2)(values, torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), mask)
    assert errors.tolist() == [[pytest.approx(0.32), pytest.approx(2.0)]]
    assert metrics["vf_clipfrac"].tolist() == [[1, 0]]


def test_entropy_gradient_is_right_and_ignores_banned_tokens():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 1, 2])
    banned = torch.zeros(6, dtype=torch.float64)
    banned[5] = -torch.inf

    def entropy(x):
        return token_logprobs(x + banned, targets, 0.7, with_entropy=True, entropy_gradient=True)[1]

    assert torch.autograd.gradcheck(entropy, logits)
    plain = token_logprobs(logits + banned, targets, 0.7, with_entropy=True)[1]
    torch.testing.assert_close(entropy(logits), plain)


# --- rollout correction ------------------------------------------------------------------------------------------

GAP = torch.tensor([[0.5, -1.0, 0.0], [2.0, 0.0, 0.0]]).double()
MASK = torch.tensor([[True, True, True], [True, True, False]])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [[0.5, -1.0, 0.0], [2.0, 0.0]]),
        ("sequence", [[-0.5] * 3, [2.0] * 2]),
        ("geometric", [[-0.5 / 3] * 3, [1.0] * 2]),
    ],
)
def test_importance_weights_at_each_level(level, expected):
    weights = importance_weights(GAP, MASK, level)
    assert weights[MASK].tolist() == pytest.approx([math.exp(x) for row in expected for x in row])
    assert weights[1, 2] == 0


def test_truncation_bounds_the_weights_and_icepop_drops_them():
    clamped = Correction("token", upper=2.0, lower=0.5).weights(GAP, MASK)
    zeroed = Correction("token", upper=2.0, lower=0.5, outside="zero").weights(GAP, MASK)
    assert clamped[MASK].tolist() == pytest.approx([math.exp(0.5), 0.5, 1.0, 2.0, 1.0])
    assert zeroed[MASK].tolist() == pytest.approx([math.exp(0.5), 0.0, 1.0, 0.0, 1.0])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_normalized_weights_have_mean_one(level):
    weights = Correction(level, normalize=True).weights(GAP, MASK)
    rows = weights.sum(-1) / MASK.sum(-1)
    mean = weights[MASK].mean() if level == "token" else rows.mean()
    assert mean.item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("rejection", "kept"),
    [
        (Rejection("k1", "token", 2.0, 0.5), [[1, 0, 1], [0, 1, 0]]),
        (Rejection("k1", "sum", 2.0, 0.5), [[1, 1, 1], [0, 0, 0]]),
        (Rejection("k1", "mean", 2.8, 0.9), [[0, 0, 0], [1, 1, 0]]),
        (Rejection("k2", "max", 1.0), [[1, 1, 1], [0, 0, 0]]),
        (Rejection("k3", "mean", 0.1), [[0, 0, 0], [0, 0, 0]]),
    ],
)
def test_rejection_takes_tokens_or_whole_sequences(rejection, kept):
    assert rejection.keep(GAP, MASK).int().tolist() == kept


def test_effective_sample_size_is_one_for_equal_weights_and_a_share_for_one_that_rules():
    assert effective_sample_size(MASK.double() * 0.3, MASK).item() == pytest.approx(1)
    ruling = torch.tensor([[1.0, 0, 0], [0, 0, 0]])
    assert effective_sample_size(ruling, MASK).item() == pytest.approx(1 / 5)
    assert effective_sample_size(ruling * 0, MASK).item() == 1
    assert effective_sample_size(ruling * torch.nan, MASK).isnan(), "a step of NaN looked like one without a gap"


def test_diagnostics_by_hand_and_of_nothing():
    found = diagnose(GAP, MASK)
    assert found["rollout_gap_mean"].item() == pytest.approx(3.5 / 5)
    assert found["rollout_gap_max"].item() == 2
    assert found["rollout_kl"].item() == pytest.approx(-1.5 / 5)
    assert all(value == 0 for value in diagnose(GAP * 0, MASK & False).values())


def sampled_by_another(samples, seed=5):
    """The samples as an engine with other numerics would have given them."""
    generator = torch.Generator().manual_seed(seed)
    noisy = []
    for sample in samples:
        gap = 0.5 * torch.randn(sample.token_ids.shape, generator=generator)
        noisy.append(replace(sample, rollout_logprobs=sample.old_logprobs + gap))
    return noisy


def test_rejected_tokens_leave_the_loss_mask_and_the_weights_follow_their_tokens():
    sample = Sample(
        torch.arange(4), torch.tensor([False, True, False, True]), torch.arange(4)[None], 0, 0.0,
        old_logprobs=torch.tensor([0.0, -1.0, 0.0, -1.0]), rollout_logprobs=torch.tensor([9.0, -1.5, 9.0, -6.0]),
    )  # fmt: skip
    (corrected,), metrics = correct([sample], Correction(upper=10.0, rejections=(Rejection("k2", "token", 2.0),)))
    assert corrected.loss_mask.tolist() == [False, True, False, False]
    assert corrected.weights.tolist() == pytest.approx([0.0, math.exp(0.5), 0.0, 10.0])
    assert metrics["rollout_gap_max"] == 5.0
    assert metrics["rollout_rejected"] == 0.5
    assert metrics["rollout_weight_max"] == 10.0


@pytest.mark.parametrize("missing", ["rollout_logprobs", "old_logprobs"])
def test_correction_names_the_sample_that_lacks_log_probs(missing):
    samples = [replace(sample, old_logprobs=torch.zeros(sample.token_ids.shape)) for sample in text_samples()]
    samples = sampled_by_another(samples)
    samples[3] = replace(samples[3], **{missing: None})
    with pytest.raises(ValueError, match=f"sample 3 .* no {missing}"):
        correct(samples, Correction())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.get("gspo")(clip_low=1.0), "clip_low is 1.0"),
        (lambda: losses.get("cispo")(clip_high=-1.0), "clip_high is -1.0"),
        (lambda: losses.get("sapo")(tau_neg=0.0), "tau_neg is 0.0"),
        (lambda: losses.get("gmpo")(clip_low=-0.1), "clip_low is -0.1"),
        (lambda: losses.get("kl_cov")(ratio=1.5), "ratio is 1.5"),
        (lambda: losses.get("vespo")(k_pos=-1.0), "k_pos is -1.0"),
        (lambda: ValueLoss(-0.2), "clip is -0.2"),
        (lambda: Correction("tokens"), "level is 'tokens'"),
        (lambda: Correction(upper=0.5, lower=1.0), "lower and upper are 1.0 and 0.5"),
        (lambda: Correction(outside="drop"), "outside is 'drop'"),
        (lambda: Rejection("k4", "token", 1.0), "measure is 'k4'"),
        (lambda: Rejection("k1", "row", 1.0), "span is 'row'"),
        (lambda: Objective(length=0), "length is 0"),
        (lambda: Objective(entropy_coef=-1.0), "entropy_coef is -1.0"),
        (lambda: Objective(kl_penalty="k3", kl_coef=-0.1), "kl_coef is -0.1"),
        (lambda: Objective(entropy_coef=1.0)(replace(random_inputs(), entropy=None)), "no entropy was measured"),
    ],
)
def test_a_wrong_setting_of_a_loss_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("gspo", 3e-4, 4e-4), ("luspo", 2e-3, 2.5e-3), ("dppo_tv", 0.15, 0.15), ("dppo_kl", 0.05, 0.05)],
)
def test_clip_widths_are_the_papers_unless_told_otherwise(name, low, high):
    loss = losses.get(name)()
    assert (loss.clip_low, loss.clip_high) == (low, high)


@pytest.mark.parametrize(
    ("name", "weights"), [("gspo", (1, 1)), ("gspo_token", (1, 1)), ("gmpo", (1, 1)), ("luspo", (1, 4))]
)
def test_the_aggregation_that_a_sequence_loss_is_meant_for_weighs_rows_as_its_paper_does(name, weights):
    mask = torch.arange(8) < torch.tensor([[2], [8]])
    logprobs = torch.full((2, 8), -1.0, dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(logprobs, mask, torch.ones(2, 8), logprobs.detach().clone(), Totals(10, 2))
    loss = losses.get(name)()
    per_token, _ = loss(inputs)
    rows = [
        aggregate(torch.where(torch.arange(2)[:, None] == i, per_token, 0.0), mask, loss.aggregation, inputs.totals)
        for i in (0, 1)
    ]
    assert (rows[1] / rows[0]).item() == pytest.approx(weights[1] / weights[0])
