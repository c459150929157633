"""A user's own estimator and loss: what they declare, and what a made-up batch finds wrong with them."""

import logging
import math
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader

import pytest
import torch

from r1_core.advantages import GRPO, Estimator, GiGPO, OptimalTokenBaseline, assign
from r1_core.learner.microbatch import collate
from r1_core.losses import Correction, PolicyLoss, PPOClip
from r1_core.objective import Objective
from r1_core.own import OwnCodeError, as_estimator, as_loss, try_own_estimator, try_own_loss
from r1_core.settings import Share
from r1_core.types import Sample, Totals


def centred(inputs):
    return inputs.spread(inputs.rewards - 0.5)


def spread_by_std(inputs):
    advantages = torch.zeros(inputs.mask.shape)
    for group in inputs.group_ids.unique():
        rows = inputs.group_ids == group
        rewards = inputs.rewards[rows]
        advantages[rows] = ((rewards - rewards.mean()) / rewards.std()).float()[:, None]
    return advantages


def gradient(inputs):
    losses = torch.where(inputs.loss_mask, -inputs.advantages * inputs.logprobs, 0.0)
    return losses, {"mine": inputs.loss_mask}


def test_a_function_is_asked_for_what_it_declares():
    assert set(as_estimator(centred).needs) == {"old_logprobs"}

    def modest(inputs):
        return centred(inputs)

    modest.needs = ()
    assert as_estimator(modest).needs == ()
    assert (as_loss(gradient).token_wise, as_loss(gradient).aggregation) == (False, "token")

    def sequence(inputs):
        return gradient(inputs)

    sequence.aggregation, sequence.token_wise = "seq", True
    assert (as_loss(sequence).token_wise, as_loss(sequence).aggregation) == (True, "seq")
    modest.needs = ["group"]
    with pytest.raises(ValueError, match=r"mine.py:f needs 'group', which is none of .*; did you mean 'groups'\?"):
        as_estimator(modest, "mine.py:f")


def test_a_class_of_ones_own_is_made_with_its_defaults():
    class Own(PPOClip):
        names = ()

    assert as_loss(Own).function == Own()
    assert as_loss(Own).token_wise
    try_own_loss(Own, "mine.py:Own")
    try_own_estimator(GRPO, "mine.py:GRPO")
    try_own_estimator(GiGPO, "mine.py:GiGPO")


def test_what_is_as_it_should_be_passes():
    try_own_estimator(centred, "mine")
    try_own_loss(gradient, "mine")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda inputs: 3, r"m.py:f gave int 3; an estimator takes AdvantageInputs and returns .* here \[4, 3\]"),
        (lambda inputs: inputs.rewards, r"gave a tensor \[4\] of float64; .*\[N, R\], here \[4, 3\]"),
        (lambda inputs: inputs.mask, r"gave a tensor \[4, 3\] of bool"),
        (lambda inputs: (inputs.token_rewards, {}), "gave tuple"),
        (
            lambda inputs: inputs.squared_probs * 2,
            "m.py:f fails on a made-up batch: TypeError: .* stand in its `needs`",
        ),
        (lambda inputs: {}["x"], "fails on a made-up batch: KeyError: 'x'"),
        (spread_by_std, r"\[nan, nan\] to a made-up answer of a group whose answers all earned the same; .* give 0"),
        (lambda inputs: inputs.spread(inputs.rewards / 0), "whose answers earned 1 and 0"),
    ],
    ids=range(8),
)
def test_an_estimator_that_is_none_is_named_with_what_it_gave(function, message):
    with pytest.raises(ValueError, match=message):
        try_own_estimator(function, "m.py:f")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda i: gradient(i)[0],
            r"m.py:f gave a tensor \[2, 3\] of float32; a loss takes .* a pair: losses \[B, R\]",
        ),
        (lambda i: (gradient(i)[0].sum(), {}), r"gave losses that are a tensor \[\] of float32"),
        (lambda i: (gradient(i)[0], {"x": 1.0}), "gave a metric 'x' that is float 1.0"),
        (lambda i: (gradient(i)[0], None), "gave tuple"),
        (lambda i: (gradient(i)[0].detach(), {}), "without a gradient; compute them from inputs.logprobs"),
        (lambda i: (gradient(i)[0] * math.nan, {}), r"gave losses \[nan, nan, nan, nan\] with the gradient"),
        (lambda i: ((i.logprobs - i.logprobs).sqrt(), {}), "both must be finite"),
        (lambda i: 1 / 0, "fails on a made-up batch: ZeroDivisionError"),
    ],
    ids=range(8),
)
def test_a_loss_that_is_none_is_named_with_what_it_gave(function, message):
    with pytest.raises(ValueError, match=message):
        try_own_loss(function, "m.py:f")


