"""The sizes of a model, by the headers of its safetensors files and its config.json.

A dry run loads no torch, so tensors' names decide which weights are frozen or adapted, and the FSDP blocks. Without
safetensors files, `estimate.models` reads names and shapes from the model on the meta device.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from r1_cli.config import RunConfig
from r1_cli.config.model import LoraConfig, ModelConfig
from r1_cli.config.root import Owner
from r1_cli.config.section import Tree

Shapes = Mapping[str, tuple[int, ...]]  # by name of a tensor
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
LARGEST_HEADER = 1 << 27
LOGITS = 2 << 28  # bytes of the two buffers of log-probs, chunk by chunk (`r1_core.learner.linear_head`), at most
EXPERTS = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"  # what families call their number
CHOSEN = "num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k"  # and how many of them a token goes through
LAYER = re.compile(r"^(.*?\.?(?:layers|blocks|h)\.\d+)\.")
TEXT_LAYER = re.compile(r"(?:model\.|language_model\.)*layers\.(\d+)\.")
EXPERT = re.compile(r"(.+\.experts)\.\d+\.(\w+)\.weight")
SCALES = "_scales", "_scale_inv"  # of quantized weights
BLOCK = 32  # numbers of four bits that have one scale, in MXFP4
PATTERN = {"M": "linear_attention", "*": "full_attention"}  # letters of Nemotron-H's hybrid_override_pattern
TOWERS = ("visual.", "vision_tower.", "vision_model.")
# Tables that look like a linear layer's weight and are none, and the head, which all-linear leaves out.
TABLES = ("embed_tokens", "wte", "wpe", "embed_in", "word_embeddings", "position_embeddings", "pos_embed", "lm_head")


@dataclass(frozen=True, slots=True)
class TextSizes:
    layers: int
    hidden: int
    keys: int  # of all key heads together
    width: int  # of the MLP; of all experts that a token goes through
    vocabulary: int = 1 << 30  # unknown: the chunk of log-probs is as large as it may be
    experts: int = 1  # of a mixture's layer
    chosen: int = 1  # of them, by a token
    recurrent: int = 0  # layers that keep no keys and values: a state in their place, or nothing
    state: int = 0  # numbers of all their states, of one sample, in float32
    latent: int = 0  # numbers that a layer keeps of a token in place of keys and values (multi-head latent attention)

    @property
    def token_of_a_layer(self) -> int:
        """Numbers that a gated layer in half precision saves per token: norms, projections, products.

        Counted by torch's saved-tensor hooks (Qwen2), as `test_config_phases.py` does.
        """
        return 10 * self.hidden + 2 * self.keys + 4 * self.width

    def activation_bytes(self, tokens: int, number: int, *, checkpointed: bool, on_host: bool = False) -> int:
        """Return the minimum that layers save for the backward pass of a micro-batch of `tokens` tokens.

        Args:
            number: bytes of one number that layers compute with.
            checkpointed: layers save only their inputs, and are recomputed one at a time.
            on_host: these inputs are in host memory, except one.
        """
        inputs = 1 if on_host else self.layers
        saved = inputs * self.hidden if checkpointed else self.layers * self.token_of_a_layer
        again = self.token_of_a_layer if checkpointed else 0
        return tokens * number * (saved + again)

    def chunk_bytes(self, tokens: int) -> int:
        return min(LOGITS, 2 * 4 * tokens * self.vocabulary)

    def cache_bytes(self, tokens: int, number: int) -> int:
        of_layer = self.latent or 2 * self.keys
        return (self.layers - self.recurrent) * of_layer * tokens * number + 4 * self.state

    @property
    def routed_bytes(self) -> int:
        """Bytes of the experts that an engine chose for a token, if every layer has experts (router replay)."""
        width = 1 if self.experts <= 255 else 2
        return self.layers * self.chosen * width if self.experts > 1 else 0


@dataclass(frozen=True, slots=True)
class TowerSizes:
    layers: int
    hidden: int
    width: int
    patch: int  # pixels along its edge
    merged: int  # patches that become one token
    frames: int  # that stand behind one another in a patch
    gated: bool = False
    products: int = 2  # numbers that the MLP saves for each of its width

    @property
    def patch_of_a_layer(self) -> int:
        """Numbers that a layer saves per patch, counted likewise (Qwen2-VL, 2.5, 3)."""
        return 15 * self.hidden + 4 * self.width if self.gated else 11 * self.hidden + self.products * self.width

    @property
    def patch_at_the_ends(self) -> int:
        """Approximate numbers saved per patch before the layers and in the merger behind them."""
        return 7 * self.hidden

    @property
    def pixels(self) -> int:
        return 3 * self.frames * self.patch**2

    def activation_bytes(self, patches: int, number: int, *, checkpointed: bool, on_host: bool = False) -> int:
        inputs = 1 if on_host else self.layers
        saved = inputs * self.hidden if checkpointed else self.layers * self.patch_of_a_layer
        again = self.patch_of_a_layer if checkpointed else 0
        return patches * number * (saved + again + self.patch_at_the_ends)


@dataclass(frozen=True)
class ModelSizes:
    """One model's tensors and the sizes in its config.json; None: of an unknown form."""

    shapes: Shapes
    text: TextSizes | None = None
    tower: TowerSizes | None = None
    factors: Shapes = field(default_factory=dict)  # of the adapter that training starts from

    @cached_property
    def parameters(self) -> int:
        return sum(map(prod, self.shapes.values()))

    def count_trained(self, model: ModelConfig) -> int:
        if model.lora.path:
            return sum(map(prod, self.factors.values()))
        if model.lora.rank:
            linear = [shape for name, shape in self.shapes.items() if _is_adapted(name, shape, model.lora)]
            return sum(model.lora.rank * sum(shape) for shape in linear)
        return sum(prod(shape) for name, shape in self.shapes.items() if not _is_frozen(name, model))

    @cached_property
    def linear(self) -> int:
        """Weights of linear layers of text, which `quantization` keeps in few bits; experts are no linear layers."""
        shapes = self.shapes.items()
        return sum(prod(shape) for name, shape in shapes if _is_linear(name, shape) and not in_tower(name))

    @cached_property
    def block_sizes(self) -> tuple[int, int]:
        """Weights of the largest FSDP block, and weights outside of all blocks.

        Blocks are the text model's layers, and a vision tower as one (`r1_core.learner.parallel.find_blocks`).
        """
        blocks, rest = Counter[str](), 0
        for name, shape in self.shapes.items():
            if in_tower(name):
                blocks["tower"] += prod(shape)
            elif match := LAYER.match(name):
                blocks[match[1]] += prod(shape)
            else:
                rest += prod(shape)
        return max(blocks.values(), default=0), rest


