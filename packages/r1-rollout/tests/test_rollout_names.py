"""A trainer's names find the engine's tensors, whatever wrapper, layout or adapter has renamed them."""

from typing import Any

import pytest
import torch
from torch import nn

from r1_rollout.errors import WeightsError
from r1_rollout.names import adapter_part, core, unwrapped
from r1_rollout.weights import load_weights


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("_orig_mod.model.norm.weight", "model.norm.weight"),
        ("model.layers.0._orig_mod.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("_fsdp_wrapped_module.model.layers.1._fsdp_wrapped_module.mlp.bias", "model.layers.1.mlp.bias"),
        ("model.layers.0._checkpoint_wrapped_module._orig_mod.x", "model.layers.0.x"),
        ("model.layers.0.q_proj.base_layer.weight", "model.layers.0.q_proj.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_wrappers_leave_no_trace(name: str, plain: str) -> None:
    assert unwrapped(name) == plain


@pytest.mark.parametrize(
    "names",
    [
        ("visual.blocks.0.attn.qkv.weight", "model.visual.blocks.0.attn.qkv.weight"),
        ("model.layers.0.x", "model.language_model.layers.0.x", "language_model.model.layers.0.x", "module.layers.0.x"),
        ("lm_head.weight", "language_model.lm_head.weight", "base_model.model.lm_head.weight"),
        ("multi_modal_projector.linear_1.weight", "model.multi_modal_projector.linear_1.weight"),
    ],
)
def test_all_layouts_of_a_tensor_have_one_core(names: tuple[str, ...]) -> None:
    assert len({core(name) for name in names}) == 1


def test_the_factors_of_an_adapter_are_told_from_other_tensors() -> None:
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    assert adapter_part(f"{module}.lora_A.default.weight") == (module, "A")
    assert adapter_part(f"{module}.lora_B.weight") == (module, "B")
    assert adapter_part(f"{module}.base_layer.weight") is None


RENAMINGS = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "FSDP": lambda name: name.replace("layers.1.", "layers.1._fsdp_wrapped_module."),
    "PEFT": lambda name: "base_model.model." + name.replace("q_proj.", "q_proj.base_layer."),
    "data parallel": lambda name: f"module.{name}",
    "checkpoint": lambda name: name.replace("model.visual.", "visual.").replace("model.language_model.", "model."),
    "old checkpoint": lambda name: name.replace("model.visual.", "visual.").replace(
        "model.language_model.", "language_model.model."
    ),
}


@pytest.mark.parametrize("renamed", RENAMINGS)
def test_a_vision_model_takes_its_weights_under_every_spelling(vision_model: Any, renamed: str) -> None:
    given = {name: torch.randn(tensor.shape) for name, tensor in vision_model.state_dict().items()}
    load_weights(vision_model, ((RENAMINGS[renamed](name), tensor) for name, tensor in given.items()))
    own = vision_model.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in given.items())


def test_full_names_tell_tensors_of_one_core_apart() -> None:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.ModuleDict({"norm": nn.LayerNorm(2)})
            self.norm = nn.LayerNorm(2)

    twins = Twins()
    given = {name: torch.randn(2) for name in twins.state_dict()}
    load_weights(twins, given.items())
    assert all(torch.equal(twins.state_dict()[name], tensor) for name, tensor in given.items())
    with pytest.raises(WeightsError, match=r"unknown .*: module\.norm\.weight"):
        load_weights(twins, [*given.items(), ("module.norm.weight", torch.zeros(2))])


class Fused(nn.Module):
    """Grouped queries (8 rows), keys and values (4 each) in one projection; gate and up in another."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(3, 16)
        self.gate_up_proj = nn.Linear(3, 10, bias=False)


def parts() -> dict[str, torch.Tensor]:
    rows = {"q_proj": 8, "k_proj": 4, "v_proj": 4}
    return {
        **{f"{name}.weight": torch.randn(count, 3) for name, count in rows.items()},
        **{f"{name}.bias": torch.randn(count) for name, count in rows.items()},
        **{f"{name}.weight": torch.randn(5, 3) for name in ("gate_proj", "up_proj")},
    }


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "backwards"])
def test_split_projections_fill_a_fused_one_in_any_order(turned: bool) -> None:
    model, given = Fused(), parts()
    load_weights(model, reversed(given.items()) if turned else given.items())
    weights = [given[f"{name}.weight"] for name in ("q_proj", "k_proj", "v_proj")]
    assert torch.equal(model.qkv_proj.weight, torch.cat(weights))
    assert torch.equal(
        model.qkv_proj.bias, torch.cat([given[f"{name}.bias"] for name in ("q_proj", "k_proj", "v_proj")])
    )
    assert torch.equal(model.gate_up_proj.weight, torch.cat([given["gate_proj.weight"], given["up_proj.weight"]]))


def test_a_part_of_a_fused_projection_that_did_not_come_is_named() -> None:
    given = parts()
    del given["k_proj.bias"], given["up_proj.weight"]
    with pytest.raises(WeightsError, match=r"2 weights .* not given: qkv_proj\.bias \(k_proj\), .*\(up_proj\)"):
        load_weights(Fused(), given.items())


@pytest.mark.parametrize(("name", "rows"), [("q_proj", 7), ("k_proj", 9), ("v_proj", 17)])
def test_parts_that_do_not_fill_a_fused_projection_are_refused(name: str, rows: int) -> None:
    given = {**parts(), f"{name}.weight": torch.randn(rows, 3)}
    with pytest.raises(WeightsError, match=r"qkv_proj\.weight"):
        load_weights(Fused(), given.items())
