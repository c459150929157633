"""Prompts of every vision-language family in one pack have the log-probs that the model alone gives them.

Alone, Hugging Face's model gets what its processor returns and finds the positions by itself, those of the answer, too,
as it does in `generate`.
"""

from dataclasses import replace
from typing import Any

import families
import pytest
import torch
from family_prompts import make_learner, make_prompts, make_samples
from golden import prompt_cases
from torch import Tensor
from transformers import DynamicCache

from r1_core.types import Sample
from r1_data.types import Prompt


@torch.no_grad()
def logprobs_alone(model: Any, prompt: Prompt, sample: Sample, kinds: Tensor) -> Tensor:
    """Log-probs of the answer's tokens: the prompt first, then the answer behind it in the cache."""
    answer, cache = sample.token_ids[len(prompt.token_ids) :], DynamicCache(config=model.config.get_text_config())
    model.model.rope_deltas = None
    prompt_ids = torch.tensor([prompt.token_ids])
    first = model(prompt_ids, mm_token_type_ids=kinds[None], past_key_values=cache, **prompt.model_inputs).logits[
        0, -1:
    ]
    rest = model(answer[None], past_key_values=cache).logits[0, :-1]
    return torch.cat([first, rest]).log_softmax(-1).gather(1, answer[:, None])[:, 0]


LAYOUTS = {True: "packed", False: "padded"}
HYBRID_CASES = ("pictures around a video", "picture last")  # transformers' own recurrence is slow
READ = [(family, layout) for layout in LAYOUTS for family in (*families.VISION_FAMILIES, "qwen3_5")]


@pytest.mark.parametrize(("family", "padding_free"), READ, ids=[f"{family} {LAYOUTS[how]}" for family, how in READ])
def test_a_pack_of_rendered_prompts_is_the_same_prompts_alone(family: str, padding_free: bool) -> None:
    names = HYBRID_CASES if family == "qwen3_5" else prompt_cases.CASES
    prompts, config = make_prompts(family, names), families.make_config(family)
    samples = make_samples(prompts)
    model, plain = families.make_model(family), families.make_model(family)
    learner = make_learner(model, rows=len(samples), padding_free=padding_free)
    for prompt, sample, annotated in zip(
        prompts, samples, learner.add_logprobs(samples, ["old_logprobs"]), strict=True
    ):
        token_ids = torch.tensor(prompt.token_ids)
        kinds = (token_ids == config.image_token_id).int() + 2 * (token_ids == config.video_token_id).int()
        expected = logprobs_alone(plain, prompt, sample, kinds)
        assert annotated.old_logprobs is not None
        actual = annotated.old_logprobs[sample.loss_mask]
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=1e-5, msg=lambda text, row=prompt.id: f"{row}: {text}"
        )


@pytest.mark.parametrize("family", families.VISION_FAMILIES)
def test_a_picture_changes_its_own_row_of_a_pack_and_no_other(family: str) -> None:
    names = ["pictures around a video", "videos around a picture", "picture first"]
    samples = make_samples(make_prompts(family, names))
    changed = {**samples[0].model_inputs}
    for name in ("pixel_values", "pixel_values_videos"):
        changed[name] = -3 * changed[name]
    learner = make_learner(families.make_model(family), rows=len(samples))
    before = learner.add_logprobs(samples, ["old_logprobs"])
    after = learner.add_logprobs([replace(samples[0], model_inputs=changed), *samples[1:]], ["old_logprobs"])
    gaps = [float((a.old_logprobs - b.old_logprobs).abs().max()) for a, b in zip(before, after, strict=True)]
    assert gaps[0] > 1e-2
    assert max(gaps[1:]) < 1e-5
