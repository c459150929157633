"""Preference losses as advantages: the gradient of dense autograd and the numbers of TRL, however samples are cut."""

import json
import logging
import math
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from core_models import in_float64, loud, picture_samples, preference_samples, qwen2, reads_pack
from torch import nn
from torch.nn.functional import logsigmoid

from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.checkpoint import Adaptation
from r1_core.learner.optim import build_optimizer
from r1_core.preference import OBJECTIVE, PreferenceLoss, mismatch, weigh
from r1_core.types import Sample, rows

TRL = json.loads((Path(__file__).parent / "core_preference_trl.json").read_text("utf-8"))
LABELS = [True, False, True, True, False, False]
LOSSES = {
    "dpo": PreferenceLoss("dpo"),
    "cdpo": PreferenceLoss("cdpo", label_smoothing=0.2),
    "ipo": PreferenceLoss("ipo", beta=0.3),
    "simpo": PreferenceLoss("simpo", gamma=0.8),
    "kto": PreferenceLoss("kto", beta=0.2, undesirable_weight=0.75),
}
WHOLE, PARTS = MicroLimit(100), MicroLimit(3)  # three samples to a micro-batch split the second pair
LAYOUTS = {
    "packed, cut": Batching(True, PARTS, PARTS),
    "padded, cut": Batching(False, PARTS, PARTS),
    "prompts shared": Batching(True, WHOLE, WHOLE, share_prompts=True),
    "prompts shared, cut": Batching(True, PARTS, PARTS, share_prompts=True),
}


def learner_for(policy, batching, reference=None, adaptation=None):
    optimizer = build_optimizer([(n, p) for n, p in policy.named_parameters() if p.requires_grad], lr=1e-2)
    return Learner(policy, optimizer, lambda step: 1.0, reference=reference, batching=batching, adaptation=adaptation)


def token_logprobs(model, samples):
    """Log-probs [L] of each sample, alone, by the model's own forward pass; 0 on the first token."""
    found = []
    for sample in samples:
        logits = model(input_ids=sample.token_ids[None]).logits[0, :-1]
        chosen = logits.log_softmax(-1).gather(1, sample.token_ids[1:, None])[:, 0]
        found.append(nn.functional.pad(chosen, (1, 0)) * sample.loss_mask)
    return found


def written_out(kind, policy, reference, lengths, kl=0.0):
    """The losses of the papers, of sums of log-probs [6]."""
    c, r, ref_c, ref_r = policy[0::2], policy[1::2], reference[0::2], reference[1::2]
    margin = (c - ref_c) - (r - ref_r)
    if kind == "dpo":
        return -logsigmoid(0.1 * margin).mean()
    if kind == "cdpo":
        return (-0.8 * logsigmoid(0.1 * margin) - 0.2 * logsigmoid(-0.1 * margin)).mean()
    if kind == "ipo":
        gap = (c - ref_c) / lengths[0::2] - (r - ref_r) / lengths[1::2]
        return (gap - 1 / 0.6).square().mean()
    if kind == "simpo":
        return -logsigmoid(2.0 * (c / lengths[0::2] - r / lengths[1::2]) - 0.8).mean()
    gap = 0.2 * (policy - reference - kl)
    pairs = zip(gap, LABELS, strict=True)
    each = [1 - torch.sigmoid(z) if chosen else 0.75 * (1 - torch.sigmoid(-z)) for z, chosen in pairs]
    return torch.stack(each).mean()


