"""Every injected fault of a sync is caught, and blamed on the right group of parameters."""

import copy
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from rollout_faults import (
    FaultyEngine,
    ModelReference,
    PrefixCachingEngine,
    RenumberedEngine,
    drops_adapter,
    faults_of_transport,
    no_fault,
    pack_head,
    skips,
    swaps_layers,
    train,
)
from rollout_models import TEXT, sharpen, vision_config
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Config, Qwen2ForCausalLM

from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.errors import StaleWeights
from r1_rollout.fault import find_fault, group_of
from r1_rollout.lora import Adapter
from r1_rollout.probes import RESPONSE, ProbePrompt, Probes, spread_tokens, text_probes
from r1_rollout.weight_checks import TOLERANCE, Canary, widest_gap
from r1_rollout.weights import LocalWeights

ALLOWED = range(60)
IMAGE, START, END_OF_IMAGE = 60, 62, 63
SQUARE = {**TEXT, "num_hidden_layers": 3, "num_key_value_heads": 4}  # so that q and k can be swapped
WIDE = {**SQUARE, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}  # vLLM's least
MakeEngine = Callable[[Any], Any]
NEEDS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


def embedded_engine(model: Any) -> EmbeddedEngine:
    return EmbeddedEngine(type(model)(copy.deepcopy(model.config)), end_token_ids={7})


@pytest.fixture(scope="module")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeEngine]:
    """One engine for the text models with a tied head, and one for the others; each is started when it is needed."""
    from r1_rollout.vllm.engine import VllmEngine

    started: dict[bool, VllmEngine] = {}

    def make(model: Any) -> RenumberedEngine:
        tied = model.config.tie_word_embeddings
        if tied not in started:
            folder = tmp_path_factory.mktemp("model")
            model.save_pretrained(folder)
            options = {"dtype": "float32", "kv_cache_bytes": 1 << 26, "dummy_weights": True, "lora_rank": 8}
            started[tied] = VllmEngine.load(str(folder), end_token_ids={7}, **options)
        return RenumberedEngine(started[tied])

    yield make
    for engine in started.values():
        engine.close()


@pytest.fixture(params=["embedded", pytest.param("vllm", marks=[pytest.mark.vllm, NEEDS_VLLM])])
def make_engine(request: pytest.FixtureRequest) -> MakeEngine:
    """An engine for a text model's architecture; the weights arrive by `active`."""
    return embedded_engine if request.param == "embedded" else request.getfixturevalue("vllm_engine")


def text_model(*, tied: bool) -> Any:
    torch.manual_seed(0)
    return sharpen(Qwen2ForCausalLM(Qwen2Config(**WIDE, tie_word_embeddings=tied)))


def vision_model() -> Any:
    torch.manual_seed(0)
    return sharpen(Qwen2_5_VLForConditionalGeneration(vision_config(SQUARE)))


