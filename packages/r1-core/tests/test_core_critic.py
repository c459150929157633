"""The critic: values where log-probs are predicted, one gradient however a step is cut, and returns that GAE gives."""

import math
from dataclasses import replace

import core_critics
import pytest
import ranks
import torch
from core_cases import CUTS
from core_critics import exact_critic, forecast, make_critic, step_samples, take_steps
from core_heads import CHANGING
from core_models import qwen2, text_samples
from core_ranks import FORMS

from r1_core.advantages import GAE, GRPO, ReinforcePlusPlus, assign, gae
from r1_core.advantages.inputs import Estimator
from r1_core.kl import reward_penalties
from r1_core.learner.critic import ValueScorer, give_value_head
from r1_core.learner.microbatch import collate
from r1_core.learner.offload import Offload, bytes_on_device, states_of, tensors_of
from r1_core.losses import ValueLoss
from r1_core.own import as_estimator
from r1_core.types import rows, tokens

# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["text", "pictures"])
def test_a_value_stands_with_the_token_that_comes_next(name):
    critic = exact_critic(name)
    for sample in critic.add_values(step_samples(name)):
        batch = collate([sample], padding_free=False)
        outputs = critic.model(**batch.forward, use_cache=False).logits[0, :, 0].detach()
        expected = torch.cat([outputs.new_zeros(1), outputs[:-1]]) * sample.loss_mask
        torch.testing.assert_close(sample.values.double(), expected, atol=1e-6, rtol=0)


def test_a_new_head_predicts_0():
    model = qwen2(tied=True)
    embedding = model.get_input_embeddings().weight.clone()
    give_value_head(model)
    assert not tokens(make_critic(model).add_values(text_samples()), "values").any()
    assert torch.equal(model.get_input_embeddings().weight, embedding)


def test_a_head_of_half_precision_computes_in_float32():
    model = qwen2()
    core_critics.draw_head(give_value_head(model))
    model.bfloat16()
    found = ValueScorer(model)(collate(text_samples(), padding_free=True))
    assert found.dtype == torch.float32
    assert not torch.equal(found, found.bfloat16().float())


@pytest.mark.parametrize("family", CHANGING)
def test_values_are_what_the_head_gives_whatever_the_family_does_to_logits(family):
    model = CHANGING[family]()
    head = give_value_head(model)
    core_critics.draw_head(head)
    head.bias.data.fill_(100.0)  # which Gemma 2 would bound to 29.9
    given = []
    head.register_forward_hook(lambda module, inputs, output: given.append(inputs[0]))
    critic = make_critic(model)
    annotated = critic.add_values(text_samples(((3, 4), (2, 2))))
    given.clear()
    logits = model(input_ids=annotated[0].token_ids[None]).logits[0, 2:-1, 0]
    outputs = torch.nn.functional.linear(given[0], head.weight, head.bias)[0, 2:-1, 0]
    assert (outputs - logits).abs().min() > 1, "this family changes its logits"
    torch.testing.assert_close(annotated[0].values[3:], outputs, atol=1e-5, rtol=1e-5)
    critic.forward_backward([replace(sample, returns=sample.values - 1) for sample in annotated])
    torch.testing.assert_close(head.bias.grad, torch.ones(1), atol=1e-5, rtol=1e-5)


def test_a_head_over_a_vocabulary_is_no_critics():
    with pytest.raises(ValueError, match="head has 64 outputs, not one; see give_value_head"):
        make_critic(qwen2()).add_values(text_samples())


# --- returns --------------------------------------------------------------------------------------------------------


def annotated():
    """Samples with values, and log-probs of policy and reference."""
    generator = torch.Generator().manual_seed(7)
    fields = ("values", "old_logprobs", "ref_logprobs")
    return [
        replace(s, **{name: -torch.rand(len(s.token_ids), generator=generator) for name in fields})
        for s in text_samples()
    ]