def gradient_of(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def labels_of(loss):
    return LABELS if loss.kind == "kto" else None


@pytest.mark.parametrize("kind", LOSSES)
def test_the_gradient_is_that_of_dense_autograd_in_float64(kind, monkeypatch):
    samples, loss = preference_samples(), LOSSES[kind]
    plain, reference = (in_float64(loud(qwen2(seed)), monkeypatch) for seed in (1, 0))
    own = token_logprobs(plain, samples)
    with torch.no_grad():
        others = token_logprobs(reference, samples)
        crossed = [
            replace(sample, old_logprobs=mine, ref_logprobs=theirs)
            for sample, mine, theirs in zip(
                mismatch(samples), *(token_logprobs(m, mismatch(samples)) for m in (plain, reference)), strict=True
            )
        ]
    kl = torch.stack([s.old_logprobs.sum() - s.ref_logprobs.sum() for s in crossed]).mean()
    assert kl > 0.1
    sums, fixed = (torch.stack([each.sum() for each in found]) for found in (own, others))
    lengths = torch.tensor([float(sample.response_length) for sample in samples])
    expected = written_out(kind, sums, fixed, lengths.double(), kl)
    expected.backward()
    known = [
        replace(sample, old_logprobs=mine.detach(), ref_logprobs=theirs)
        for sample, mine, theirs in zip(samples, own, others, strict=True)
    ]
    weighed, metrics = weigh(known, loss, labels_of(loss), mismatched=crossed if kind == "kto" else ())
    assert metrics["preference_loss"] == pytest.approx(expected.item(), abs=1e-10)
    wanted = gradient_of(plain)
    assert wanted.abs().max() > 1e-3
    for name, batching in LAYOUTS.items():
        learner = learner_for(in_float64(reads_pack(loud(qwen2(1))), monkeypatch), batching)
        learner.forward_backward(weighed, OBJECTIVE)
        found = gradient_of(learner.model)
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_metrics_and_gradients_are_those_that_trl_computed(kind):
    expected = TRL[kind]
    loss = LOSSES[kind]
    settings = {name: getattr(loss, "scale" if name == "beta" else name) for name in expected["settings"]}
    assert settings == expected["settings"]
    assert TRL["labels"] == LABELS
    seeds = (1, 0) if kind == "kto" else (0, 1)
    policy, reference = (reads_pack(loud(qwen2(seed))) for seed in seeds)
    learner = learner_for(policy, LAYOUTS["prompts shared, cut"], reference)
    samples = learner.add_logprobs(preference_samples(), loss.needs)
    assert (samples[0].ref_logprobs is None) == (kind == "simpo")
    crossed = learner.add_logprobs(mismatch(samples)) if kind == "kto" else ()
    weighed, metrics = weigh(samples, loss, labels_of(loss), mismatched=crossed)
    learner.forward_backward(weighed, OBJECTIVE)
    assert metrics["preference_loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert gradient_of(policy).double().norm().item() == pytest.approx(expected["grad_norm"], rel=1e-5)
    same = {*metrics} & {*expected["metrics"]}
    assert {"rewards/chosen", "rewards/rejected", "rewards/margins"} <= same
    for name in same:
        assert metrics[name] == pytest.approx(expected["metrics"][name], rel=1e-5, abs=1e-5), name
    assert ("rewards/accuracies" in same) == (kind != "kto") == (not metrics.get("kl"))


class Adapted(nn.Linear):
    """A head with something trained beside it, which can be left out."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(head.in_features, head.out_features, bias=False)
        self.weight = head.weight
        self.factor = nn.Parameter(0.3 * torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(5)))
        self.used = True

    def forward(self, hidden):
        return super().forward(hidden) + (hidden @ self.factor.t() if self.used else 0)


def test_the_base_of_an_adapter_is_the_reference():
    """The gradient is that of a policy whose weights are merged, in the adapter's directions."""
    model = reads_pack(loud(qwen2(0)))
    merged, base = reads_pack(loud(qwen2(0))), reads_pack(loud(qwen2(0)))
    model.requires_grad_(False)
    model.set_output_embeddings(head := Adapted(model.lm_head))
    with torch.no_grad():
        merged.lm_head.weight += head.factor

    @contextmanager
    def off():
        head.used = False
        yield
        head.used = True

    adaptation = Adaptation({"lm_head.factor": "base.lm_head.factor"}, off, {}, {"name": "toy", "digest": "abc"})
    results = []
    for policy, reference, how in ((model, model, adaptation), (merged, base, None)):
        learner = learner_for(policy, LAYOUTS["prompts shared, cut"], reference, how)
        weighed, metrics = weigh(learner.add_logprobs(preference_samples()), LOSSES["dpo"])
        learner.forward_backward(weighed, OBJECTIVE)
        results.append(metrics)
    assert results[0] == pytest.approx(results[1], abs=1e-5)
    assert abs(results[0]["rewards/margins"]) > 1e-3
    torch.testing.assert_close(head.factor.grad, merged.lm_head.weight.grad, atol=1e-6, rtol=0)


def scored(policy, reference, lengths=None):
    """Pairs whose answers have these sums of log-probs; a token each unless lengths are given."""
    samples = []
    for i, (own, other) in enumerate(zip(policy, reference, strict=True)):
        length = 1 + (1 if lengths is None else lengths[i])
        mask = torch.arange(length) > 0
        samples.append(
            Sample(
                torch.arange(length), mask, torch.arange(length)[None], i // 2, 0.0,
                old_logprobs=mask * own / (length - 1), ref_logprobs=mask * other / (length - 1),
            )
        )  # fmt: skip
    return samples


@pytest.mark.parametrize("far", [1e4, -1e4])
@pytest.mark.parametrize("kind", LOSSES)
def test_margins_far_away_are_finite_and_told(kind, far):
    loss = replace(LOSSES[kind], beta=1.0)
    samples = scored([far, -far] * 3, [0.0] * 6)
    weighed, metrics = weigh(samples, loss, [True, False] * 3 if kind == "kto" else None)
    advantages = rows(weighed, "advantages")[:, 0]
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["rewards/saturated"] == 1
    assert advantages.isfinite().all()
    steep = {"dpo": 1.0, "cdpo": 1 - 0.2, "simpo": 1.0, "kto": 0.0, "ipo": 2 * (2e4 + 0.5)}[kind]
    flat = {"cdpo": 0.2, "ipo": 2 * (2e4 - 0.5)}.get(kind, 0.0)
    # The mean is over three pairs, and the objective divides by six sequences.
    expected = (2 * steep if far < 0 else -2 * flat) * torch.tensor([1.0, -1.0] * 3)
    torch.testing.assert_close(advantages, expected)


def test_a_pair_within_reach_is_not_saturated():
    _, metrics = weigh(scored([-1.0, -2.0, -1.0, -500.0], [-1.0] * 4), LOSSES["dpo"])
    assert metrics["rewards/saturated"] == 0.5
    assert metrics["rewards/accuracies"] == 1


def test_equal_answers_are_not_right_and_simpo_reports_log_probs_of_tokens():
    samples = scored([-6.0, -6.0], [0.0] * 2, lengths=[2, 3])
    assert weigh(samples, LOSSES["dpo"])[1]["rewards/accuracies"] == 0
    _, metrics = weigh(samples, LOSSES["simpo"])
    assert [metrics["logps/chosen"], metrics["logps/rejected"]] == pytest.approx([-3.0, -2.0])


def test_the_kl_of_kto_is_not_negative_and_moves_the_margin():
    samples, labels = scored([31.5, -31.5], [0.0] * 2), [True, False]
    kto = PreferenceLoss("kto", beta=1.0)
    below = weigh(samples, kto, labels, mismatched=scored([-9.0], [0.0]))[1]
    assert (below["kl"], below["rewards/saturated"]) == (0, 1)
    above = weigh(samples, kto, labels, mismatched=scored([9.0], [0.0]))[1]
    assert (above["kl"], above["rewards/saturated"]) == (9, 0.5)


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_log_probs_that_are_not_finite_are_named_and_skip_the_step(name, value, caplog):
    samples = scored([-1.0, -2.0, -3.0, -4.0], [-1.0] * 4)
    samples[3] = replace(samples[3], **{name: torch.tensor([0.0, value])})
    with caplog.at_level(logging.WARNING):
        weighed, metrics = weigh(samples, LOSSES["dpo"])
    assert f"1 of 4 samples have {name} that are not finite, first sample 3 (group 1)" in caplog.text
    assert rows(weighed, "advantages").isnan().all()
    assert all(math.isnan(found) for found in metrics.values())


def test_what_is_no_pair_is_named():
    samples = scored([-1.0] * 4, [-1.0] * 4)
    with pytest.raises(ValueError, match=r"samples 0 and 1 are no pair: their groups are 0 and 1"):
        weigh([samples[0], samples[2]], LOSSES["dpo"])
    with pytest.raises(ValueError, match=r"dpo needs pairs, and got 3 samples"):
        weigh(samples[:3], LOSSES["dpo"])
    with pytest.raises(ValueError, match=r"kto needs a label of each of the 4 samples, and got none"):
        weigh(samples, LOSSES["kto"])
    with pytest.raises(ValueError, match=r"dpo needs pairs, and got 0 samples"):
        weigh([], LOSSES["dpo"])
    with pytest.raises(ValueError, match=r"sample 0 \(group 0\) has no ref_logprobs"):
        weigh([replace(sample, ref_logprobs=None) for sample in samples], LOSSES["dpo"])
    empty = replace(samples[1], loss_mask=torch.zeros(2).bool())
    with pytest.raises(ValueError, match=r"sample 1 \(group 0\) has no trained token"):
        weigh([samples[0], empty], LOSSES["dpo"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "orpo"}, "must be one of dpo, cdpo, ipo, simpo, kto"),
        ({"beta": 0.0}, "beta is 0.0; it must be more than 0"),
        ({"kind": "cdpo"}, "cdpo needs one between 0 and 0.5"),
        ({"kind": "cdpo", "label_smoothing": 0.5}, "cdpo needs one between 0 and 0.5"),
        ({"label_smoothing": 0.1}, "which dpo does not read; choose cdpo"),
        ({"kind": "simpo", "gamma": -1.0}, "gamma is -1.0; it must be at least 0"),
    ],
)
def test_settings_that_are_wrong_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PreferenceLoss(**settings)


