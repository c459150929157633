"""Mixtures of experts: computed at once where torch can, and trained by the policy's loss alone, which is said."""

from contextlib import ExitStack
from typing import Any, cast

import families
import pytest
import torch

from r1_cli.config import load_config
from r1_cli.hardware import Hardware
from r1_cli.jobs.learner import prepare_learner
from r1_cli.models.families import configure_experts, describe_router, has_grouped_product
from r1_cli.models.files import ModelFiles
from r1_rollout.routing import count_experts

CPU = torch.device("cpu")
MIXTURES = ("qwen3_moe", "qwen3_vl_moe")


def test_experts_are_computed_at_once_where_torch_has_it_for_the_precision_and_give_the_same() -> None:
    found = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = families.make_model("qwen3_moe", scale=1.0).to(dtype)
        configure_experts(model, dtype, CPU)
        chosen = model.config._experts_implementation
        assert chosen == ("grouped_mm" if has_grouped_product(dtype, CPU) else "eager")
        found[chosen] = model(input_ids=torch.arange(12)[None]).logits.float()
        found[dtype] = found[chosen]
    torch.testing.assert_close(found[torch.float32], found[torch.float64], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", MIXTURES)
def test_statistics_of_the_router_are_not_kept(family: str) -> None:
    model = families.make_model(family)
    model.config.get_text_config().output_router_logits = True
    configure_experts(model, torch.float32, CPU)
    assert model(input_ids=torch.arange(12)[None]).router_logits is None


@pytest.mark.parametrize("family", [*MIXTURES, "qwen2"])
def test_that_the_auxiliary_loss_is_off_is_said_at_start(family: str, caplog: pytest.LogCaptureFixture) -> None:
    words = ["data.train_files=hub/rows@train", "worker.reward.reward_function=math", "trainer.n_gpus_per_node=1"]
    config, _ = load_config([*words, "worker.actor.model.model_path=org/model"])
    hf_config, nothing = families.make_config(family), cast(Any, None)
    files = ModelFiles("org/model", hf_config, nothing, nothing)
    with ExitStack() as stack, caplog.at_level("INFO", "r1"):
        prepare_learner(config, Hardware("cpu"), files, nothing, (), None, stack)
    said = [record.getMessage() for record in caplog.records if "auxiliary loss" in record.getMessage()]
    assert said == [describe_router(hf_config)] * (count_experts(hf_config) > 0)
    assert all(f"{family}: the policy's loss alone trains the router" in line for line in said)
