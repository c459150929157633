"""An adapter on a frozen base: the same on any number of ranks, with the base as its reference, as peft reads it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from cli_adapters import (
    NAMES,
    build,
    first_factors,
    half_precision,
    learn,
    make_folders,
    save_and_resume,
    take_step,
)
from core_models import qwen2
from safetensors.torch import load_file, save_file
from torch import Tensor

from r1_cli.config.model import LoraConfig
from r1_cli.jobs.merge import merge
from r1_cli.models.adapters import AdapterError, Adapters, Form
from r1_cli.models.load import ModelError, load_model
from r1_cli.models.load import load_config as read_files
from r1_cli.models.shared_weights import share_weights
from r1_cli.train.sampling.weight_check import CheckedGenerator, LearnerReference
from r1_cli.train.types import weights_of
from r1_core.learner.offload import Offload, distinct_storages
from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.errors import StaleWeights
from r1_rollout.lora import Adapter
from r1_rollout.probes import text_probes
from r1_rollout.weight_checks import TOLERANCE, Canary
from r1_rollout.weights import LocalWeights

PT = {"format": "pt"}
OPTIMIZER_LEAVES = Offload(optimizer=True)
MLP = ("up_proj", "gate_proj", "down_proj")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    return {name: make_folders(tmp_path_factory.mktemp(name), name) for name in NAMES}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], atol=atol, rtol=0, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("shard_size", [-1, 1])
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_train_the_adapter_that_one_process_trains(folders: Any, name: str, shard_size: int) -> None:
    metrics, factors = learn(*folders[name], name)
    for own, found in ranks.run(learn, *folders[name], name, shard_size):
        assert own == [pytest.approx(expected, abs=1e-9) for expected in metrics]
        assert_close(found, factors, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_the_base_as_a_model_of_its_own_would_be(folders: Any, name: str) -> None:
    base, adapter = folders[name]
    form = Form(4, 8, "all-linear", ".*visual.*", adapter)
    one, two = build(base, form), build(base, form, separate=True)
    for seed, objective in enumerate(("KL", "full KL")):
        own, wanted = (take_step(learner, name, objective, seed) for learner in (one, two))
        assert own["kl_loss"] == pytest.approx(wanted["kl_loss"], abs=1e-10)
        assert own["kl_loss"] > 1e-4
        assert own == pytest.approx(wanted, abs=1e-9)


@pytest.mark.slow
def test_peft_reads_a_checkpoint_and_merging_it_gives_the_adapted_model(folders: Any, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, adapter = folders["text"]
    learner = build(base, Form(4, 8, "all-linear", ".*visual.*", adapter), dtype=torch.float32)
    take_step(learner, "text", "KL")
    learner.save(tmp_path / "actor")
    read_files(str(base)).save_pretrained(tmp_path / "actor")
    assert {"adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"} <= {
        file.name for file in (tmp_path / "actor").iterdir()
    }
    assert not (tmp_path / "actor/model.safetensors").exists()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        wanted = learner.model.eval()(input_ids=tokens).logits
        plain = AutoModelForCausalLM.from_pretrained(base)
        assert (plain(input_ids=tokens).logits - wanted).abs().max() > 0.01
        read = PeftModel.from_pretrained(plain, str(tmp_path / "actor"))
        torch.testing.assert_close(read(input_ids=tokens).logits, wanted, atol=1e-6, rtol=0)
        merged = AutoModelForCausalLM.from_pretrained(merge(tmp_path))
        torch.testing.assert_close(merged(input_ids=tokens).logits, wanted, atol=1e-6, rtol=0)
    other = load_file(base / "model.safetensors")
    save_file({**other, "model.norm.weight": other["model.norm.weight"] + 1}, base / "model.safetensors", PT)
    try:
        with pytest.raises(ModelError, match="has other weights now"):
            merge(tmp_path)
    finally:
        save_file(other, base / "model.safetensors", PT)


@pytest.mark.slow
def test_factors_alone_are_handed_over_and_a_swapped_one_is_found(folders: Any) -> None:
    base, adapter = folders["text"]
    learner = build(base, Form(4, 8, "all-linear", ".*visual.*", adapter), dtype=torch.float32)
    engine = EmbeddedEngine(
        load_model(str(base), config=read_files(str(base)), dtype=torch.float32, device=torch.device("cpu")),
        end_token_ids={1},
    )
    probes = [text_probes([*range(2, 50)], axes=1, longest_prompt=8, longest_response=8, variant=i) for i in (0, 1)]
    proven = CheckedGenerator(engine, LearnerReference(learner), Canary(*probes, TOLERANCE[torch.float32]))
    sent = weights_of(learner, 1).tensors()
    assert isinstance(sent, Adapter)
    factors = sum(p.numel() for p in learner.model.parameters() if p.requires_grad)
    assert sum(tensor.numel() for _, tensor in sent.weights) == factors
    for version in (1, 2):
        with proven.active(weights_of(learner, version)):
            assert proven.gap < TOLERANCE[torch.float32] / 5
        take_step(learner, "text", "KL", version)

    engine.__class__ = Swapping
    with pytest.raises(
        StaleWeights, match=r"bytes of 2 of the engine's weights are not the learner's\. At fault: adapter"
    ):
        proven.load_weights(weights_of(learner, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_learner_and_engine_have_one_copy_of_the_base_and_do_not_disturb_each_other(folders: Any, name: str) -> None:
    base, adapter = folders[name]
    form = Form(4, 8, "all-linear", ".*visual.*", adapter)
    alone, learner = (build(base, form, dtype=torch.float32, offload=OPTIMIZER_LEAVES) for _ in range(2))
    model = share_weights(learner.model, read_files(str(base)))
    engine = EmbeddedEngine(model, end_token_ids={1}, read_only=True)
    axes = 4 if name == "pictures" else 1
    probes = [text_probes([*range(2, 50)], axes=axes, longest_prompt=8, longest_response=8, variant=i) for i in (0, 1)]
    proven = CheckedGenerator(engine, LearnerReference(learner), Canary(*probes, TOLERANCE[torch.float32]))
    seen = list[Any]()
    for version in (1, 2):
        with proven.active(weights_of(learner, version)):
            assert proven.gap < TOLERANCE[torch.float32] / 5
            seen.append(engine.logprobs_of(probes[0].prompts, probes[0].responses))
            # Whatever the learner does meanwhile, the engine has the adapter of the last sync, all of it.
            assert take_step(learner, name, "full KL", version) == take_step(alone, name, "full KL", version)
            assert engine.logprobs_of(probes[0].prompts, probes[0].responses) == seen[-1]
    assert seen[0] != seen[1]
    kept = {storage.data_ptr() for storage in distinct_storages(learner.model.parameters())}
    weights = distinct_storages(model.parameters())
    assert {storage.data_ptr() for storage in weights} <= kept
    factors = [p for p in learner.model.parameters() if p.requires_grad]
    assert len(kept) == len(weights) + len(factors)
    copies = engine._weights._adapter.factors.values()  # type: ignore[union-attr]
    assert sum(one.nbytes for one in copies) == sum(one.nbytes for one in factors)
    assert not kept & {storage.data_ptr() for storage in distinct_storages(copies)}
    engine.__class__ = Swapping
    with pytest.raises(
        StaleWeights, match=r"bytes of 2 of the engine's weights are not the learner's\. At fault: adapter"
    ):
        proven.load_weights(weights_of(learner, 3))


class Swapping(EmbeddedEngine):
    """Binds factors to the wrong layers."""

    def _load(self, source: Any) -> None:
        super()._load(LocalWeights(swapped(source.tensors()), source.version))


def swapped(adapter: Adapter) -> Adapter:
    """The same with two layers' factors of their up projections in one another's place."""
    other = {"layers.0.mlp.up_proj.lora_B": "layers.1.mlp.up_proj.lora_B"}
    other |= {right: left for left, right in other.items()}
    pairs = []
    for name, tensor in adapter.weights:
        found = next((part for part in other if part in name), None)
        pairs.append((name.replace(found, other[found]) if found else name, tensor))
    return replace(adapter, weights=pairs)


@pytest.mark.slow
@pytest.mark.parametrize("shard_size", [-1, 1])
def test_factors_begin_as_the_same_on_any_number_of_ranks(folders: Any, shard_size: int) -> None:
    base, _ = folders["pictures"]
    expected = dict(build(base, Form(4, 8, "all-linear", ".*visual.*")).weights())
    assert {key for key, tensor in expected.items() if tensor.any()} == {key for key in expected if ".lora_A." in key}
    for found in ranks.run(first_factors, base, shard_size):
        assert_close(found, expected, 0)


@pytest.mark.slow
def test_ranks_go_on_from_a_checkpoint_to_the_bit(folders: Any, tmp_path: Path) -> None:
    assert ranks.run(save_and_resume, *folders["text"], tmp_path) == [True, True]


@pytest.mark.slow
def test_factors_in_float32_train_on_a_base_in_half_precision(folders: Any) -> None:
    for found in ranks.run(half_precision, folders["text"][0]):
        assert found["kinds"] == {"torch.bfloat16": False, "torch.float32": True}
        assert found["states"] == {"torch.float32"}
        assert found["moved"]
        assert found["grad_norm"] > 0
        assert found["kl_loss"] == pytest.approx(0, abs=1e-3)  # the adapter began as nothing


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"target_modules": ["q_prj"]}, "no module's name ends in 'q_prj'; similar names: model.layers.0.self_attn.q_"),
        ({"target_modules": r".*q_prj"}, "similar names: model.layers.0.self_attn.q_proj"),
        ({"exclude_modules": ".*vision.*"}, "exclude_modules: '.*vision.*' matches none"),
        ({"target_modules": ["embed_tokens"]}, "no module's name ends in 'embed_tokens'"),
    ],
)
def test_a_pattern_that_means_nothing_is_refused_with_near_names(changed: Any, said: str) -> None:
    form = replace(Form(4, 8, "all-linear", ".*visual.*"), **changed)
    with pytest.raises(AdapterError, match=re.escape(said)):
        Adapters(form).inject(qwen2())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({}, None),
        ({"rank": 2, "target_modules": ["v_proj", "q_proj"]}, None),
        ({"rank": 3}, "lora.rank=3: the adapter in .* has rank 2; leave it 0"),
        (
            {"target_modules": ["q_proj"]},
            r"target_modules=\['q_proj'\]: the adapter in .* is on \['q_proj', 'v_proj'\]",
        ),
        ({"target_modules": ".*q_proj"}, "leave it all-linear"),
        ({"path": "nowhere"}, "nowhere holds no adapter"),
    ],
)
def test_a_folder_to_start_from_keeps_its_own_form_and_another_is_refused(
    words: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    peft = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(peft))
    lora = LoraConfig(**({"path": str(tmp_path)} | words))
    if said is None:
        assert Form.of(lora) == Form(2, 6, ["q_proj", "v_proj"], None, tmp_path)
        return
    with pytest.raises(AdapterError, match=said):
        Form.of(lora)


@pytest.mark.slow
def test_patterns_choose_where_the_adapter_is() -> None:
    for changed, kinds in (
        ({"target_modules": ["q_proj", "v_proj"]}, {"q_proj", "v_proj"}),
        ({"target_modules": r".*layers\.1\..*_proj"}, {"q_proj", "k_proj", "v_proj", "o_proj", *MLP}),
        ({"exclude_modules": ["up_proj"]}, {"q_proj", "k_proj", "v_proj", "o_proj", *MLP} - {"up_proj"}),
    ):
        adapters, model = Adapters(replace(Form(4, 8, "all-linear", ".*visual.*"), **changed)), qwen2()
        adapters.inject(model)
        assert set(adapters.form_for_engines.target_modules) == kinds