def test_returns_are_what_gae_gives_and_tokens_are_gone_through_once(monkeypatch):
    samples, gone_through = annotated(), []
    expected = assign([replace(s) for s in samples], _CallsOnly(GAE(0.9, 0.8)))
    scan = gae.scan

    def counting(values, *settings):
        gone_through.append(len(values))
        return scan(values, *settings)

    monkeypatch.setattr(gae, "scan", counting)
    found = assign(samples, GAE(0.9, 0.8))
    assert sum(gone_through) == len(samples)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.advantages, other.advantages)
    mask = rows(found, "loss_mask")
    unwhitened = rows(found, "returns") - rows(samples, "values")
    whitened = rows(found, "advantages")
    assert torch.corrcoef(torch.stack([unwhitened[mask], whitened[mask]]))[0, 1] > 1 - 1e-6


class _CallsOnly(Estimator):
    """An estimator of which only the advantages are asked."""

    needs = ("values",)

    def __init__(self, estimator):
        self._estimator = estimator

    def __call__(self, inputs):
        return self._estimator(inputs)


@pytest.mark.parametrize("kl_penalty", [None, "kl", "low_var_kl"])
def test_with_a_zero_critic_gae_gives_the_advantages_of_reinforce(kl_penalty):
    samples = [replace(s, values=torch.zeros(len(s.token_ids))) for s in annotated()]
    kl = {"kl_penalty": kl_penalty, "kl_coef": 0.1}
    critic, reinforce = assign(samples, GAE(), **kl), assign(samples, ReinforcePlusPlus(), **kl)
    torch.testing.assert_close(tokens(critic, "advantages"), tokens(reinforce, "advantages"), atol=1e-6, rtol=0)
    assert tokens(critic, "advantages").abs().max() > 0.5
    penalties = 0.0
    if kl_penalty:
        mask = rows(samples, "loss_mask")
        old, ref = (rows(samples, name).double() for name in ("old_logprobs", "ref_logprobs"))
        penalties = reward_penalties(kl_penalty, old, ref, mask, 0.1).flip(-1).cumsum(-1).flip(-1)
    rewards = torch.tensor([s.reward for s in samples])[:, None]
    expected = torch.where(rows(samples, "loss_mask"), rewards - penalties, 0.0).float()
    torch.testing.assert_close(rows(critic, "returns"), expected, atol=1e-6, rtol=0)


def test_a_users_estimator_by_values_has_its_critic_learn_the_rewards_to_come():
    def mine(inputs):
        return torch.where(inputs.mask, inputs.rewards[:, None] - inputs.values, 0.0)

    mine.needs = "values"
    samples = assign(annotated(), as_estimator(mine, "mine"))
    for sample in samples:
        expected = torch.full((len(sample.token_ids),), sample.reward) * sample.loss_mask
        torch.testing.assert_close(sample.returns, expected)
        torch.testing.assert_close(sample.advantages, (expected - sample.values) * sample.loss_mask)


def test_estimators_without_a_critic_give_no_returns():
    assert all(sample.returns is None for sample in assign(annotated(), GRPO()))


# --- updates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["token", "seq", "seq-mean-token-sum-norm"])
def test_no_cut_changes_gradient_or_metrics(aggregation):
    given = forecast(exact_critic(), step_samples("text"))
    found = []
    for batching in CUTS.values():
        critic = exact_critic(batching=batching, aggregation=aggregation, length=20)
        metrics = critic.forward_backward(given)
        found.append((metrics, {name: p.grad for name, p in critic.model.named_parameters()}))
    (first, gradients), *others = found
    assert first["vf_loss"] > 0
    for metrics, own in others:
        assert metrics == pytest.approx(first, abs=1e-10)
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, gradients[name], atol=1e-10, rtol=0)
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-3


