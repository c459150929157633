"""A mixture-of-experts model in an engine has the learner's log-probs after every weight sync."""

from pathlib import Path

import families
import pytest
import torch
from family_prompts import make_prompts
from test_engines import ENGINES, PICTURES, MakeEngine, assert_agreement, learner_of, rules_of

from r1_rollout.types import SamplingParams
from r1_rollout.weights import LocalWeights

PARAMS = SamplingParams(max_tokens=8, n=3)


@pytest.mark.parametrize("make_engine", ENGINES)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])
def test_an_engines_logprobs_are_the_learners_after_experts_and_router_have_moved(
    make_engine: MakeEngine, family: str, tmp_path: Path
) -> None:
    learner, prompts = learner_of(families.make_model(family), PARAMS), make_prompts(family, PICTURES[:3])
    with make_engine(family, tmp_path, **rules_of(family)) as engine:
        for version in (1, 2):
            with engine.active(LocalWeights(learner.weights(), version)):
                groups = dict(engine.generate(prompts, PARAMS))
            assert_agreement(learner, prompts, [groups[index] for index in range(len(prompts))])
            with torch.no_grad():
                for name, parameter in learner.model.named_parameters():
                    if ".mlp." in name:
                        parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
