"""The policy loss, KL estimates and averages against reference numbers, and what must not disturb them."""

import pytest
import torch

from r1_core import kl, losses
from r1_core.losses import PPOClip, aggregate
from r1_core.objective import Objective
from r1_core.types import LossInputs, Totals

MASK = [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]]
OLD = [
    [-2.374, -0.354, -1.394, -0.869, -0.302, -0.334],
    [-0.339, -0.59, -0.63, -1.638, -0.19, -0.318],
    [-0.042, -0.611, -0.393, -0.56, -0.948, -1.503],
    [-0.247, -1.323, -0.663, -0.411, -0.5, -0.449],
]
NEW = [
    [-2.985, 0.283, -1.799, -0.222, -0.376, -0.16],
    [-0.04, -0.968, -0.632, -1.608, -0.807, 0.496],
    [0.564, -0.463, -0.408, 0.039, -1.655, -1.336],
    [-0.852, -1.505, -0.178, 0.329, -0.609, -0.4],
]
ADVANTAGES = [
    [0.095, 0.408, -0.404, -1.098, -0.1, -1.359],
    [-0.251, -0.282, -0.917, -0.269, 0.494, -1.079],
    [-0.322, -1.25, -0.049, 0.693, 0.046, 2.437],
    [0.408, -0.79, 0.782, 0.857, -1.081, 2.6],
]
# Loss, and the gradient of the first row, by way of averaging.
MIXED = {
    "token": (0.4156057, [-0.003222922, 0.0, 0.0, 0.1310602, 0.005804198, 0.1010803]),
    "seq": (0.3848361, [-0.002148614, 0.0, 0.0, 0.08737349, 0.003869466, 0.0673869]),
}


def loss_inputs(logprobs, old, advantages, mask, **more):
    mask = torch.tensor(mask).bool()
    return LossInputs(
        logprobs=torch.tensor(logprobs, dtype=torch.float64, requires_grad=True),
        loss_mask=mask,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        old_logprobs=torch.tensor(old, dtype=torch.float64),
        totals=Totals(int(mask.sum()), int(mask.any(-1).sum())),
        **more,
    )


@pytest.mark.parametrize("mode", MIXED)
def test_clipped_loss_matches_reference_numbers(mode):
    inputs = loss_inputs(NEW, OLD, ADVANTAGES, MASK)
    output = Objective(PPOClip(0.2, 0.28, 3.0), mode)(inputs)
    output.loss.backward()
    loss, gradient = MIXED[mode]
    assert output.loss.item() == pytest.approx(loss, abs=1e-6)
    assert output.metrics["pg_loss"].item() == pytest.approx(loss, abs=1e-6)
    assert inputs.logprobs.grad[0].tolist() == pytest.approx(gradient, abs=1e-6)
    assert output.metrics["ppo_kl"].item() == pytest.approx(-0.008187503, abs=1e-8)
    assert output.metrics["pg_clipfrac_higher"].item() == pytest.approx(0.25)
    assert output.metrics["pg_clipfrac_lower"].item() == 0


def test_dual_clip_bounds_the_loss_of_a_bad_token_and_stops_its_gradient():
    inputs = loss_inputs([[2.0, 0.5]], [[-1.0, 0.0]], [[-0.5, -0.5]], [[1, 1]])
    output = Objective(PPOClip(clip_dual=3.0))(inputs)
    output.loss.backward()
    assert output.loss.item() == pytest.approx((0.5 * 3 + 0.5 * 1.6487213) / 2)
    assert inputs.logprobs.grad.tolist() == [[0.0, pytest.approx(0.25 * 1.6487213)]]
    assert output.metrics["pg_clipfrac_lower"].item() == 0.5


def test_the_two_clip_widths_are_separate():
    inputs = loss_inputs([[0.25, -0.25]], [[0.0, 0.0]], [[1.0, -1.0]], [[1, 1]])
    clipped = {}
    for low, high in ((0.1, 0.5), (0.5, 0.1)):
        _, metrics = PPOClip(low, high)(inputs)
        clipped[low, high] = metrics["pg_clipfrac_higher"].tolist()
    assert clipped == {(0.1, 0.5): [[0, 1]], (0.5, 0.1): [[1, 0]]}


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("penalty", list(kl.KL_ESTIMATORS))
def test_log_ratios_of_fifty_stay_finite(sign, penalty):
    inputs = loss_inputs(
        [[50.0 * sign, -50.0]], [[0.0, 0.0]], [[-1.0, 1.0]], [[1, 1]], ref_logprobs=torch.zeros(1, 2).double()
    )
    output = Objective(kl_penalty=penalty, kl_coef=0.01)(inputs)
    output.loss.backward()
    assert output.loss.isfinite()
    assert inputs.logprobs.grad.isfinite().all()


