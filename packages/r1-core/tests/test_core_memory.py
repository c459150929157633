"""A micro-batch whose memory runs out is halved, and the gradient stays what it is."""

import logging
from dataclasses import replace

import pytest
import torch
from core_cases import off_policy_samples, outcome, policy_learner
from faults_table import note_fault

from r1_core.learner.batching import Batching, MicroLimit
from r1_core.objective import Objective


class Small:
    """Fails on micro-batches of more than `tokens`: forward, or on the way back."""

    def __init__(self, model, tokens, *, backward=False):
        self.tokens, self.backward, self.calls, self.failed = tokens, backward, 0, 0
        inner = model.model.layers[1]
        inner.register_forward_hook(self)

    def __call__(self, module, inputs, output):
        hidden = output[0] if isinstance(output, tuple) else output
        self.calls += 1
        if hidden.shape[0] * hidden.shape[1] <= self.tokens:
            return
        self.failed += 1
        if not self.backward or not hidden.requires_grad:
            raise torch.OutOfMemoryError("CUDA out of memory")
        hidden.register_hook(self.fail)

    def fail(self, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("share", [False, True])
def test_a_halved_micro_batch_gives_the_gradient_and_metrics_of_a_whole_one(backward, share, monkeypatch, caplog):
    batching = Batching(True, MicroLimit(4), MicroLimit(4), share_prompts=share)
    whole, expected = outcome(policy_learner(monkeypatch), Objective(), batching)
    learner = policy_learner(monkeypatch)
    small = Small(learner.model, 12, backward=backward)
    with caplog.at_level(logging.WARNING):
        metrics, found = outcome(learner, Objective(), batching)
    assert small.failed > 0
    assert metrics.pop("halved_micro_batches") == small.failed
    assert "out of memory in a micro-batch of" in caplog.text
    assert metrics.keys() == whole.keys()
    for name, value in whole.items():
        assert metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    note_fault("a micro-batch whose memory runs out", outcome="goes on")


def test_log_probs_and_values_are_computed_in_halves_too(monkeypatch):
    learner, samples = policy_learner(monkeypatch), off_policy_samples()
    learner.batching = Batching(True, MicroLimit(4), MicroLimit(4))
    whole = learner.compute_logprobs(samples, ["old_logprobs"])["old_logprobs"]
    small = Small(learner.model, 12)
    found = learner.compute_logprobs(samples, ["old_logprobs"])["old_logprobs"]
    assert small.failed > 0
    torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-6)


def test_a_sample_that_does_not_fit_alone_a_profiling_pass_and_a_second_call_raise(monkeypatch):
    batching = Batching(True, MicroLimit(4), MicroLimit(4))
    learner, samples = policy_learner(monkeypatch), off_policy_samples()
    learner.batching = batching
    small = Small(learner.model, 2)
    with pytest.raises(torch.OutOfMemoryError):
        learner.forward_backward(samples, Objective())
    small.tokens = 12
    with pytest.raises(torch.OutOfMemoryError):  # it measures which size fits
        learner.profile_pass(samples, Objective(), MicroLimit(4))
    assert learner.batching == batching
    learner.optimizer.zero_grad()
    learner.forward_backward(samples[:1], Objective())
    with pytest.raises(torch.OutOfMemoryError):  # the gradient of the first call cannot be told apart
        learner.forward_backward(samples, Objective())


def test_a_loss_that_is_not_finite_skips_the_step_though_its_gradient_is(monkeypatch):
    class Endless(Objective):
        token_wise = False

        def __call__(self, inputs):
            found = super().__call__(inputs)
            return replace(found, loss=found.loss + torch.inf)

    learner = policy_learner(monkeypatch)
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    learner.forward_backward(off_policy_samples(), Endless())
    assert learner.optim_step()["skipped_steps"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.weights())
    assert not learner.optimizer.state, "nor has the optimizer a state"
    note_fault("a loss that is not finite", outcome="skipped")
