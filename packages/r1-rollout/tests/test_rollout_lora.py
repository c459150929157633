"""An adapter's factors alone make the engine's weights the merged ones, exactly and for ever."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.errors import WeightsError
from r1_rollout.lora import Adapter
from r1_rollout.weights import LocalWeights, WeightStore

TARGETS = ("q_proj", "down_proj")


def adapter_for(model: nn.Module, seed: int, *, rank: int = 3, ends: tuple[str, ...] = TARGETS) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    weights: list[tuple[str, Tensor]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(ends):
            prefix = f"base_model.model.{name}"
            a = torch.randn(rank, module.in_features, generator=generator)
            b = torch.randn(module.out_features, rank, generator=generator)
            weights += [(f"{prefix}.lora_A.default.weight", a), (f"{prefix}.lora_B.default.weight", b)]
    return Adapter(rank, 2.0 * rank, ends, weights)


def merged(base: dict[str, Tensor], adapter: Adapter) -> dict[str, Tensor]:
    """The weights that a trainer would merge itself."""
    factors, weights = dict(adapter.weights), dict(base)
    for name, a in factors.items():
        if ".lora_A." in name:
            target = name.removeprefix("base_model.model.").replace(".lora_A.default", "")
            delta = adapter.alpha / adapter.rank * (factors[name.replace("lora_A", "lora_B")] @ a)
            weights[target] = (base[target].float() + delta).to(base[target].dtype)
    return weights


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_thousand_syncs_leave_exactly_the_last_adapter(text_model: Any, dtype: torch.dtype) -> None:
    model = text_model.to(dtype)
    base, store = state_of(model), WeightStore(model)
    store.load(base.items(), 0)
    adapters = [adapter_for(model, seed) for seed in range(10)]
    for version in range(1000):
        store.load(adapters[version % 10], version)
    expected = merged(base, adapters[999 % 10])
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert any(not torch.equal(tensor, base[name]) for name, tensor in model.state_dict().items())


def test_modules_that_the_next_adapter_leaves_out_are_the_base_again(text_model: Any) -> None:
    base, store = state_of(text_model), WeightStore(text_model)
    store.load(adapter_for(text_model, 1), 0)
    second = adapter_for(text_model, 2, ends=("up_proj",))
    store.load(second, 1)
    expected = merged(base, second)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in text_model.state_dict().items())


def test_full_weights_are_the_next_adapters_base(text_model: Any) -> None:
    store = WeightStore(text_model)
    store.load(adapter_for(text_model, 1), 0)
    base = {name: torch.randn(tensor.shape) for name, tensor in text_model.state_dict().items()}
    base["lm_head.weight"] = base.get("lm_head.weight", base["model.embed_tokens.weight"])
    store.load(base.items(), 1)
    adapter = adapter_for(text_model, 2)
    store.load(adapter, 2)
    expected = merged(base, adapter)
    assert torch.equal(
        text_model.model.layers[0].self_attn.q_proj.weight, expected["model.layers.0.self_attn.q_proj.weight"]
    )


def test_the_engine_samples_from_the_adapted_weights(text_model: Any) -> None:
    from r1_rollout.probes import text_probes

    probes = text_probes(range(50), longest_prompt=20, longest_response=5)
    adapter = adapter_for(text_model, 4)
    engines = [EmbeddedEngine(copy.deepcopy(text_model), end_token_ids={7}) for _ in range(2)]
    with engines[0].active(LocalWeights(adapter, 1)):
        adapted = engines[0].logprobs_of(probes.prompts, probes.responses)
    with engines[1].active(LocalWeights(merged(state_of(text_model), adapter).items(), 1)):
        assert engines[1].logprobs_of(probes.prompts, probes.responses) == adapted
    with engines[1].active(LocalWeights(state_of(text_model).items(), 1)):
        assert engines[1].logprobs_of(probes.prompts, probes.responses) != adapted


def test_a_part_of_a_fused_projection_is_adapted_in_its_rows() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj = nn.Linear(3, 16, bias=False)

    model = Fused()
    base = model.qkv_proj.weight.detach().clone()
    a, b = torch.randn(2, 3), torch.randn(4, 2)
    weights = [("base_model.model.k_proj.lora_A.weight", a), ("base_model.model.k_proj.lora_B.weight", b)]
    WeightStore(model).load(Adapter(2, 2.0, ("k_proj",), weights), 0)
    assert torch.equal(model.qkv_proj.weight[8:12], base[8:12] + b @ a)
    assert torch.equal(model.qkv_proj.weight[[*range(8), *range(12, 16)]], base[[*range(8), *range(12, 16)]])


def test_beside_read_only_weights_an_adapter_says_what_merged_weights_say(text_model: Any) -> None:
    from r1_rollout.probes import text_probes

    probes = text_probes(range(50), longest_prompt=20, longest_response=5)
    base, merging = state_of(text_model), EmbeddedEngine(copy.deepcopy(text_model), end_token_ids={7})
    beside = EmbeddedEngine(text_model, end_token_ids={7}, read_only=True)
    seen = []
    for version, adapter in enumerate([adapter_for(text_model, 1), adapter_for(text_model, 2, ends=("up_proj",))]):
        for engine in (merging, beside):
            engine.load_weights(LocalWeights(adapter, version))
        seen.append(beside.logprobs_of(probes.prompts, probes.responses))
        wanted = merging.logprobs_of(probes.prompts, probes.responses)
        assert [*map(pytest.approx, wanted)] == seen[-1]
        for _, factor in adapter.weights:
            factor.mul_(3)  # its owner goes on training
        assert beside.logprobs_of(probes.prompts, probes.responses) == seen[-1]
    assert seen[0] != seen[1]
    assert all(torch.equal(tensor, base[name]) for name, tensor in text_model.state_dict().items())
    with pytest.raises(WeightsError, match=r"version 5: the engine's weights are the learner's own"):
        beside.load_weights(LocalWeights(base.items(), 5))
    assert all(torch.equal(tensor, base[name]) for name, tensor in text_model.state_dict().items())


def test_beside_read_only_weights_a_part_of_a_fused_projection_is_adapted_in_its_rows() -> None:
    model = nn.ModuleDict({"qkv_proj": nn.Linear(3, 16, bias=False), "o_proj": nn.Linear(3, 2)})
    rows, a, b = torch.randn(5, 3), torch.randn(2, 3), torch.randn(4, 2)
    before = model["qkv_proj"](rows)
    weights = [("base_model.model.k_proj.lora_A.weight", a), ("base_model.model.k_proj.lora_B.weight", b)]
    WeightStore(model, read_only=True).load(Adapter(2, 4.0, ("k_proj",), weights), 0)
    with torch.no_grad():
        added = model["qkv_proj"](rows) - before
    torch.testing.assert_close(added[:, 8:12], 2 * rows @ a.T @ b.T)
    assert not added[:, [*range(8), *range(12, 16)]].any()


def renamed(adapter: Adapter, old: str, new: str) -> Adapter:
    return replace(adapter, weights=[(name.replace(old, new), tensor) for name, tensor in adapter.weights])


BROKEN = {
    "bound to nothing": (
        lambda adapter: renamed(adapter, "self_attn", "attention"),
        r"binds to nothing: 2 of its 4 modules .* Qwen2ForCausalLM: .*layers\.0\.attention\.q_proj",
    ),
    "a target without weights": (
        lambda adapter: replace(adapter, target_modules=(*TARGETS, "w1")),
        r"target module w1 binds to nothing",
    ),
    "empty": (lambda adapter: replace(adapter, weights=[]), r"adapter for q_proj, down_proj holds no weights"),
    "one factor only": (
        lambda adapter: replace(adapter, weights=list(adapter.weights)[1:]),
        r"only one factor of .*layers\.0\.self_attn\.q_proj",
    ),
    "another rank": (
        lambda adapter: replace(adapter, rank=4),
        r"lora_A.*got shape \[3, 48\], axis 0 must be the rank, 4",
    ),
    "another shape": (
        lambda adapter: replace(
            adapter,
            weights=[(n, t[:-1].contiguous() if "q_proj.lora_B" in n else t) for n, t in adapter.weights],
        ),
        r"q_proj makes \[47, 48\], the engine's weight is \[48, 48\]",
    ),
    "quantised": (
        lambda adapter: replace(adapter, weights=[(n, t.to(torch.int8)) for n, t in adapter.weights]),
        r"lora_A.*got torch\.int8, a factor has floating-point numbers",
    ),
    "no pairs": (lambda adapter: replace(adapter, weights=None), r"pairs, got a NoneType"),
    "targets in one string": (
        lambda adapter: replace(adapter, target_modules="all-linear"),
        r"target_modules is a string: give a tuple, \('all-linear',\)",
    ),
    "no adapter's tensor": (
        lambda adapter: replace(adapter, weights=[*adapter.weights, ("model.norm.weight", torch.zeros(48))]),
        r"model\.norm\.weight is no factor of a LoRA adapter",
    ),
}


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("kind", BROKEN)
def test_an_adapter_that_cannot_be_bound_is_refused_and_changes_nothing(
    text_model: Any, kind: str, read_only: bool
) -> None:
    base, (broken, message) = state_of(text_model), BROKEN[kind]
    with pytest.raises(WeightsError, match=rf"weights of version 3: .*{message}"):
        WeightStore(text_model, read_only=read_only).load(broken(adapter_for(text_model, 1)), 3)
    assert not any(module._forward_hooks for module in text_model.modules())
    assert all(torch.equal(tensor, base[name]) for name, tensor in text_model.state_dict().items())


def test_factors_may_come_as_a_state_dict_of_a_wrapped_model(text_model: Any) -> None:
    adapter, base = adapter_for(text_model, 1), state_of(text_model)
    wrapped = {f"module.{name}": tensor for name, tensor in adapter.weights}
    WeightStore(text_model).load(replace(adapter, weights=wrapped), 3)  # type: ignore[arg-type]
    for name, tensor in merged(base, adapter).items():
        assert torch.equal(text_model.state_dict()[name], tensor)


def test_factors_among_full_weights_are_no_full_weights(text_model: Any) -> None:
    given = [*state_of(text_model).items(), *adapter_for(text_model, 1).weights]
    with pytest.raises(WeightsError, match=r"8 weights are unknown .*; LoRA factors are handed over as an Adapter"):
        WeightStore(text_model).load(given, 0)