def test_mismatched_answers_follow_another_prompt_and_continue_its_positions():
    samples = preference_samples()
    crossed = mismatch(samples)
    for i, j in enumerate([2, 2, 4, 4, 0, 0]):
        start, answer = samples[i].prompt_length, samples[j].prompt_length
        assert crossed[i].token_ids.tolist() == [*samples[i].token_ids[:start], *samples[j].token_ids[answer:]]
        assert crossed[i].loss_mask.sum() == samples[j].response_length
        assert crossed[i].position_ids[0].tolist() == list(range(len(crossed[i].token_ids)))
        assert crossed[i].prompt_length == start
    alone = mismatch(samples[:2])
    assert [len(sample.token_ids) for sample in alone] == [len(samples[1].token_ids), len(samples[0].token_ids)]


def test_mismatched_positions_of_several_axes_continue_behind_the_picture():
    samples = picture_samples((1, 0))
    samples = [replace(sample, group_id=i) for i, sample in enumerate(samples)]
    samples[1] = replace(samples[1], later_inputs=samples[0].model_inputs)
    crossed = mismatch(samples)[0]
    start = int(samples[0].loss_mask.long().argmax())
    own = samples[0].position_ids
    count = torch.arange(len(crossed.token_ids) - start)
    assert torch.equal(crossed.position_ids[0], torch.arange(len(crossed.token_ids)))
    assert own[1, start] < start, "the picture must take fewer positions than tokens for this to say something"
    assert torch.equal(crossed.position_ids[1:, start:], own[1:, start : start + 1] + count)
    assert crossed.model_inputs is samples[0].model_inputs
    assert crossed.later_inputs is samples[1].later_inputs
