"""Packed, padded and one by one are the same to the learner, for every family that r1 trains, pictures and videos too.

The families' own position rules and r1's attention are used, as in a run. One by one, the model gets a sample as
Hugging Face means it to: torch's attention, no positions given, the model finds its own.
"""

from functools import partial
from typing import Any

import pytest
import torch
from cli_families import (
    MIXTURES,
    ROWS,
    SMALL,
    TEXT_FAMILIES,
    VISION_FAMILIES,
    build,
    kinds,
    make_episodes,
    make_groups,
    make_samples,
)
from core_models import _rotate_vision, in_float64
from torch import Tensor
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

from r1_cli.models import shared_prompts
from r1_cli.models.families import is_vision_language
from r1_cli.models.load import enable_gradient_checkpointing
from r1_core.advantages import GRPO, assign
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.optim import build_optimizer
from r1_core.objective import Objective
from r1_core.types import Sample, join_inputs

CASES = [(name, "text") for name in TEXT_FAMILIES] + [
    pytest.param(name, rows, marks=pytest.mark.slow if name in MIXTURES else ())
    for name in VISION_FAMILIES
    for rows in ROWS
]

SHARING = [("qwen2", "text")]
SHARING += [(name, rows) for name in VISION_FAMILIES if name not in MIXTURES for rows in ROWS]


def logprobs_alone(model: Any, sample: Sample) -> Tensor:
    """Log-probs [L] of the trained tokens by a plain call of the model, 0 on the others."""
    inputs = join_inputs([sample.model_inputs, sample.later_inputs])
    if is_vision_language(model.config):
        inputs["mm_token_type_ids"] = kinds(sample.token_ids)[None]
    logits = model(input_ids=sample.token_ids[None], **inputs, use_cache=False).logits[0]
    chosen = logits[:-1].log_softmax(-1).gather(-1, sample.token_ids[1:, None]).squeeze(-1)
    return torch.where(sample.loss_mask, torch.cat([chosen.new_zeros(1), chosen]), 0.0)


def step(model: Any, samples: list[Sample], batching: Batching) -> tuple[Tensor, dict[str, Tensor]]:
    """Old log-probs of all tokens, and the gradient of a step with them."""
    annotated = assign(learner_of(model, batching).add_logprobs(samples, ["old_logprobs"]), GRPO())
    return old_logprobs(annotated), gradient(model, annotated, batching)


def learner_of(model: Any, batching: Batching) -> Learner:
    return Learner(model, build_optimizer(model.named_parameters(), lr=1e-3), lambda step: 1.0, batching=batching)


def old_logprobs(annotated: list[Sample]) -> Tensor:
    return torch.cat([sample.old_logprobs for sample in annotated if sample.old_logprobs is not None])


def gradient(model: Any, annotated: list[Sample], batching: Batching) -> dict[str, Tensor]:
    model.zero_grad()
    learner_of(model, batching).forward_backward(annotated, Objective(entropy_coef=0.1))
    return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "rows"), CASES)
def test_packed_is_padded_is_one_by_one(name: str, rows: str) -> None:
    model, plain = build(name, packed=True), build(name, packed=False)
    samples = make_samples(name, ROWS.get(rows, [()] * 5), plain.config)
    with torch.no_grad():
        expected_logprobs = torch.cat([logprobs_alone(plain, sample) for sample in samples])
    _, expected = step(plain, samples, Batching(False, MicroLimit(1), MicroLimit(1)))
    assert ("model.visual.patch_embed.proj.weight" in expected) == (rows != "text")
    for padding_free, limit in ((True, 2), (True, 5), (False, 1), (False, 5)):
        logprobs, grads = step(model, samples, Batching(padding_free, MicroLimit(limit), MicroLimit(limit)))
        # Hugging Face computes norms and rotations in float32 whatever the model's precision.
        torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=0, atol=1e-5)
        assert grads.keys() == expected.keys()
        for key, grad in grads.items():
            named = partial("{}: {}".format, key)
            torch.testing.assert_close(grad, expected[key], rtol=1e-5, atol=1e-5, msg=named)


def exact(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model of float64 that nowhere rounds to float32."""
    for family in (modeling_qwen2_vl, modeling_qwen3_vl):
        monkeypatch.setattr(family, "apply_rotary_pos_emb_vision", _rotate_vision)
    return in_float64(model, monkeypatch)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("qwen2", "text"),
        ("qwen3", "text"),
        *((name, rows) for name in VISION_FAMILIES if "moe" not in name for rows in ROWS),
    ],
)
def test_shared_prompts_change_no_gradient_however_groups_are_cut_and_layers_are_checkpointed(
    name: str, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = exact(build(name, packed=True), monkeypatch)
    samples = make_groups(name, ROWS.get(rows, [()] * 5), model.config)
    apart = Batching(True, MicroLimit(4), MicroLimit(4))
    annotated = assign(learner_of(model, apart).add_logprobs(samples, ["old_logprobs"]), GRPO())
    expected = gradient(model, annotated, apart)
    # Small groups whole through one call, and by the way of large ones.
    for limit, few in ((MicroLimit(11), 192), (MicroLimit(11), 0), (MicroLimit(3), 0), (MicroLimit(tokens=60), 192)):
        monkeypatch.setattr(shared_prompts, "SMALL_GROUP_TOKENS", few)
        batching = Batching(True, limit, limit, share_prompts=True)
        found = learner_of(model, batching).add_logprobs(samples, ["old_logprobs"])
        torch.testing.assert_close(old_logprobs(found), old_logprobs(annotated), rtol=0, atol=1e-6)
        grads = gradient(model, annotated, batching)
        assert grads.keys() == expected.keys()
        for key, grad in grads.items():
            torch.testing.assert_close(grad, expected[key], rtol=1e-10, atol=1e-10)
        enable_gradient_checkpointing(model, on_host=True)


def test_a_sample_in_a_pack_does_not_see_its_neighbours_picture() -> None:
    name = "qwen3-vl"
    model, config = build(name, packed=True), VISION_FAMILIES[name][1]()
    samples = make_samples(name, [(SMALL,), (SMALL,), ()], config)
    other = make_samples(name, [(SMALL,), (SMALL,), ()], config)
    other[0].model_inputs["pixel_values"].mul_(-3)
    batching = Batching(True, MicroLimit(3), MicroLimit(3))
    (before, _), (after, _) = step(model, samples, batching), step(model, other, batching)
    own = len(samples[0].token_ids)
    assert float((before - after)[:own].abs().max()) > 1e-3
    torch.testing.assert_close(before[own:], after[own:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in VISION_FAMILIES if name not in MIXTURES])
def test_pictures_between_turns_are_seen_as_the_model_alone_sees_them(name: str) -> None:
    """The episodes of a prompt share its pictures; those that their environments add are their own."""
    model, plain = build(name, packed=True), build(name, packed=False)
    samples = make_episodes(name, ROWS["videos"][:3], plain.config)
    with torch.no_grad():
        expected = torch.cat([logprobs_alone(plain, sample) for sample in samples])
    for padding_free, share in ((True, False), (True, True), (False, False)):
        for limit in (MicroLimit(9), MicroLimit(2), MicroLimit(tokens=90)):
            batching = Batching(padding_free, limit, limit, share_prompts=share)
            found = old_logprobs(learner_of(model, batching).add_logprobs(samples, ["old_logprobs"]))
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