def test_updates_bring_the_loss_down():
    critic = exact_critic(max_grad_norm=1.0, loss=ValueLoss(None))
    given = forecast(critic, step_samples("text"))
    losses = []
    for _ in range(20):
        losses.append(critic.forward_backward(given)["vf_loss"])
        critic.optim_step()
    assert losses[-1] < losses[0] / 4


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(caplog):
    critic = exact_critic()
    given = forecast(critic, step_samples("text"))
    before = [p.detach().clone() for p in critic.model.parameters()]
    for _ in range(2):
        critic.forward_backward([replace(s, returns=s.returns * float("nan")) for s in given])
        metrics = critic.optim_step()
    assert metrics["skipped_steps"] == 2
    assert caplog.text.count("optimizer step 0 of the critic skipped") == 1
    assert "of the critic skipped" in caplog.text
    assert all(torch.equal(p, old) for p, old in zip(critic.model.parameters(), before, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_old_values_that_are_not_finite_skip_the_step(bad, caplog):
    critic = exact_critic()
    given = forecast(critic, step_samples("text"))
    given[1] = replace(given[1], values=torch.where(given[1].loss_mask, bad, 0.0))
    before = [p.detach().clone() for p in critic.model.parameters()]
    critic.forward_backward(given)
    assert critic.optim_step()["skipped_steps"] == 1
    assert f"1 of {len(given)} samples have values that are not finite, first sample 1" in caplog.text
    assert all(torch.equal(p, old) for p, old in zip(critic.model.parameters(), before, strict=True))


def test_samples_without_values_or_returns_and_a_step_of_none_are_refused():
    critic = exact_critic()
    assert critic.add_values([]) == []
    with pytest.raises(ValueError, match="was given no samples"):
        critic.forward_backward([])
    with pytest.raises(ValueError, match="a sample has no values; call add_values first"):
        critic.forward_backward(text_samples())
    with pytest.raises(ValueError, match=r"a sample has no returns; call advantages\.assign first"):
        critic.forward_backward(critic.add_values(text_samples()))
    with pytest.raises(RuntimeError, match="no gradient to step with"):
        critic.optim_step()


def test_a_critic_that_pads_has_the_values_of_one_that_packs():
    critic = exact_critic()
    packed = critic.add_values(step_samples("text"))
    critic.set_layout("padded")
    padded = critic.add_values(step_samples("text"))
    torch.testing.assert_close(tokens(padded, "values"), tokens(packed, "values"), atol=1e-6, rtol=0)


def test_an_offloaded_critic_holds_no_device_memory_and_learns_the_same_to_the_bit(tmp_path):
    staying, leaving = exact_critic(), exact_critic(offload=Offload(weights=True, optimizer=True))
    expected = take_steps(staying, step_samples("text"))
    leaving.offload()
    add_values = leaving.add_values

    def add_values_after_offload(samples):
        leaving.offload()
        assert bytes_on_device([*tensors_of(leaving.model), *states_of(leaving.optimizer)]) == 0
        return add_values(samples)

    leaving.add_values = add_values_after_offload
    found = take_steps(leaving, step_samples("text"))
    assert all(torch.equal(one, other) for one, other in zip(found[0], expected[0], strict=True))
    assert all(torch.equal(tensor, found[2][name]) for name, tensor in expected[2].items())


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_critic_that_was_saved_goes_on_to_the_bit(tmp_path):
    whole = exact_critic()
    take_steps(whole, step_samples("text"))
    whole.save(tmp_path)
    _, _, expected = take_steps(whole, step_samples("text"))
    resumed = exact_critic()
    resumed.load(tmp_path)
    _, metrics, weights = take_steps(resumed, step_samples("text"))
    assert resumed.step == 6
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    weights_only = exact_critic()
    weights_only.load(tmp_path, model_only=True)
    assert weights_only.step == 0
    assert metrics[-1]["skipped_steps"] == 0


# --- ranks ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("actors", "own"), [(1, 2), (2, 1)])
def test_ranks_share_a_critics_sequences_or_not_whatever_the_actors_do(actors, own):
    expected = core_critics.learn_together()
    for found in ranks.run(core_critics.learn_together, actors, own):
        core_critics.assert_same_course(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), [("pictures", "full"), ("text", "hybrid"), ("text", "offloaded")])
def test_every_form_predicts_and_learns_what_one_process_does(name, form):
    expected = core_critics.learn_exactly(name)
    for found in ranks.run(core_critics.learn_exactly, name, FORMS[form], world=FORMS[form].world):
        core_critics.assert_same_course(found, expected)


@pytest.mark.slow
def test_what_two_ranks_saved_one_process_goes_on_with(tmp_path):
    ranks.run(core_critics.save_after_one, tmp_path)
    resumed, whole = exact_critic(), exact_critic()
    resumed.load(tmp_path)
    whole.forward_backward(forecast(whole, step_samples("text")))
    whole.optim_step()
    *_, weights = take_steps(resumed, step_samples("text"))
    *_, expected = take_steps(whole, step_samples("text"))
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-9, rtol=0)
