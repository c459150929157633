"""Losses of fine-tuning and of preferences are those of Hugging Face's models, over twelve families and all layouts."""

from dataclasses import replace
from typing import Any

import families
import pytest
import ranks
import torch
from family_prompts import make_learner, make_prompts, make_samples
from family_ranks import LAYOUTS, PICTURES, build, fine_tune, make_demonstrations
from golden import prompt_cases
from torch import Tensor
from torch.nn.functional import logsigmoid

from r1_core.preference import OBJECTIVE, PreferenceLoss, weigh
from r1_core.types import Sample
from r1_data.types import Prompt

TEXT = (*families.TEXT_FAMILIES, *families.FURTHER_TEXT)
FAMILIES = (*TEXT, *families.VISION_FAMILIES, *families.FURTHER_VISION, "mistral")


def loss_of_hugging_face(model: Any, prompt: Prompt, sample: Sample) -> Tensor:
    """What a row alone gets from `labels`, with what the processor returns and positions of the model's own."""
    more: dict[str, Tensor] = dict(prompt.model_inputs)
    if more:
        config = model.config
        kinds = (sample.token_ids == config.image_token_id).int() + 2 * (sample.token_ids == config.video_token_id)
        more["mm_token_type_ids"] = kinds.int()[None]
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    labels = torch.where(sample.loss_mask, sample.token_ids, -100)
    loss: Tensor = model(input_ids=sample.token_ids[None], labels=labels[None], use_cache=False, **more).loss
    return loss


@pytest.mark.slow
@pytest.mark.parametrize(("family", "world"), [(family, 2 + 2 * (place % 2)) for place, family in enumerate(FAMILIES)])
def test_the_loss_is_that_of_hugging_face_in_every_layout_on_one_and_on_two_or_four_ranks(
    family: str, world: int
) -> None:
    assert set(PICTURES) <= set(prompt_cases.CASES)
    plain, pairs = build(family), list(zip(*make_demonstrations(family), strict=True))
    lengths = torch.tensor([sample.response_length for _, sample in pairs])
    alone = torch.stack([loss_of_hugging_face(plain, *pair) for pair in pairs])
    expected = (alone.double() * lengths).sum() / lengths.sum()  # a sum in float32 is 1e-6 off
    expected.backward()
    gradients = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
    process = [fine_tune(family, False)]
    for found in [*process, *ranks.run(fine_tune, family, world=world)]:
        assert found.keys() == set(LAYOUTS)
        for layout, own in found.items():
            assert own.loss == pytest.approx(expected.item(), abs=1e-6), layout
            assert own.rows == pytest.approx(alone.tolist(), abs=2e-6), layout
            assert gradients.keys() <= own.gradients.keys()
            for name, there in gradients.items():
                here = own.gradients[name]
                torch.testing.assert_close(here, there, atol=2e-6, rtol=1e-4, msg=f"{layout}: {name}")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_a_preference_is_that_of_hugging_face_in_every_layout(family: str) -> None:
    prompts = make_prompts("llama" if family == "mistral" else family, PICTURES)
    prompts = [prompt for prompt in prompts for _ in range(2)]  # chosen and rejected
    samples = [
        replace(
            sample,
            prompt_length=len(prompt.token_ids),
            group_id=place // 2,
            ref_logprobs=-0.5 * sample.loss_mask.float() * (1 + place % 2),
        )
        for place, (prompt, sample) in enumerate(zip(prompts, make_samples(prompts), strict=True))
    ]
    assert any(not one.token_ids.equal(two.token_ids) for one, two in zip(samples[::2], samples[1::2], strict=True))
    plain, lengths = build(family), torch.tensor([sample.response_length for sample in samples])
    alone = torch.stack([loss_of_hugging_face(plain, *pair) for pair in zip(prompts, samples, strict=True)])
    rewards = 0.1 * lengths * (-alone + 0.5 * (1 + torch.arange(len(samples)) % 2))
    expected = -logsigmoid(rewards[::2] - rewards[1::2]).mean()
    expected.backward()
    for layout in LAYOUTS:
        learner = make_learner(build(family), rows=3 if "cut" in layout else 99, padding_free=layout != "padded")
        learner.batching = replace(learner.batching, share_prompts=layout == "shared")
        weighed, metrics = weigh(learner.add_logprobs(samples, ("old_logprobs",)), PreferenceLoss("dpo", 0.1))
        assert metrics["preference_loss"] == pytest.approx(expected.item(), abs=1e-5), layout
        learner.forward_backward(weighed, OBJECTIVE)
        for (name, here), there in zip(learner.model.named_parameters(), plain.parameters(), strict=True):
            if there.grad is not None:
                torch.testing.assert_close(here.grad, there.grad, atol=2e-6, rtol=1e-3, msg=f"{layout}: {name}")
