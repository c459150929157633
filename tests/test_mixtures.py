"""A mixture-of-experts model in an engine has the learner's log-probs after every weight sync.

vLLM names and lays out experts in its own way, and r1's check that all weights came leaves experts out. So what its own
loader makes of published names is compared with what it makes of r1's, tensor by tensor.
"""

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from family_prompts import make_prompts
from safetensors.torch import load_file, save_file
from test_engines import ENGINES, PICTURES, VLLM_MARKS, MakeEngine, assert_agreement, learner_of, rules_of

from r1_cli.jobs.merge import merge
from r1_core.learner import Learner
from r1_data.types import Prompt
from r1_rollout.errors import WeightsError
from r1_rollout.types import SamplingParams
from r1_rollout.weights import LocalWeights

PARAMS = SamplingParams(max_tokens=8, n=3)
LOADED_ONCE = ("gpt_oss",)  # vLLM 0.32 does not take their experts in a later load
FAMILIES = ("qwen3_moe", "qwen3_vl_moe", *families.MIXTURES)


def turn_experts(folder: Path) -> dict[str, torch.Tensor]:
    """Write experts as [in, out], as Qwen3-VL-MoE's are published; return all weights of the file."""
    weights = load_file(folder / "model.safetensors")
    weights |= {name: tensor.mT.contiguous() for name, tensor in weights.items() if ".experts." in name}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_checkpoint_has_experts_as_they_are_published(family: str, tmp_path: Path) -> None:
    actor = tmp_path / "global_step_1" / "actor"
    families.save_model(family, actor)  # as a checkpoint of r1 has them
    published = load_file(actor / "model.safetensors")
    merged = load_file(merge(actor, tmp_path / "merged") / "model.safetensors")
    if family == "qwen3_vl_moe":
        published = turn_experts(actor)
        assert load_file(merge(actor, tmp_path / "merged") / "model.safetensors").keys() == merged.keys()
    assert {name: tensor.shape for name, tensor in merged.items()} == {
        name: tensor.shape for name, tensor in published.items()
    }
    assert all(torch.equal(merged[name], tensor) for name, tensor in published.items())


@pytest.mark.parametrize("make_engine", ENGINES[:1])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engines_logprobs_are_the_learners_after_experts_and_router_have_moved(
    make_engine: MakeEngine, family: str, tmp_path: Path
) -> None:
    learner, prompts = learner_of(families.make_model(family), PARAMS), make_prompts(family, PICTURES[:3])
    with make_engine(family, tmp_path, **rules_of(family)) as engine:
        for version in (1, 2):
            assert_synced(engine, learner, prompts, version)
            move_experts(learner)


def assert_synced(engine: Any, learner: Learner, prompts: list[Prompt], version: int) -> None:
    with engine.active(LocalWeights(learner.weights(), version)):
        groups = dict(engine.generate(prompts, PARAMS))
    assert_agreement(learner, prompts, [groups[index] for index in range(len(prompts))])


@torch.no_grad()
def move_experts(learner: Learner) -> None:
    for name, parameter in learner.model.named_parameters():
        if ".mlp." in name or ".block_sparse_moe." in name:
            parameter.mul_(1 + 0.2 * torch.randn_like(parameter))


def copies(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", [pytest.param(name, marks=VLLM_MARKS) for name in FAMILIES])
def test_vllm_has_the_published_weights_after_a_sync_too_and_other_ones_after_experts_have_moved(
    family: str, tmp_path: Path
) -> None:
    from r1_rollout.vllm.engine import VllmEngine

    model = families.make_model(family)
    path = families.save_model(family, tmp_path, model)
    if family == "qwen3_vl_moe":
        turn_experts(tmp_path)
    learner, prompts = learner_of(model, PARAMS), make_prompts(family, PICTURES[:3])
    options = {"dtype": "float32", "kv_cache_bytes": 1 << 26, "max_model_len": 1024}
    engine = VllmEngine.load(path, **options, **rules_of(family))
    try:
        with engine.active():  # with the names of the files, by vLLM alone
            groups = dict(engine.generate(prompts, PARAMS))
            (published,) = engine._call(engine._llm.apply_model, copies)
        assert_agreement(learner, prompts, [groups[index] for index in range(len(prompts))])
        if family in LOADED_ONCE:
            with pytest.raises(WeightsError, match="vLLM keeps the old experts of layer 0 and 1 other layers"):
                assert_synced(engine, learner, prompts, 1)
            return
        assert_synced(engine, learner, prompts, 1)
        (synced,) = engine._call(engine._llm.apply_model, copies)
        assert published.keys() == synced.keys()
        assert [name for name in published if not torch.equal(published[name], synced[name])] == []
        move_experts(learner)
        assert_synced(engine, learner, prompts, 2)
    finally:
        engine.close()


@pytest.mark.vllm
@VLLM_MARKS[1]
def test_vllm_returns_no_experts_on_processors(tmp_path: Path) -> None:
    """If it does, `worker.actor.router_replay` need not refuse vLLM any more."""
    from vllm import EngineArgs

    options = EngineArgs(
        families.save_model("mixtral", tmp_path), enforce_eager=True, enable_return_routed_experts=True
    )
    with pytest.raises(ValueError, match="requires Model Runner V2"):
        options.create_engine_config()