def test_a_class_that_needs_arguments_and_an_average_that_there_is_not_are_named():
    class Own:
        def __init__(self, width):
            self.width = width

    with pytest.raises(ValueError, match=r"m.py:Own is a class and cannot be made without arguments: .*'width'"):
        try_own_loss(Own, "m.py:Own")

    def sequence(inputs):
        return gradient(inputs)

    sequence.aggregation = "sequence"
    with pytest.raises(ValueError, match="no aggregation is called 'sequence'"):
        try_own_loss(sequence, "m.py:f")


def write_into_advantages(inputs):
    inputs.advantages.mul_(0)
    return gradient(inputs)


def write_into_logprobs(inputs):
    inputs.logprobs[~inputs.loss_mask] = 0.0
    return gradient(inputs)


def write_past_the_gradient(inputs):
    inputs.logprobs.data.zero_()
    return gradient(inputs)


@pytest.mark.parametrize(
    ("function", "field"),
    [
        (write_into_advantages, "advantages"),
        (write_into_logprobs, "logprobs"),
        (write_past_the_gradient, "logprobs"),
    ],
)
def test_a_loss_that_writes_into_its_inputs_is_refused_by_field(function, field):
    with pytest.raises(ValueError, match=rf"m.py:f writes into inputs.{field}; make a new tensor, as torch.where does"):
        try_own_loss(function, "m.py:f")


@pytest.mark.parametrize(
    ("function", "field"), [(write_into_advantages, "advantages"), (write_into_logprobs, "logprobs")]
)
def test_a_loss_that_writes_into_its_inputs_in_a_step_ends_it(function, field):
    given = [replace(one, advantages=torch.ones(3)) for one in samples([1.0, 0.0])]
    logprobs = torch.full((4,), -1.0, requires_grad=True)
    inputs = collate(given, padding_free=True).loss_inputs(logprobs, None, Totals(4, 2))
    with pytest.raises(OwnCodeError, match=f"m.py:f writes into inputs.{field}"):
        as_loss(function, "m.py:f")(inputs)


def test_an_estimator_that_writes_into_its_inputs_is_refused_by_field():
    def f(inputs):
        inputs.token_rewards.sub_(0.5)
        return inputs.token_rewards

    with pytest.raises(ValueError, match=r"m.py:f writes into inputs.token_rewards"):
        try_own_estimator(f, "m.py:f")
    with pytest.raises(OwnCodeError, match=r"m.py:f writes into inputs.token_rewards"):
        assign(samples([1.0, 0.0]), as_estimator(f, "m.py:f"))


@dataclass(frozen=True)
class Asymmetric(PolicyLoss):
    """As CONTRIBUTING.md tells to add a loss."""

    negative: Share = 0.5

    def __call__(self, inputs):
        return gradient(inputs)


@dataclass(frozen=True)
class Shrunk(Estimator):
    factor: "Share" = 0.5  # as of a module with postponed annotations

    def __call__(self, inputs):
        return inputs.spread(inputs.rewards * self.factor)


def test_ranges_of_settings_are_held_to_without_a_word_of_the_class():
    for build in (lambda: Asymmetric(negative=7), lambda: replace(Asymmetric(), negative=7)):
        with pytest.raises(ValueError, match="negative is 7; it must be at most 1"):
            build()
    with pytest.raises(ValueError, match="factor is -1; it must be at least 0"):
        Shrunk(factor=-1)
    assert (Asymmetric().negative, Shrunk(0.25).factor) == (0.5, 0.25)


def samples(rewards, gaps=(0.0, 0.0)):
    tokens, logprobs = torch.arange(3), torch.tensor([0.0, -1.0, -1.0])
    return [
        Sample(
            tokens, tokens > 0, tokens[None], 7, reward, old_logprobs=logprobs, rollout_logprobs=logprobs - gap,
            squared_probs=torch.tensor([0.0, 0.4, 0.4]),
        )
        for reward, gap in zip(rewards, gaps, strict=True)
    ]  # fmt: skip


def test_an_advantage_that_is_not_finite_is_logged_with_sample_and_estimator(caplog):
    with caplog.at_level(logging.WARNING):
        assigned = assign(samples([1.0, 1.0]), as_estimator(spread_by_std, "mine.py:spread"))
    assert assigned[0].advantages.isnan().any()
    assert "mine.py:spread gives 2 of 2 samples advantages that are not finite" in caplog.text
    assert "first sample 0 (group 7, reward 1)" in caplog.text