Models = Mapping[Owner, ModelSizes]


def read_models(config: RunConfig) -> Models:
    """Return the sizes of the actor's and the critic's models with local weights."""
    owners: tuple[Owner, ...] = ("actor", "critic") if config.has_critic else ("actor",)
    found = {owner: read_sizes(config.trained(owner).model, owner) for owner in owners}
    return {owner: sizes for owner, sizes in found.items() if sizes is not None}


def read_sizes(model: ModelConfig, owner: Owner = "actor") -> ModelSizes | None:
    """Return the sizes of a model in a local folder of safetensors, else None."""
    folder = Path(model.model_path or "")
    shapes = dict(read_shapes(folder)) if model.model_path else {}
    return from_config(folder / "config.json", shapes, model, owner) if shapes else None


def from_config(file: Path, shapes: Shapes, model: ModelConfig, owner: Owner = "actor") -> ModelSizes:
    """Return the sizes of a model with these tensors; a critic has no LM head."""
    if owner == "critic":
        shapes = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    try:
        whole = json.loads(file.read_text())
    except (OSError, ValueError):
        whole = None
    factors = dict(read_shapes(Path(model.lora.path))) if model.lora.path else {}
    return ModelSizes(find_loaded(shapes, whole), read_text(whole), read_tower(whole), factors)


def find_loaded(shapes: Shapes, whole: Any) -> Shapes:
    """Return the shapes of the tensors that a training loads of a published checkpoint's.

    Layers that predict further tokens are left out, packed weights are unpacked, and a layer's experts are one tensor,
    as transformers has them.
    """
    whole = whole if isinstance(whole, dict) else {}
    text = whole.get("text_config")
    layers = (text if isinstance(text, dict) else whole).get("num_hidden_layers")
    packed = bool(whole.get("quantization_config"))
    found, experts = dict[str, tuple[int, ...]](), Counter[str]()
    for name, shape in shapes.items():
        layer = TEXT_LAYER.match(name)
        if name.startswith("mtp.") or (layer and isinstance(layers, int) and int(layer[1]) >= layers):
            continue
        if packed and name.endswith(SCALES):
            continue
        if packed and name.endswith("_blocks"):
            name, shape = name.removesuffix("_blocks"), (*shape[:-2], BLOCK * shape[-2])
        if expert := EXPERT.fullmatch(name):
            name = f"{expert[1]}.{expert[2]}"
            experts[name] += 1
            shape = (experts[name], *shape)
        found[name] = shape
    return found


