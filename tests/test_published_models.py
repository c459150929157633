"""The shapes and names of published checkpoints, without the hub: loading, sharding, saving, `r1 estimate`.

`published_models.json` has the numbers that shape each, and where they are from.
"""

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from transformers.core_model_loading import revert_weight_conversion

from r1_cli.config import RunConfig, load_config
from r1_cli.config.model import LoraConfig, ModelConfig
from r1_cli.jobs.merge import merge, name_as_published
from r1_cli.models import load as models
from r1_cli.models.quantized_files import find_fault, without_quantization
from r1_cli.plan.estimate.cards import Cards
from r1_cli.plan.estimate.estimate import estimate_on_cards
from r1_cli.plan.estimate.models import find_models
from r1_cli.plan.estimate.times import Assumptions, Work
from r1_cli.plan.memory import estimate
from r1_cli.plan.model_sizes import ModelSizes, read_sizes
from r1_core.learner.checkpoint import save
from r1_core.learner.parallel import Parallel, find_blocks
from r1_rollout.loading import model_family

ROOT = Path(__file__).parents[1]
PUBLISHED: dict[str, Any] = json.loads((ROOT / "tests/published_models.json").read_text(encoding="utf-8"))
SHAPES = {one["name"]: one for one in PUBLISHED["models"]}
NAMES = {name: one["patterns"] for name, one in PUBLISHED["names"].items()}
CPU = torch.device("cpu")
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # by their codes, in MXFP4


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def config_of(folder: Path) -> RunConfig:
    words = [
        f"worker.actor.model.model_path={folder}",
        "worker.actor.fsdp.torch_dtype=bf16",
        "trainer.n_gpus_per_node=8",
    ]
    words += ["worker.actor.fsdp.fsdp_size=1", "worker.rollout.name=vllm"]
    return load_config([str(ROOT / "examples/quickstart/config.yaml"), *words])[0]


def collapse(names: Any) -> set[str]:
    return {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names}


def build_empty(folder: Path) -> Any:
    config = models.load_config(str(folder))
    with torch.device("meta"):
        return model_family(config).from_config(config)


# --- shapes: built on the meta device, which takes no memory ----------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_a_published_checkpoint_is_estimated_and_sharded_at_its_published_size(name: str, tmp_path: Path) -> None:
    known, folder = SHAPES[name], write_config(tmp_path / "model", SHAPES[name]["config"])
    config = config_of(folder)
    found, notes = find_models(config)
    sizes, memory = found["actor"], estimate(config, found)
    assert memory is not None
    assert sizes.parameters == (known["parameters"] or sizes.parameters)
    assert memory.weights == 2 * sizes.parameters
    assert notes == [f"{folder}: no weights here, counted from its config.json"]
    times = estimate_on_cards(config, found, Cards(1, 8, "H100", 80 * 10**9), Assumptions()).times
    assert min(times.values()) > 0
    if active := known.get("active"):  # of cards, some with the table of embeddings and some without
        assert Work.of(sizes, 1.0).of_token / 1e9 == pytest.approx(active, rel=0.1)
    require_same_blocks(build_empty(folder), sizes)


def require_same_blocks(model: Any, sizes: ModelSizes) -> None:
    """Check that the blocks to shard are all layers and the tower, and as large as the estimate has them."""
    blocks, text = find_blocks(model), sizes.text
    inside = [parameter for block in blocks for parameter in block.parameters()]
    rest = {id(parameter) for parameter in model.parameters()} - {id(parameter) for parameter in inside}
    assert text is not None
    assert len(blocks) == text.layers + (sizes.tower is not None)
    assert len({id(parameter) for parameter in inside}) == len(inside), "a parameter in two blocks"
    largest = max(sum(parameter.numel() for parameter in block.parameters()) for block in blocks)
    outside = sum(parameter.numel() for parameter in model.parameters() if id(parameter) in rest)
    assert sizes.block_sizes == (largest, outside)


CACHED = {  # numbers that an engine keeps of each token, and of each sample: by hand, from the papers' formulas
    "deepseek-ai/DeepSeek-V3": (61 * (512 + 64), 0),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (6 * 2 * 2 * 128, 23 * (4096 * 128 + 4 * (4096 + 2 * 8 * 128))),
    "ibm-granite/granite-4.0-h-small": (4 * 2 * 8 * 128, 36 * (8192 * 128 + 4 * (8192 + 2 * 128))),
    "LiquidAI/LFM2-1.2B": (6 * 2 * 8 * 64, 10 * 2048 * 3),
    "Qwen/Qwen3-8B": (36 * 2 * 8 * 128, 0),
}


@pytest.mark.parametrize("name", CACHED)
def test_an_engines_cache_is_counted_by_what_layers_keep(name: str, tmp_path: Path) -> None:
    text = find_models(config_of(write_config(tmp_path / "model", SHAPES[name]["config"])))[0]["actor"].text
    of_token, of_sample = CACHED[name]
    assert text is not None
    assert text.cache_bytes(1000, 2) == 2 * 1000 * of_token + 4 * of_sample


