"""Distillation: the divergence from a teacher over the vocabulary, and the advantage that estimates its gradient."""

import math
from dataclasses import replace

import pytest
import torch
from core_heads import LoRAHead, learner_for
from core_models import VOCAB, in_float64, picture_samples, qwen2, qwen25_vl, text_samples
from torch.nn import functional as F

from r1_core import kl
from r1_core.advantages.distillation import Distillation, without_teacher
from r1_core.learner import linear_head
from r1_core.learner.batching import MicroLimit
from r1_core.learner.own_teacher import OwnTeacher
from r1_core.losses import PolicyGradient, PPOClip
from r1_core.objective import Objective

TEMPERATURE = 0.7


def reverse_kl(p, q):
    return (p * (p / q).log()).sum(-1)


def forward_kl(p, q):
    return (q * (q / p).log()).sum(-1)


def jsd(p, q):
    return (reverse_kl(p, (p + q) / 2) + reverse_kl(q, (p + q) / 2)) / 2


DENSE = {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "jsd": jsd}


def adapted():
    model = qwen2()
    torch.manual_seed(7)
    model.lm_head = LoRAHead(model.lm_head)
    return model


def padded_teacher():
    """The teacher with 5 more rows in its head than there are tokens."""
    model = qwen2(1)
    head = torch.nn.Linear(16, VOCAB + 5, bias=False)
    with torch.no_grad():
        head.weight[:VOCAB] = model.lm_head.weight
    model.lm_head = head
    return model


def probabilities(model, sample):
    return (model(input_ids=sample.token_ids[None]).logits[0, :-1, :VOCAB] / TEMPERATURE).softmax(-1)


def without_advantages(samples):
    return [replace(sample, advantages=torch.zeros(sample.token_ids.shape)) for sample in samples]