def test_the_optimal_token_baseline_weighs_answers_by_the_squared_correction_weight():
    gap = math.log(1.5)
    even, uneven = (
        assign(samples([1.0, 0.0], gaps), OptimalTokenBaseline(), correction=Correction())
        for gaps in ((0, 0), (gap, 0))
    )
    # The baseline is Σ W r / Σ W with W of the first answer 1.5² times that of the second.
    assert float(even[1].advantages[1]) == pytest.approx(-1 / 2)
    assert float(uneven[1].advantages[1]) == pytest.approx(-(1.5**2) / (1.5**2 + 1))
    assert assign(samples([1.0, 0.0], (gap, 0)), OptimalTokenBaseline())[1].advantages[1] == even[1].advantages[1]


def test_fields_of_the_samples_are_laid_out_for_those_who_need_them():
    seen = []

    def spy(inputs):
        seen.append([inputs.old_logprobs, inputs.ref_logprobs, inputs.squared_probs])
        return inputs.token_rewards

    given = [replace(sample, ref_logprobs=sample.old_logprobs - 1) for sample in samples([1.0, 0.0])]
    spy.needs = ("ref_logprobs", "squared_probs")
    assign(given, as_estimator(spy))
    ((old, reference, squared),) = seen
    assert old is None
    assert reference.tolist() == [[-2.0, -2.0]] * 2
    assert squared.flatten().tolist() == pytest.approx([0.4] * 4)


def test_log_probs_of_the_engine_reach_whoever_needs_them_and_nobody_else():
    seen = []

    def behind(inputs):
        seen.append(inputs.rollout_logprobs)
        return gradient(inputs)

    given = [replace(sample, advantages=torch.zeros(3)) for sample in samples([1.0, 0.0], gaps=(0.5, 0.0))]
    for needs, found in (((), None), (("rollout_logprobs",), [[-1.5, -1.5], [-1.0, -1.0]])):
        behind.needs = needs
        prepared, _ = Objective(as_loss(behind)).prepare(given)
        inputs = collate(prepared, padding_free=True).loss_inputs(torch.zeros(4), None, Totals(4, 2))
        assert (None if inputs.rollout_logprobs is None else inputs.rollout_logprobs.tolist()) == found
    try_own_loss(behind, "mine.py:behind")
    assert seen[-1].shape == (2, 3)
    with pytest.raises(ValueError, match="no rollout_logprobs, which this loss needs: their engine gave none"):
        Objective(as_loss(behind)).prepare([replace(sample, rollout_logprobs=None) for sample in given])

    def estimator(inputs):
        return inputs.rollout_logprobs

    estimator.needs = ("rollout_logprobs",)
    assert assign(given, as_estimator(estimator))[0].advantages.tolist() == [0.0, -1.5, -1.5]


def test_what_fails_in_a_step_is_named_with_its_file_and_line(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def helper(x):\n    return x['no']\n\ndef f(inputs):\n    return helper({})\n\n"
        "def few(inputs):\n    return inputs.loss_mask.float()[:1], {}\n"
    )
    module = SourceFileLoader("mine", str(tmp_path / "mine.py")).load_module()
    given = [replace(sample, advantages=torch.zeros(3)) for sample in samples([1.0, 0.0])]
    inputs = collate(given, padding_free=True).loss_inputs(torch.zeros(4), None, Totals(4, 2))
    with pytest.raises(OwnCodeError, match=r"^./mine.py:f fails in line 2 \(return x\['no'\]\): KeyError: 'no'$"):
        as_loss(module.f, "./mine.py:f")(inputs)
    with pytest.raises(OwnCodeError, match=r"mine.py:f fails in line 2"):
        assign(given, as_estimator(module.f, "./mine.py:f"))
    with pytest.raises(OwnCodeError, match=r"few gave tuple .*, not losses \[2, 2\] and metrics by name"):
        as_loss(module.few, "./mine.py:few")(inputs)
    with pytest.raises(OwnCodeError, match=r"few gave tuple .*, not advantages \[2, 2\]"):
        assign(given, as_estimator(module.few, "./mine.py:few"))


def test_a_loss_that_needs_the_full_kl_has_it_measured():
    def held(inputs):
        losses, metrics = gradient(inputs)
        return losses + torch.where(inputs.loss_mask, inputs.full_kl, 0.0), metrics

    held.needs = ("full_kl",)
    objective = Objective(as_loss(held))
    assert objective.full_kl
    assert objective.needs == frozenset()
    try_own_loss(held, "mine.py:held")
    with pytest.raises(TypeError, match=r"make a loss of a function by r1_core.own.as_loss"):
        Objective(held)