# --- names -----------------------------------------------------------------------------------------------------------


def publish(family: str, folder: Path, **changed: object) -> dict[str, torch.Tensor]:
    """Write the configuration of a tiny model; return its tensors under the names that a family is published with."""
    model = make_model(family)
    tensors = {name: tensor.contiguous().clone() for name, tensor in find_published_names(model).items()}
    write_config(folder, {**model.config.to_dict(), "architectures": [type(model).__name__], **changed})
    return tensors


def find_published_names(model: Any) -> dict[str, Any]:
    name_as_published(model)
    tied = model.config.tie_word_embeddings
    found = revert_weight_conversion(model, dict(model.state_dict()))
    return {name: tensor for name, tensor in found.items() if not (tied and name.endswith("lm_head.weight"))}


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_merged_under_the_names_of_a_published_index(name: str, tmp_path: Path) -> None:
    config = SHAPES[name]["config"]
    found = collapse(find_published_names(build_empty(write_config(tmp_path / "model", config))))
    packed = re.compile(r"(.*\.experts\.(gate_up|down)_proj)_(blocks|scales)")
    assert found == {packed.sub(r"\1", one) for one in NAMES[name]}


@pytest.mark.parametrize(
    "family", ["qwen2", "gemma3", "mixtral", "gpt_oss", "qwen2_5_vl", "qwen3_moe", "deepseek_v3", "qwen3_5", "gemma4"]
)
def test_a_checkpoint_is_merged_into_the_names_and_values_it_was_read_from(family: str, tmp_path: Path) -> None:
    tensors = publish(family, tmp_path / "published")
    save_file(tensors, tmp_path / "published/model.safetensors", metadata={"format": "pt"})
    config = models.load_config(str(tmp_path / "published"))
    save_as_r1(load(tmp_path / "published"), config, tmp_path / "global_step_1/actor")
    merged: dict[str, torch.Tensor] = {}
    for file in merge(tmp_path / "global_step_1", tmp_path / "merged").glob("*.safetensors"):
        merged |= load_file(file)
    assert sorted(merged) == sorted(tensors)
    assert all(torch.equal(merged[name], tensor) for name, tensor in tensors.items())


def load(folder: Path) -> Any:
    return models.load_model(str(folder), config=models.load_config(str(folder)), dtype=torch.float32, device=CPU)


def save_as_r1(model: Any, config: Any, folder: Path) -> None:
    save(folder, model, None, {}, Parallel(), 2 * 10**9)
    without_quantization(config).save_pretrained(folder)


# --- quantized files --------------------------------------------------------------------------------------------------


