"""Reward models: the gradient of Hugging Face's own sequence classifier on pairs, and a checkpoint that it loads."""

import logging
import math
from dataclasses import replace

import pytest
import torch
from core_models import TEXT, in_float64, loud, preference_samples, reads_pack
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import Qwen2Config, Qwen2ForSequenceClassification, Qwen2ForTokenClassification

from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.optim import build_optimizer
from r1_core.learner.reward_learner import RewardLearner
from r1_core.reward_model import at_end, use_score_head, weigh_values
from r1_core.types import rows, tokens

CONFIG = {**TEXT, "num_labels": 1, "pad_token_id": 63, "attn_implementation": "sdpa"}
LAYOUTS = {
    "padded": Batching(False, MicroLimit(100), MicroLimit(100)),
    "packed, cut": Batching(True, MicroLimit(3), MicroLimit(3)),
    "prompts shared, cut": Batching(True, MicroLimit(3), MicroLimit(3), share_prompts=True),
}


def build(kind, seed=0):
    torch.manual_seed(seed)
    return loud(kind(Qwen2Config(**CONFIG)))


def learner_of(model, batching):
    optimizer = build_optimizer(model.named_parameters(), lr=1e-2)
    return RewardLearner(use_score_head(model), optimizer, lambda step: 1.0, batching=batching)


def classify(model, samples):
    """The logits of the sequence classifier, padded on the right, [N]."""
    length = max(len(sample.token_ids) for sample in samples)
    ids = torch.full((len(samples), length), 63)
    for i, sample in enumerate(samples):
        ids[i, : len(sample.token_ids)] = sample.token_ids
    return model(input_ids=ids, attention_mask=(ids != 63).long()).logits[:, 0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_is_that_of_the_sequence_classifier_in_float64(layout, monkeypatch):
    plain = in_float64(build(Qwen2ForSequenceClassification), monkeypatch)
    model = build(Qwen2ForTokenClassification)
    model.load_state_dict(plain.state_dict(), strict=False)
    learner = learner_of(in_float64(reads_pack(model), monkeypatch), LAYOUTS[layout])
    samples = preference_samples()
    own = classify(plain, samples)
    expected = (-logsigmoid(own[0::2] - own[1::2]) + 0.1 * (own[0::2] + own[1::2]).square()).mean()
    expected.backward()
    ready = learner.add_values([at_end(sample) for sample in samples])
    torch.testing.assert_close(tokens(ready, "values").double(), own.detach(), atol=1e-6, rtol=0)
    ready = [replace(s, values=s.loss_mask * v) for s, v in zip(ready, own.detach(), strict=True)]  # in float64
    weighed, metrics = weigh_values(ready, center=0.1)
    assert metrics["reward_loss"] == pytest.approx(expected.item(), abs=1e-10)
    assert metrics["margin"] == pytest.approx((own[0::2] - own[1::2]).mean().item())
    assert metrics["accuracy"] == pytest.approx((own[0::2] > own[1::2]).double().mean().item())
    spread = [metrics["min_reward"], metrics["mean_reward"], metrics["max_reward"]]
    assert spread == pytest.approx([own.min().item(), own.mean().item(), own.max().item()])
    learner.forward_backward(weighed)
    wanted = dict(plain.named_parameters())
    found = dict(learner.model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, param in found.items():
        torch.testing.assert_close(param.grad, wanted[name].grad, atol=1e-10, rtol=0, msg=name)
    assert wanted["score.weight"].grad.abs().max() > 1e-3


def test_values_together_and_by_its_own_attention_are_those_of_the_classifier():
    learner = learner_of(reads_pack(build(Qwen2ForTokenClassification)), LAYOUTS["packed, cut"])
    plain = build(Qwen2ForSequenceClassification)
    plain.load_state_dict(learner.model.state_dict())
    expected = classify(plain, preference_samples()).tolist()
    samples = [at_end(sample) for sample in preference_samples()]
    for found in (
        learner.compute_eager_logprobs(samples),
        learner.compute_logprobs_together(samples, padding_free=True),
        learner.compute_logprobs_together(samples, padding_free=False),
    ):
        assert [one for [one] in found] == pytest.approx(expected, abs=1e-6)


def test_a_checkpoint_is_a_sequence_classifier(tmp_path):
    learner = learner_of(reads_pack(build(Qwen2ForTokenClassification)), LAYOUTS["prompts shared, cut"])
    before = None
    for _ in range(20):
        samples, metrics = weigh_values(learner.add_values([at_end(sample) for sample in preference_samples()]))
        before = metrics["reward_loss"] if before is None else before
        learner.forward_backward(samples)
        learner.optim_step()
    assert metrics["reward_loss"] < 0.1 * before
    assert metrics["accuracy"] == 1
    learner.save(tmp_path, model_only=True)
    Qwen2Config(**CONFIG).save_pretrained(tmp_path)
    loaded, report = Qwen2ForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert "score.bias" not in load_file(next(tmp_path.glob("*.safetensors")))
    expected = rows(learner.add_values(samples), "values")[:, 0]
    torch.testing.assert_close(classify(loaded.eval(), preference_samples()).detach(), expected, atol=1e-5, rtol=0)


def test_values_that_are_not_finite_are_named_and_skip_the_step(caplog):
    learner = learner_of(build(Qwen2ForTokenClassification), LAYOUTS["padded"])
    samples = learner.add_values([at_end(sample) for sample in preference_samples()])
    samples[4] = replace(samples[4], values=samples[4].values * torch.inf)
    with caplog.at_level(logging.WARNING):
        weighed, metrics = weigh_values(samples)
    assert "1 of 6 samples have values that are not finite, first sample 4 (group 2)" in caplog.text
    assert all(math.isnan(value) for value in metrics.values())
    learner.forward_backward(weighed)
    assert learner.optim_step()["skipped_steps"] == 1


def test_what_is_no_reward_model_or_no_pair_is_refused():
    with pytest.raises(ValueError, match="has no linear head `score` with one output"):
        use_score_head(Qwen2ForTokenClassification(Qwen2Config(**CONFIG | {"num_labels": 2})))
    samples = preference_samples()
    assert at_end(samples[0]).prompt_length == samples[0].prompt_length, "the pair would not share its prompt"
    with pytest.raises(ValueError, match=r"sample 0 \(group 0\) trains 3 tokens; make it with reward_model.at_end"):
        weigh_values(samples)
    with pytest.raises(ValueError, match="Bradley-Terry needs pairs, and got 5 samples"):
        weigh_values(samples[:5])