def read_shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of the model's tensors in a folder, without a checkpoint's optimizer states."""
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        if file.name.startswith("optimizer"):
            continue
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = stream.read(length) if length < LARGEST_HEADER else b""
        try:
            tensors = json.loads(header)
        except ValueError:
            continue
        for name, entry in tensors.items():
            if name != "__metadata__":
                yield name, tuple(entry["shape"])


def read_text(whole: Any) -> TextSizes | None:
    try:
        text = whole.get("text_config") or whole
        heads = text["num_attention_heads"]
        size = text.get("head_dim") or text["hidden_size"] // heads
        keys, latent = (text.get("num_key_value_heads") or heads) * size, 0
        if rank := text.get("kv_lora_rank"):
            latent = rank + text["qk_rope_head_dim"]
            keys = heads * (text["qk_nope_head_dim"] + text["qk_rope_head_dim"] + text["v_head_dim"]) // 2
        kinds = _layer_kinds(text)
        of_layers = text.get("num_hidden_layers") or len(kinds), text["hidden_size"], keys, _width(text)
        vocabulary = text.get("vocab_size") or whole.get("vocab_size") or 1 << 30
        experts = next((text[name] for name in EXPERTS if text.get(name)), 1)
        chosen = _count_chosen(text) if experts > 1 else 1
        return TextSizes(*of_layers, vocabulary, experts, chosen, *_count_states(text, kinds), latent)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _count_chosen(text: Tree) -> int:
    return next((text[name] for name in CHOSEN if text.get(name)), 1)


def _layer_kinds(text: Tree) -> list[str]:
    """Return the kind of each layer; [] if all have attention."""
    if pattern := text.get("hybrid_override_pattern"):
        return [PATTERN.get(letter, "mlp") for letter in pattern]
    if kinds := text.get("layer_types") or text.get("layers_block_type"):
        return list(kinds)
    layers = range(text.get("num_hidden_layers") or 0)
    if every := text.get("full_attention_interval"):  # Qwen3-Next and Qwen3.5 do not name each layer
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in layers]
    if attending := text.get("full_attn_idxs"):  # nor does LFM2
        return ["full_attention" if i in attending else "conv" for i in layers]
    return []


def _count_states(text: Tree, kinds: list[str]) -> tuple[int, int]:
    """Return the layers without keys and values, and the numbers of states: of a rule and its convolution."""
    linear = kinds.count("linear_attention") + kinds.count("mamba")
    bare = linear + sum(kinds.count(kind) for kind in ("conv", "mlp", "moe"))
    bare += text.get("num_kv_shared_layers") or 0  # which use the keys and values of earlier ones
    if convolutions := kinds.count("conv"):
        return bare, convolutions * text["hidden_size"] * text["conv_L_cache"]
    if not linear:
        return bare, 0
    if heads := text.get("linear_num_value_heads"):
        keys, size = text["linear_key_head_dim"], text["linear_value_head_dim"]
        channels = 2 * text["linear_num_key_heads"] * keys + heads * size
        return bare, linear * (heads * keys * size + channels * text["linear_conv_kernel_dim"])
    if heads := text.get("mamba_num_heads"):  # Nemotron-H
        width, size = heads * text["mamba_head_dim"], text["ssm_state_size"]
        channels = width + 2 * text["n_groups"] * size
        return bare, linear * (width * size + channels * text["conv_kernel"])
    if "linear_attn_alpha_factor" in text:  # MiniMax
        size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        return bare, linear * text["num_attention_heads"] * size * size
    width, size = text["mamba_n_heads"] * text["mamba_d_head"], text["mamba_d_state"]
    channels = width + 2 * text["mamba_n_groups"] * size
    return bare, linear * (width * size + channels * text["mamba_d_conv"])


def _width(text: Tree) -> int:
    if not any(text.get(name) for name in CHOSEN):
        width = text.get("block_ff_dim") or text["intermediate_size"]
        return int(max(width) if isinstance(width, list) else width)  # Gemma 3n lists each layer's
    own = text.get("moe_intermediate_size") or text["intermediate_size"]
    shared = text.get("shared_expert_intermediate_size") or text.get("moe_shared_expert_intermediate_size")
    return int(_count_chosen(text) * own + (shared or (text.get("n_shared_experts") or 0) * own))


def read_tower(whole: Any) -> TowerSizes | None:
    try:
        vision = whole["vision_config"]
        hidden = vision.get("embed_dim") or vision["hidden_size"]
        width = vision.get("intermediate_size") or int(hidden * vision["mlp_ratio"])
        return TowerSizes(
            layers=vision.get("depth") or vision["num_hidden_layers"],
            hidden=hidden,
            width=width,
            patch=vision.get("patch_size") or vision["spatial_patch_size"],
            merged=(vision.get("spatial_merge_size") or 1) ** 2,
            frames=vision.get("temporal_patch_size") or 1,
            gated=str(vision.get("model_type")).startswith("qwen2_5_vl"),
            products=3 if vision.get("hidden_act", "quick_gelu") == "quick_gelu" else 2,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def in_tower(name: str) -> bool:
    return any(tower in name for tower in TOWERS)


def _is_frozen(name: str, model: ModelConfig) -> bool:
    if model.freeze_vision_tower and in_tower(name):
        return True
    return any(_matches(pattern, name) for pattern in model.freeze)


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    module = name.removesuffix(".weight")
    return module != name and len(shape) == 2 and not _ends(TABLES, module)


def _is_adapted(name: str, shape: tuple[int, ...], lora: LoraConfig) -> bool:
    if not _is_linear(name, shape):
        return False
    module = name.removesuffix(".weight")
    excluded, targets = lora.exclude_modules, lora.target_modules
    if excluded is not None and (_matches(excluded, module) if isinstance(excluded, str) else _ends(excluded, module)):
        return False
    if isinstance(targets, str):
        return targets == "all-linear" or _matches(targets, module)
    return _ends(targets, module)


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:  # reported when the model is loaded
        return False


def _ends(ends: Iterable[str], name: str) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)