def pack_mxfp4(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the files' tensors of gpt-oss with experts in four bits, and the values that these stand for."""
    packed, plain, draw = dict[str, torch.Tensor](), dict[str, torch.Tensor](), torch.Generator().manual_seed(2)
    for name, tensor in tensors.items():
        if not re.search(r"experts\.(gate_up|down)_proj$", name):
            packed[name] = plain[name] = tensor.bfloat16()
            continue
        experts, width, out = tensor.shape
        codes = torch.randint(0, 16, (experts, out, width // 32, 32), generator=draw, dtype=torch.uint8)
        exponents = torch.randint(120, 130, (experts, out, width // 32), generator=draw, dtype=torch.uint8)
        packed[f"{name}_blocks"] = codes[..., ::2] | (codes[..., 1::2] << 4)
        packed[f"{name}_scales"] = exponents
        values = FP4[codes.long()] * 2.0 ** (exponents.float()[..., None] - 127)
        plain[name] = values.flatten(2).transpose(1, 2)
    return packed, plain


def pack_fp8(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the files' tensors with projections in eight bits, as DeepSeek-V3's are, and the values of these."""
    packed, plain = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        if not name.endswith("proj.weight"):
            packed[name] = plain[name] = tensor.bfloat16()
            continue
        scale = (tensor.abs().max() / 448).reshape(1, 1)
        packed[name], packed[f"{name}_scale_inv"] = (tensor / scale).to(torch.float8_e4m3fn), scale
        plain[name] = packed[name].float() * scale
    return packed, plain


QUANTIZED: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt_oss": (pack_mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}),
    "deepseek_v3": (pack_fp8, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}),
}


@pytest.mark.parametrize("family", QUANTIZED)
def test_weights_published_in_few_bits_are_trained_and_saved_as_plain_ones(family: str, tmp_path: Path) -> None:
    pack, quantization = QUANTIZED[family]
    packed, plain = pack(publish(family, tmp_path / "published", quantization_config=quantization))
    if family == "gpt_oss":
        assert collapse(packed) == set(NAMES["openai/gpt-oss-20b"])
    save_file(packed, tmp_path / "published/model.safetensors", metadata={"format": "pt"})
    config, model = models.load_config(str(tmp_path / "published")), load(tmp_path / "published")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    found = find_published_names(model)
    assert sorted(found) == sorted(plain)
    for name, expected in plain.items():
        torch.testing.assert_close(found[name], expected.float(), atol=0, rtol=2**-8)  # transformers rounds to bfloat16
    model(input_ids=torch.arange(8)[None]).logits.sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "proj" in name)
    save_as_r1(model, config, tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again/config.json").read_text())
    again, ids = load(tmp_path / "again"), torch.arange(8)[None]
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("method", "quantization", "message"),
    [
        ("awq", None, "published as awq, r1 reads fp8, mxfp4 and plain weights: name a checkpoint"),
        ("bitsandbytes", None, "published in 4 bits .* set quantization=nf4 with an adapter"),
        ("fp8", "nf4", "published as fp8, of which quantization=nf4 cannot be made"),
        ("bitsandbytes", "nf4", None),
        ("mxfp4", None, None),
    ],
)
def test_files_that_cannot_be_trained_are_refused_before_they_are_read(
    method: str, quantization: str | None, message: str | None, tmp_path: Path
) -> None:
    folder = write_config(
        tmp_path / "m", {**SHAPES["Qwen/Qwen3-0.6B"]["config"], "quantization_config": {"quant_method": method}}
    )
    config = models.load_config(str(folder))
    fault = find_fault(config, quantization)
    assert fault is None if message is None else re.search(message, str(fault))
    if message is not None:
        with pytest.raises(models.ModelError, match=message):
            models.load_model(str(folder), config=config, dtype=torch.float32, device=CPU, quantization=quantization)


# --- what `r1 estimate` reads in the headers of published files -------------------------------------------------------


def write_headers(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a safetensors file with a header and no data."""
    header = json.dumps(
        {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    )
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())


def test_the_packed_weights_of_gpt_oss_are_counted_as_what_training_loads(tmp_path: Path) -> None:
    known = SHAPES["openai/gpt-oss-20b"]
    folder = write_config(tmp_path / "model", known["config"])
    shapes = {name: tuple(parameter.shape) for name, parameter in build_empty(folder).named_parameters()}
    for name in [name for name in shapes if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, width, out = shapes.pop(name)
        shapes |= {f"{name}_blocks": (experts, out, width // 32, 16), f"{name}_scales": (experts, out, width // 32)}
    assert collapse(shapes) == set(NAMES["openai/gpt-oss-20b"])
    write_headers(folder, shapes)
    sizes = read_sizes(ModelConfig(model_path=str(folder)))
    assert sizes is not None
    assert sizes.parameters == known["parameters"]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "Qwen/Qwen3.5-27B"])
def test_published_files_are_counted_as_the_model_that_is_trained(name: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", SHAPES[name]["config"])
    model = build_empty(folder)
    built = find_models(config_of(folder))[0]["actor"]
    name_as_published(model)
    shapes = {
        key: tuple(value.shape) for key, value in revert_weight_conversion(model, dict(model.state_dict())).items()
    }
    layer = next(key for key in shapes if ".layers.0." in key).partition(".layers.0.")[0]
    further = {"mtp.fc.weight": (64, 128), f"{layer}.layers.64.self_attn.q_proj.weight": (64, 64)}  # not trained
    write_headers(folder, shapes | further)
    read = read_sizes(ModelConfig(model_path=str(folder)))
    assert read is not None
    assert read.parameters == built.parameters == SHAPES[name]["parameters"]
    assert read.block_sizes == built.block_sizes
    adapted = ModelConfig(lora=LoraConfig(rank=8))
    assert read.count_trained(adapted) == built.count_trained(adapted)
    assert Work.of(read, 1.0) == Work.of(built, 1.0)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B"])
def test_four_bits_are_counted_for_linear_layers_which_experts_are_not(name: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", SHAPES[name]["config"])
    words = [
        "worker.actor.model.lora.rank=8",
        "worker.actor.model.quantization=nf4",
        "worker.actor.fsdp.mp_param_dtype=bf16",
    ]
    config = load_config(
        [str(ROOT / "examples/quickstart/config.yaml"), f"worker.actor.model.model_path={folder}", *words]
    )
    found, model = find_models(config[0])[0], build_empty(folder)
    memory = estimate(config[0], found)
    assert memory is not None
    linear = [module for key, module in model.named_modules() if type(module) is torch.nn.Linear and key != "lm_head"]
    packed = sum(module.weight.numel() for module in linear)
    whole = sum(parameter.numel() for parameter in model.parameters()) - packed
    expected = 0.52 * packed + 2 * whole + 4 * memory.trained
    assert memory.weights == pytest.approx(expected, rel=1e-3)  # routers are counted as linear layers


def test_a_tensor_of_a_quantized_checkpoint_is_no_larger_for_its_scales(tmp_path: Path) -> None:
    config = {**SHAPES["Qwen/Qwen3-0.6B"]["config"], "quantization_config": {"quant_method": "fp8"}}
    folder = write_config(tmp_path / "model", config)
    name = "model.layers.0.mlp.up_proj.weight"
    write_headers(folder, {name: (3072, 1024), f"{name}_scale_inv": (24, 8)})
    sizes = read_sizes(ModelConfig(model_path=str(folder)))
    assert sizes is not None
    assert sizes.parameters == prod((3072, 1024))