def test_nan_and_infinity_under_the_mask_change_nothing():
    poison = torch.tensor([[0.0, float("nan")], [float("-inf"), 0.0]])
    mask = [[1, 0], [0, 1]]
    outputs = []
    for noise in (torch.zeros(2, 2), poison):
        inputs = loss_inputs([[-1.0, -2.0], [-3.0, -1.5]], [[-1.1] * 2] * 2, [[0.5, 0.5], [-1.0, -1.0]], mask)
        leaf = inputs.logprobs
        inputs = LossInputs(
            leaf + noise, inputs.loss_mask, inputs.advantages + noise, inputs.old_logprobs + noise, inputs.totals,
            ref_logprobs=inputs.old_logprobs + noise, entropy=torch.ones(2, 2) + noise,
        )  # fmt: skip
        for mode in ("token", "seq"):
            output = Objective(aggregation=mode, kl_penalty="low_var_kl", kl_coef=0.1)(inputs)
            output.loss.backward()
            outputs.append([output.loss.item(), *(m.item() for m in output.metrics.values()), *leaf.grad.flatten()])
    assert outputs[:2] == outputs[2:]


@pytest.mark.parametrize("mode", ["token", "seq"])
def test_a_batch_without_trained_tokens_is_zero(mode):
    inputs = loss_inputs(NEW, OLD, ADVANTAGES, torch.zeros(4, 6).tolist())
    output = Objective(aggregation=mode)(inputs)
    output.loss.backward()
    assert output.loss.item() == 0
    assert not inputs.logprobs.grad.any()


def test_seq_average_ignores_rows_without_tokens():
    values, mask = torch.tensor([[2.0, 4.0], [9.0, 9.0]]), torch.tensor([[True, True], [False, False]])
    assert aggregate(values, mask, "seq", Totals(tokens=2, sequences=1)).item() == 3


@pytest.mark.parametrize("mode", ["token", "seq"])
def test_shares_of_micro_batches_add_up(mode):
    whole = loss_inputs(NEW, OLD, ADVANTAGES, MASK, ref_logprobs=torch.tensor(OLD).double() + 0.3)
    objective = Objective(aggregation=mode, kl_penalty="mse", kl_coef=0.01)
    expected = {name: value.item() for name, value in objective(whole).metrics.items()}
    sums = dict.fromkeys(expected, 0.0)
    for row in range(4):
        rows = slice(row, row + 1)
        part = LossInputs(
            whole.logprobs[rows], whole.loss_mask[rows], whole.advantages[rows], whole.old_logprobs[rows],
            whole.totals, whole.ref_logprobs[rows],
        )  # fmt: skip
        for name, value in objective(part).metrics.items():
            sums[name] += value.item()
    assert sums == pytest.approx(expected, abs=1e-12)
    assert expected["kl_coef"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("name", "expected", "gradient"),
    [
        ("kl", [-2.318, -0.035, 2.362], [1, 1, 1]),
        ("abs", [2.318, 0.035, 2.362], [-1, -1, 1]),
        ("mse", [2.686562, 0.0006125, 2.789522], [-2.318, -0.035, 2.362]),
        ("low_var_kl", [6.837344, 0.0006196, 1.456232], [-9.155344, -0.0356197, 0.9057684]),
    ],
)
def test_kl_estimates_match_reference_numbers(name, expected, gradient):
    logprobs = torch.tensor([-0.058, -0.537, -0.67], dtype=torch.float64, requires_grad=True)
    values = kl.get(name)(logprobs, torch.tensor([2.26, -0.502, -3.032], dtype=torch.float64))
    values.sum().backward()
    assert values.tolist() == pytest.approx(expected, abs=1e-5)
    assert logprobs.grad.tolist() == pytest.approx(gradient, abs=1e-5)


@pytest.mark.parametrize("gap", [5.0, 30.0])
def test_low_var_kl_still_pulls_towards_a_far_reference(gap):
    logprobs = torch.tensor([-gap], requires_grad=True)
    kl.get("low_var_kl")(logprobs, torch.zeros(1)).sum().backward()
    assert logprobs.grad.item() < -100


def test_the_kl_term_is_added_with_its_coefficient():
    inputs = loss_inputs(NEW, OLD, ADVANTAGES, MASK, ref_logprobs=torch.tensor(OLD).double())
    plain, with_kl = Objective()(inputs), Objective(kl_penalty="abs", kl_coef=0.5)(inputs)
    assert with_kl.metrics["kl_loss"].item() > 0.1
    assert (with_kl.loss - plain.loss).item() == pytest.approx(0.5 * with_kl.metrics["kl_loss"].item())
    assert "kl_loss" not in plain.metrics


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Objective(aggregation="tokens"), "'tokens'.*token, seq"),
        (lambda: Objective(kl_penalty="low_var"), "'low_var'.*did you mean 'low_var_kl'"),
        (lambda: losses.get("ppo2"), "'ppo2'.*default"),
        (lambda: PPOClip(clip_low=1.5), "clip_low is 1.5"),
        (lambda: PPOClip(clip_high=-0.1), "clip_high is -0.1"),
        (lambda: PPOClip(clip_dual=1.0), "clip_dual is 1.0"),
        (lambda: Objective(kl_penalty="kl")(loss_inputs(NEW, OLD, ADVANTAGES, MASK)), "no ref_logprobs"),
        (lambda: Objective(kl_penalty="full")(loss_inputs(NEW, OLD, ADVANTAGES, MASK)), "no KL over the vocabulary"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(build, message):
    with pytest.raises(ValueError, match=message):
        build()