def gradients(model):
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize(
    ("chunk", "build", "build_teacher"),
    [
        (1, qwen2, lambda: qwen2(1)),
        (3, adapted, padded_teacher),
        (3, qwen2, lambda: qwen2(1)),
        (100, adapted, padded_teacher),
    ],
)
@pytest.mark.parametrize("name", DENSE)
def test_loss_and_gradient_are_those_of_the_dense_formula(name, build_teacher, build, chunk, monkeypatch):
    monkeypatch.setattr(linear_head, "CHUNK_BYTES", VOCAB * 4 * 2 * chunk)
    model, teacher = in_float64(build(), monkeypatch), in_float64(build_teacher(), monkeypatch)
    learner = learner_for(model, padding_free=chunk == 3, teacher=teacher, temperature=TEMPERATURE)
    samples = without_advantages(learner.add_logprobs(text_samples()))
    metrics = learner.forward_backward(samples, Objective(divergence=name, distillation_coef=0.3))
    found = gradients(model)
    assert all(param.grad is None for param in teacher.parameters())

    model.zero_grad()
    pairs = [(probabilities(model, one), probabilities(teacher, one).detach(), one) for one in samples]
    mean = torch.cat([DENSE[name](p, q)[one.loss_mask[1:]] for p, q, one in pairs]).mean()
    (0.3 * mean).backward()
    assert metrics["distillation_loss"] == pytest.approx(mean.item(), abs=1e-10)
    for key, grad in gradients(model).items():
        torch.testing.assert_close(found[key], grad, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", DENSE)
def test_tokens_that_both_ban_add_nothing(name):
    banned = torch.tensor([[0.0, 1.0, -torch.inf], [2.0, 0.5, -torch.inf]], dtype=torch.float64)
    logits = banned[:1].clone().requires_grad_()
    value = kl.DIVERGENCES.get(name)(logits.log_softmax(-1), banned[1:].log_softmax(-1))
    p, q = (one[:, :2].softmax(-1) for one in (banned[:1], banned[1:]))
    torch.testing.assert_close(value.detach(), DENSE[name](p, q))
    value.sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("loss", [PolicyGradient(), PPOClip()])
def test_the_expected_gradient_of_the_advantage_is_that_of_the_reverse_kl(loss, monkeypatch):
    """Exactly: each token of the vocabulary is one answer, weighted by its probability."""
    model, teacher = in_float64(qwen2(), monkeypatch), in_float64(qwen2(1), monkeypatch)
    learner = learner_for(model, teacher=teacher, temperature=TEMPERATURE, limit=MicroLimit(64))
    prompts = text_samples(((3, 1), (6, 1), (2, 2)))[:2]
    samples = [
        replace(one, token_ids=torch.cat([one.token_ids[:-1], torch.tensor([token])]))
        for one in prompts
        for token in range(VOCAB)
    ]
    samples = learner.add_logprobs(samples, ["old_logprobs", "teacher_logprobs"])
    weighted = [replace(one, weights=VOCAB * one.old_logprobs.double().exp()) for one in without_advantages(samples)]
    weighted = Distillation(coef=0.5, clip=100.0).add(weighted, [True] * len(weighted))
    learner.forward_backward(weighted, Objective(loss))
    found = gradients(model)
    model.zero_grad()
    learner.forward_backward(without_advantages(samples), Objective(divergence="reverse_kl", distillation_coef=0.5))
    expected = gradients(model)
    assert max(float(grad.abs().max()) for grad in expected.values()) > 1e-3
    for key, grad in expected.items():
        torch.testing.assert_close(found[key], grad, atol=2e-7, rtol=1e-5)  # advantages are float32


def three_tokens(old, teacher, advantages=(1.0, 1.0, 1.0)):
    sample, _ = text_samples(((2, 3), (1, 1)))
    prompt = [0.0, 0.0]
    return replace(
        sample,
        old_logprobs=torch.tensor([*prompt, *old]),
        teacher_logprobs=torch.tensor([*prompt, *teacher]),
        advantages=torch.tensor([*prompt, *advantages]),
    )


OLD, TEACHER = (-1.0, -1.0, -1.0), (-0.5, -torch.inf, torch.nan)


@pytest.mark.parametrize(
    ("task_reward", "taught", "expected"),
    [(False, True, [1.0, -4.0, 0.0]), (True, True, [2.0, -3.0, 1.0]), (False, False, [2.0, -3.0, 1.0])],
)
def test_the_difference_is_clipped_and_tokens_without_a_teacher_have_none(task_reward, taught, expected):
    distillation = Distillation(coef=2.0, clip=2.0, task_reward=task_reward)
    samples = [three_tokens(OLD, TEACHER), three_tokens(OLD, (torch.nan,) * 3, (0.0, 0.0, 0.0))]
    first, second = distillation.add(samples, [taught, True])
    assert first.advantages.tolist() == [0.0, 0.0, *expected]
    assert not second.advantages.any()
    assert distillation.metrics(samples) == {
        "distillation/kl": pytest.approx((2.0 - 0.5) / 2),
        "distillation/clipped": 0.5,
        "distillation/without_teacher": pytest.approx(4 / 6),
    }


def test_without_any_teacher_the_metrics_are_finite():
    samples = without_teacher([three_tokens(OLD, TEACHER)])
    assert Distillation().metrics(samples) == {
        "distillation/kl": 0.0, "distillation/clipped": 0.0, "distillation/without_teacher": 1.0,
    }  # fmt: skip
    assert Distillation().metrics(text_samples()) == {}


@pytest.mark.parametrize("settings", [{"clip": 0.0}, {"coef": -1.0}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Distillation(**settings)


@pytest.mark.parametrize("padding_free", [True, False])
def test_a_learner_has_a_reference_and_a_teacher(padding_free):
    model, reference, teacher = qwen2(), qwen2(1), qwen2(2)
    learner = learner_for(model, padding_free=padding_free, reference=reference, teacher=teacher)
    for sample in learner.add_logprobs(text_samples(), ["ref_logprobs", "teacher_logprobs"]):
        for field, other in (("ref_logprobs", reference), ("teacher_logprobs", teacher)):
            with torch.no_grad():
                logits = other(input_ids=sample.token_ids[None]).logits[0, :-1].log_softmax(-1)
            found = logits.gather(-1, sample.token_ids[1:, None]).squeeze(-1)
            expected = torch.where(sample.loss_mask, F.pad(found, (1, 0)), 0.0)
            torch.testing.assert_close(sample.get(field), expected, atol=1e-5, rtol=0)
    samples = without_advantages(learner.add_logprobs(text_samples()))
    both = learner.forward_backward(samples, Objective(divergence="jsd", kl_penalty="k3", kl_coef=0.5))
    assert both["kl_loss"] > 0
    assert both["distillation_loss"] > 0


def test_a_teacher_sees_pictures():
    models = qwen25_vl().double(), qwen25_vl(1).double()
    learner = learner_for(models[0], teacher=models[1])
    samples = without_advantages(learner.add_logprobs(picture_samples(), ["old_logprobs", "teacher_logprobs"]))
    before = [sample.teacher_logprobs for sample in samples]
    assert learner.forward_backward(samples, Objective(divergence="forward_kl"))["distillation_loss"] > 0
    changed = [
        replace(one, model_inputs={k: v + 1 if v.is_floating_point() else v for k, v in one.model_inputs.items()})
        for one in samples
    ]
    after = [one.teacher_logprobs for one in learner.add_logprobs(changed, ["teacher_logprobs"])]
    assert [bool(torch.equal(a, b)) for a, b in zip(before, after, strict=True)] == [
        not one.model_inputs for one in samples
    ]


def test_what_is_missing_or_double_is_named():
    learner = learner_for(qwen2(), reference=qwen2(1))
    samples = learner.add_logprobs(text_samples(), ["old_logprobs", "teacher_logprobs"])
    assert all(sample.teacher_logprobs is None for sample in samples)
    with pytest.raises(ValueError, match="give the learner a teacher model"):
        learner.forward_backward(without_advantages(samples), Objective(divergence="jsd"))
    with pytest.raises(ValueError, match=r"sample 0 .* has no teacher_logprobs"):
        Distillation().add(without_advantages(samples), [True] * len(samples))
    with pytest.raises(ValueError, match="choose another kl_penalty"):
        Objective(divergence="jsd", kl_penalty="full", kl_coef=0.1)
    with pytest.raises(ValueError, match="no divergence is called 'reverse'"):
        Objective(divergence="reverse")


# --- the teacher's most likely tokens -------------------------------------------------------------------------------


def top_of(teacher, samples, count):
    """The samples with the teacher's `count` most likely tokens at each, by its own forward pass."""
    found = []
    for one in samples:
        with torch.no_grad():
            logprobs = probabilities(teacher, one).log()
        top, ids = logprobs.topk(count)
        rows = torch.zeros(2, len(one.token_ids), count, dtype=logprobs.dtype)
        rows[:, 1:] = torch.stack([top, ids.to(top.dtype)])
        found.append(replace(one, teacher_top=rows[0], teacher_top_ids=rows[1].int()))
    return found


def binned_kl(p, q, ids):
    """KL(q, p) over the tokens `ids` [T, k] and one bin of all others."""

    def bins(x):
        listed = x.gather(-1, ids)
        return torch.cat([listed, 1 - listed.sum(-1, keepdim=True)], dim=-1)

    return forward_kl(bins(p), bins(q))


def dense_top(model, teacher, samples, count):
    found = []
    for one in samples:
        p, q = probabilities(model, one), probabilities(teacher, one).detach()
        ids = q.topk(count).indices
        value = forward_kl(p, q) if count == VOCAB else binned_kl(p, q, ids)
        found.append(value[one.loss_mask[1:]])
    return torch.cat(found).mean()


@pytest.mark.parametrize(("chunk", "build"), [(1, qwen2), (3, adapted), (100, qwen2)])
@pytest.mark.parametrize("count", [1, 4, VOCAB])
def test_top_loss_and_gradient_are_those_of_the_dense_formula(count, build, chunk, monkeypatch):
    """With k = V the KL over the vocabulary itself."""
    monkeypatch.setattr(linear_head, "CHUNK_BYTES", VOCAB * 4 * chunk)
    model, teacher = in_float64(build(), monkeypatch), in_float64(qwen2(1), monkeypatch)
    learner = learner_for(model, padding_free=chunk == 3, temperature=TEMPERATURE)
    samples = top_of(teacher, without_advantages(learner.add_logprobs(text_samples())), count)
    metrics = learner.forward_backward(samples, Objective(divergence="top", distillation_coef=0.3))
    found = gradients(model)
    model.zero_grad()
    mean = dense_top(model, teacher, samples, count)
    (0.3 * mean).backward()
    assert metrics["distillation_loss"] == pytest.approx(mean.item(), abs=1e-10)
    for key, grad in gradients(model).items():
        torch.testing.assert_close(found[key], grad, atol=1e-10, rtol=0)


@pytest.mark.parametrize("chunk", [1, 100])
@pytest.mark.parametrize("count", [3, VOCAB + 2])
def test_a_learners_teacher_lists_its_most_likely_tokens(count, chunk, monkeypatch):
    monkeypatch.setattr(linear_head, "CHUNK_BYTES", VOCAB * 4 * chunk)
    teacher = qwen2(1)
    learner = learner_for(qwen2(), padding_free=chunk == 1, teacher=teacher, teacher_top=count, temperature=TEMPERATURE)
    plain = learner.add_logprobs(text_samples(), ["teacher_logprobs"])
    for one, sample in zip(plain, learner.add_logprobs(text_samples(), ["teacher_top"]), strict=True):
        with torch.no_grad():
            top, ids = probabilities(teacher, sample).log()[sample.loss_mask[1:]].topk(min(count, VOCAB))
        torch.testing.assert_close(sample.teacher_logprobs, one.teacher_logprobs, atol=1e-5, rtol=0)
        found, found_ids = sample.teacher_top[sample.loss_mask], sample.teacher_top_ids[sample.loss_mask]
        torch.testing.assert_close(found[:, :VOCAB], top, atol=1e-5, rtol=0)
        assert found_ids[:, :VOCAB].tolist() == ids.tolist()
        assert found_ids[:, VOCAB:].eq(-1).all()
        assert found[:, VOCAB:].eq(-torch.inf).all()


def top_case(logits, top, ids):
    logits = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    value = kl.top_forward(logits.log_softmax(-1), torch.tensor(top, dtype=torch.float64), torch.tensor(ids))
    value.sum().backward()
    return value.detach(), logits.grad


def test_unlisted_tokens_are_one_bin_whatever_takes_their_place():
    """Ids of no token, a token beyond the policy's vocabulary, and −inf count with the bin."""
    logits, half = [[0.5, 1.0, -1.0, 0.0]], math.log(0.5)
    plain, slope = top_case(logits, [[half]], [[1]])
    p = torch.tensor(logits, dtype=torch.float64).softmax(-1)[0, 1]
    torch.testing.assert_close(plain[0], 0.5 * (0.5 / p).log() + 0.5 * (0.5 / (1 - p)).log())
    for top, ids in (([[half, -math.inf]], [[1, -1]]), ([[half, math.log(0.2)]], [[1, 9]])):
        other, other_slope = top_case(logits, top, ids)
        torch.testing.assert_close(other, plain)
        torch.testing.assert_close(other_slope, slope)


def test_top_values_that_could_be_nan_are_not():
    """No answer of the teacher; a policy that bans all that the teacher does not list; a sum above 1 by rounding."""
    nothing, slope = top_case([[0.5, 1.0]], [[math.nan, math.nan]], [[0, 0]])
    assert (nothing.item(), slope.abs().sum().item()) == (0.0, 0.0)
    banned, slope = top_case([[0.0, 0.0, -math.inf]], [[math.log(0.5), math.log(0.4)]], [[0, 1]])
    torch.testing.assert_close(banned[0].item(), 0.5 * math.log(1.0) + 0.4 * math.log(0.8))
    assert slope.isfinite().all()
    above, slope = top_case([[0.0, 0.0, -9.0]], [[math.log(0.5) + 1e-7, math.log(0.5) + 1e-7]], [[0, 1]])
    assert 0 <= above.item() < 1e-3
    assert slope.isfinite().all()


def test_top_tokens_are_never_left_out_in_silence():
    learner = learner_for(qwen2())
    samples = without_advantages(learner.add_logprobs(text_samples()))
    with pytest.raises(ValueError, match=r"sample 0 .* has no teacher_top, which is needed"):
        learner.forward_backward(samples, Objective(divergence="top"))
    with pytest.raises(ValueError, match=r"teacher_top has shape \[2\], expected \[L, k\]"):
        replace(samples[0], teacher_top=torch.zeros(2))


# --- a policy that teaches itself -----------------------------------------------------------------------------------


def weights_of(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def train_step(learner, seed):
    torch.manual_seed(seed)
    samples = learner.add_logprobs(text_samples())
    samples = [replace(one, advantages=torch.randn(one.token_ids.shape)) for one in samples]
    learner.forward_backward(samples, Objective(PolicyGradient()))
    learner.optim_step()


def own_learner(model=None, **sync):
    model = model or qwen2()
    return learner_for(model, teacher=OwnTeacher(model, **sync))


@pytest.mark.parametrize("sync", [{"every": 0}, {"every": 1}, {"every": 2}, {"rate": 0.25}, {"rate": 1.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_policy_teaches_with_its_weights_its_start_or_their_mean(sync, dtype):
    model = qwen2().to(dtype)
    learner, seen = own_learner(model, **sync), [weights_of(model)]
    mean = {name: value.float() for name, value in seen[0].items()}
    for step in range(1, 4):
        train_step(learner, step)
        seen.append(own := weights_of(model))
        if rate := sync.get("rate"):
            mean = {name: value.lerp(own[name].float(), rate) for name, value in mean.items()}
        found = learner.add_logprobs(text_samples(), ["old_logprobs", "teacher_logprobs"])
        assert all(torch.equal(value, own[name]) for name, value in weights_of(model).items())
        every = sync.get("every")
        expected = mean if "rate" in sync else seen[0 if every == 0 else step // every * every]
        fresh = qwen2().to(dtype)
        fresh.load_state_dict(expected, strict=False)
        other = learner_for(fresh).add_logprobs(text_samples(), ["old_logprobs"])
        for one, two in zip(found, other, strict=True):
            assert torch.equal(one.teacher_logprobs, two.old_logprobs)
    same = [torch.equal(one.teacher_logprobs, one.old_logprobs) for one in found]
    assert all(same) == (sync in ({"every": 1}, {"rate": 1.0}))


@pytest.mark.parametrize(
    ("sync", "way"),
    [({"every": 0}, "save"), ({"every": 2}, "save"), ({"rate": 0.25}, "save"), ({"rate": 0.25}, "snapshot")],
)
def test_its_weights_are_in_the_checkpoint_and_training_goes_on_to_the_bit(sync, way, tmp_path):
    learner = own_learner(**sync)
    for step in range(3):
        train_step(learner, step)
    learner.save(tmp_path) if way == "save" else learner.snapshot().write(tmp_path)
    again = own_learner(qwen2(5), **sync)
    again.load(tmp_path)
    for one in (learner, again):
        train_step(one, 3)
    for name, value in learner._own_teacher.weights.items():
        assert torch.equal(again._own_teacher.weights[name], value)
    for one, two in zip(
        *(each.add_logprobs(text_samples(), ["teacher_logprobs"]) for each in (learner, again)), strict=True
    ):
        assert torch.equal(one.teacher_logprobs, two.teacher_logprobs)


def test_a_checkpoint_without_its_weights_is_named_and_weights_alone_are_a_new_start(tmp_path):
    own_learner(every=1).save(tmp_path / "plain")
    learner = own_learner(qwen2(5), rate=0.1)
    with pytest.raises(FileNotFoundError, match=r"neither teacher.safetensors"):
        learner.load(tmp_path / "plain")
    learner = own_learner(qwen2(5), rate=0.1)
    learner.load(tmp_path / "plain", model_only=True)
    (first, *_) = learner.add_logprobs(text_samples(), ["old_logprobs", "teacher_logprobs"])
    assert torch.equal(first.old_logprobs, first.teacher_logprobs)


@pytest.mark.parametrize("settings", [{"every": -1}, {"rate": 1.5}, {"rate": -0.1}])
def test_rates_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        OwnTeacher(qwen2(), **settings)