def picture_probes(model: Any, variant: int) -> Probes:
    """One sequence with a picture of its own."""
    generator = torch.Generator().manual_seed(variant)
    text = spread_tokens(ALLOWED, 4, variant)
    token_ids = [*text[:2], START, *[IMAGE] * 4, END_OF_IMAGE, *text[2:]]
    media = {
        "pixel_values": torch.randn(16, 3 * 2 * 14 * 14, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    ids = torch.tensor([token_ids])
    rotary, _ = model.model.get_rope_index(
        ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=media["image_grid_thw"]
    )
    positions = torch.cat([torch.arange(len(token_ids))[None], rotary[:, 0]])
    prompt = ProbePrompt(f"picture:{variant}", token_ids, positions, media)
    return Probes((prompt,), (spread_tokens(ALLOWED, RESPONSE, 9 + variant),))


def canary_for(model: Any, longest_prompt: int = 40) -> Canary:
    vision = hasattr(model.model, "visual")

    def probes(variant: int) -> Probes:
        text = text_probes(
            ALLOWED[:50],
            axes=4 if vision else 1,
            longest_prompt=longest_prompt,
            longest_response=9,
            variant=variant,
        )
        return text + picture_probes(model, variant) if vision else text

    return Canary(probes(0), probes(1), TOLERANCE[torch.float32])


def sync(canary: Canary, engine: Any, reference: ModelReference, version: int) -> float:
    """The gap after a sync."""
    with engine.active(reference.weights(version)):
        return canary.gap(engine, reference.logprobs_of(canary.probes.prompts, canary.probes.responses))


def catch(canary: Canary, engine: Any, reference: ModelReference, version: int = 1) -> StaleWeights:
    """Sync a first time, train, sync again: the gap that is there now, explained."""
    assert canary.accepts(sync(canary, engine, reference, version - 1))
    train(reference.model)
    gap = sync(canary, engine, reference, version)
    assert not canary.accepts(gap)
    found = find_fault(canary, engine, reference, version, gap)
    assert (found.version, found.gap) == (version, gap)
    return found


MODELS = {
    "tied": lambda: text_model(tied=True),
    "untied": lambda: text_model(tied=False),
    "vision": vision_model,
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_faithful_engine_is_far_within_the_tolerance(make_engine: MakeEngine, tied: bool) -> None:
    assert_faithful(text_model(tied=tied), make_engine)


def test_a_faithful_engine_of_a_vision_model_is_far_within_the_tolerance() -> None:
    assert_faithful(vision_model(), embedded_engine)


def assert_faithful(model: Any, make_engine: MakeEngine) -> None:
    reference, engine, canary = ModelReference(model), make_engine(model), canary_for(model)
    for version in range(3):
        assert sync(canary, engine, reference, version) < canary.tolerance / 5
        train(model)


# `skips` keeps what the first sync brought; a matrix that is transposed from the start is caught at once, so the other
# faults begin with the second sync.
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", faults_of_transport())
def test_faults_of_transport_are_caught_and_named(make_engine: MakeEngine, name: str, tied: bool) -> None:
    model, fault = text_model(tied=tied), faults_of_transport()[name]
    late = FaultyEngine(make_engine(model), lambda e, n, t: fault.tamper(e, n, t) if e.syncs > 1 else t)
    found = catch(canary_for(model), late, ModelReference(model))
    if fault.group == "embedding" and tied:
        assert found.group == "embedding, head"  # one tensor
    else:
        assert found.group == fault.group
    assert f"At fault: {found.group}" in str(found)


def test_a_stale_vision_tower_is_named() -> None:
    model = vision_model()
    found = catch(canary_for(model), FaultyEngine(embedded_engine(model), skips("visual.")), ModelReference(model))
    assert found.group == "vision tower"


def test_a_skipped_layer_of_a_vision_model_is_not_blamed_on_the_tower() -> None:
    model = vision_model()
    engine = FaultyEngine(embedded_engine(model), skips("language_model.layers.1."))
    assert catch(canary_for(model), engine, ModelReference(model)).group == "layer 1"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_output_layer_that_was_packed_once_is_named(tied: bool) -> None:
    model = text_model(tied=tied)
    inner = type(model)(copy.deepcopy(model.config))
    engine = EmbeddedEngine(inner, end_token_ids={7})
    pack_head(inner)
    found = catch(canary_for(model), engine, ModelReference(model))
    assert found.group == "head"


def test_a_prefix_cache_that_outlives_the_sync_is_named(model: Any) -> None:
    engine = PrefixCachingEngine(type(model)(copy.deepcopy(model.config)), end_token_ids={7})
    assert catch(canary_for(model), engine, ModelReference(model)).group == "prefix cache"


@pytest.mark.vllm
@NEEDS_VLLM
def test_a_head_that_vllm_packs_but_once_is_named(vllm_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from r1_rollout.vllm import sync as vllm_sync

    model, repack, repacked = text_model(tied=True), vllm_sync.repack_heads, []

    def once(inner: Any) -> None:
        if not repacked:
            repack(inner)
        repacked.append(inner)

    monkeypatch.setattr(vllm_sync, "repack_heads", once)
    found = catch(canary_for(model), vllm_engine(model), ModelReference(model))
    assert found.group == "head"


@pytest.mark.vllm
@NEEDS_VLLM
def test_vllms_prefix_cache_that_outlives_the_sync_is_named(
    vllm_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = text_model(tied=False)
    engine = vllm_engine(model)
    with engine.active(LocalWeights(list(model.state_dict().items()), 0)):
        pass  # what earlier tests have left in the cache is gone
    monkeypatch.setattr("vllm.v1.core.sched.scheduler.Scheduler.reset_prefix_cache", lambda *args, **options: True)
    canary = canary_for(model, longest_prompt=200)  # a block of the cache has 128 tokens on processors
    assert catch(canary, engine, ModelReference(model)).group == "prefix cache"


def test_in_half_precision_rounding_is_accepted_and_a_wrong_matrix_is_not() -> None:
    for tamper, group in ((no_fault, None), (skips("lm_head"), "head"), (skips("layers.1."), "layer 1")):
        model = text_model(tied=False)
        half = type(model)(copy.deepcopy(model.config)).bfloat16()
        engine = FaultyEngine(EmbeddedEngine(half, end_token_ids={7}), tamper)
        canary, reference = replace(canary_for(model), tolerance=TOLERANCE[torch.bfloat16]), ModelReference(model)
        assert canary.accepts(sync(canary, engine, reference, 0))
        train(model, 1.0)
        gap = sync(canary, engine, reference, 1)
        assert canary.accepts(gap) == (group is None)
        if group:
            assert find_fault(canary, engine, reference, 1, gap).group == group


def test_two_skipped_layers_are_both_named(make_engine: MakeEngine) -> None:
    model = text_model(tied=False)
    engine = FaultyEngine(make_engine(model), lambda e, n, t: skips("layers.0.")(e, n, skips("layers.2.")(e, n, t)))
    assert catch(canary_for(model), engine, ModelReference(model)).group == "layer 0, layer 2"


def test_a_sync_that_lost_something_once_is_told_from_one_that_always_does(make_engine: MakeEngine) -> None:
    model = text_model(tied=False)
    skip = skips("layers.1.")
    engine = FaultyEngine(make_engine(model), lambda e, n, t: skip(e, n, t) if e.syncs == 2 else t)
    assert catch(canary_for(model), engine, ModelReference(model)).group == "the sync"


def test_the_search_makes_one_sync_a_group_and_two_more(make_engine: MakeEngine) -> None:
    model = text_model(tied=False)
    engine = FaultyEngine(make_engine(model), skips("layers.1."))
    canary, reference = canary_for(model), ModelReference(model)
    assert canary.accepts(sync(canary, engine, reference, 0))
    train(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    syncs = engine.syncs
    find_fault(canary, engine, reference, 1, 1.0)
    groups = {group_of(name) for name in before}
    assert engine.syncs - syncs == len(groups) + 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_one_wrong_row_of_the_embedding_is_not_blamed_on_a_cache() -> None:
    model = text_model(tied=False)
    canary = canary_for(model, longest_prompt=9)
    token = min(canary.probes.inputs - canary.fresh.inputs)

    def shift_row(engine: FaultyEngine, name: str, tensor: Any) -> Any:
        if engine.syncs > 1 and "embed_tokens" in name:
            tensor = tensor.clone()
            tensor[token] += 1.0
        return tensor

    found = catch(canary, FaultyEngine(embedded_engine(model), shift_row), ModelReference(model))
    assert found.group == "embedding"
    assert "rows of tokens that these sequences have" in str(found)


def test_distant_layers_in_each_others_place_are_left_open_and_with_equal_bytes_it_is_the_computation() -> None:
    """No group that is set to zero closes such a gap, so none is named for certain."""
    other = {"layers.0.": "layers.2.", "layers.2.": "layers.0."}

    def swap(engine: FaultyEngine, name: str, tensor: Any) -> Any:
        part = next((part for part in other if part in name), None)
        return engine.latest[name.replace(part, other[part])] if part and engine.syncs > 1 else tensor

    model = text_model(tied=False)
    engine, canary, reference = FaultyEngine(embedded_engine(model), swap), canary_for(model), ModelReference(model)
    found = catch(canary, engine, reference)
    assert found.group == "embedding, final norm or head"
    assert "or what no weight can explain: positions or precision" in str(found)
    told = find_fault(canary, engine, reference, 2, 1.0, same_bytes=True)
    assert told.group == "the engine's computation, not its weights"
    assert "their bytes are the learner's" in str(told)


def adapter_of(model: Any, size: float) -> Adapter:
    """Rank 2 on two projections of every layer, with PEFT's names."""
    generator = torch.Generator().manual_seed(3)
    weights = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "up_proj")):
            prefix = f"base_model.model.{name}"
            a, b = (2, module.in_features), (module.out_features, 2)
            weights[f"{prefix}.lora_A.default.weight"] = torch.randn(a, generator=generator)
            weights[f"{prefix}.lora_B.default.weight"] = size * torch.randn(b, generator=generator)
    return Adapter(2, 4.0, ("q_proj", "up_proj"), list(weights.items()))


def test_an_adapter_that_is_bound_to_nothing_or_to_another_layer_is_named(make_engine: MakeEngine) -> None:
    model = text_model(tied=False)
    for tamper, expected in ((no_fault, None), (drops_adapter, "adapter"), (swaps_layers("up_proj.lora_B"), "adapter")):
        engine = make_engine(model)
        with engine.active(LocalWeights(list(model.state_dict().items()), 0)):
            pass
        learner = copy.deepcopy(model)
        reference = ModelReference(learner, adapter_of(learner, 0.1))
        canary, faulty = canary_for(model), FaultyEngine(engine, tamper)
        gap = sync(canary, faulty, reference, 1)
        assert canary.accepts(gap) == (expected is None)
        if expected:
            assert find_fault(canary, faulty, reference, 1, gap).group == expected


def test_stale_base_weights_under_an_adapter_are_not_blamed_on_it(make_engine: MakeEngine) -> None:
    model = text_model(tied=False)
    engine = make_engine(model)
    with engine.active(LocalWeights(list(model.state_dict().items()), 0)):
        pass
    train(model)
    reference = ModelReference(model, adapter_of(model, 0.1))
    canary = canary_for(model)
    gap = sync(canary, engine, reference, 1)
    assert not canary.accepts(gap)
    assert find_fault(canary, engine, reference, 1, gap).group == "base weights"


def test_probes_are_the_same_everywhere_and_share_no_prefix_with_their_variants() -> None:
    options = {"longest_prompt": 500, "longest_response": 50}
    probes, again, fresh = (text_probes(range(1000), **options, variant=v) for v in (0, 0, 1))
    assert [p.token_ids for p in probes.prompts] == [p.token_ids for p in again.prompts]
    assert probes.responses == again.responses
    assert len({len(p.token_ids) for p in probes.prompts}) == 2
    firsts = [p.token_ids[0] for p in (*probes.prompts, *fresh.prompts)]
    assert len({*firsts}) == len(firsts)
    assert len({*probes.prompts[1].token_ids}) == len(probes.prompts[1].token_ids) == 136


def test_probes_fit_into_a_small_engine() -> None:
    probes = text_probes(range(20), longest_prompt=5, longest_response=2)
    assert max(len(p.token_ids) for p in probes.prompts) == 5
    assert {len(r) for r in probes.responses} == {2}


@pytest.mark.parametrize("count", [1, 2, 3, 10, 64, 151_936])
def test_a_walk_meets_every_token_before_any_twice(count: int) -> None:
    walk = spread_tokens(range(count), min(count, 1000))
    assert len({*walk}) == len(walk)


def test_a_gap_that_is_no_number_is_not_accepted() -> None:
    canary = canary_for(text_model(tied=True))
    nan = [[0.0] * (len(response) - 1) + [math.nan] for response in canary.probes.responses]
    assert not canary.accepts(widest_gap(nan, [[0.0] * len(response) for response in nan]))
    assert not canary.accepts(math.inf)


def test_a_missing_log_prob_is_no_small_gap() -> None:
    with pytest.raises(ValueError, match=r"log-probs for \[2, 1\] and \[2, 2\] tokens"):
        widest_gap([[0.0, 0.0], [0.0]], [[0.0, 0.0], [0.0, 0.0]])


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.language_model.layers.12.mlp.up_proj.weight", "layer 12"),
        ("_orig_mod.model.layers.0.self_attn.q_proj.base_layer.weight", "layer 0"),
        ("model.visual.blocks.3.attn.qkv.weight", "vision tower"),
        ("visual.merger.mlp.0.weight", "vision tower"),
        ("vision_tower.vision_model.encoder.layers.3.mlp.fc1.weight", "vision tower"),
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("model.norm.weight", "final norm"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight", "adapter"),
    ],
)
def test_parameters_belong_to_the_groups_that_people_think_in(name: str, group: str) -> None:
    assert group_of(name) == group
