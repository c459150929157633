"""Models of the shapes that users train, with random weights that do not depend on the number of ranks."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen2Config

from gpu_stages.bench import Bench
from r1_cli.models.attention import PACKED_ATTENTION, attend_packed
from r1_cli.models.load import enable_gradient_checkpointing
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.offload import Offload
from r1_core.learner.optim import build_optimizer
from r1_core.learner.parallel import Parallel, Shard, find_blocks, place_like, shard_model
from r1_core.types import Sample
from r1_data.positions import position_ids_of

ROPE = {"rope_type": "default", "rope_theta": 1e6}
# hidden size, layers, heads, key heads, width of the MLP, vocabulary, whether the head is the embedding
TEXT = {
    "tiny": (64, 2, 2, 1, 128, 512, True),  # heads of 32: vLLM has no smaller ones on processors
    "1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, False),
    "32B": (5120, 64, 40, 8, 27648, 152064, False),
}
TOWER = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
TINY_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "fullatt_block_indexes": [1]}


def model_config(name: str) -> Any:
    """Return the configuration of a shape of `TEXT`, or of "7B-VL" or "tiny-VL", its text model with a tower."""
    size, _, vision = name.partition("-")
    hidden, layers, heads, key_heads, width, vocabulary, tied = TEXT[size]
    text = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": key_heads, "intermediate_size": width, "vocab_size": vocabulary,
        "max_position_embeddings": 32768, "tie_word_embeddings": tied,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if not vision:
        return Qwen2Config(**text, rope_parameters=ROPE)
    axes = [16, 24, 24] if hidden // heads == 128 else [4, 6, 6]
    places = {
        "image_token_id": vocabulary - 1,
        "video_token_id": vocabulary - 2,
        "vision_start_token_id": vocabulary - 3,
    }
    tower = TINY_TOWER if size == "tiny" else TOWER
    return Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": {**ROPE, "mrope_section": axes}},
        vision_config={**tower, "out_hidden_size": hidden, "window_size": 112},
        **places,
    )


def build_model(name: str, bench: Bench, parallel: Parallel, shard: Shard) -> nn.Module:
    """Return this rank's share of a model; no rank ever has more than one whole tensor."""
    model, device = empty_model(name), torch.device(bench.kind)
    attend_packed(model)
    buffers = dict(model.named_buffers())
    enable_gradient_checkpointing(model)
    assert parallel.mesh is not None
    shard_model(model, find_blocks(model), parallel.mesh, shard)
    model.to_empty(device="cpu" if shard.offload else device)
    for key, buffer in buffers.items():
        model.get_buffer(key).copy_(buffer)
    for key, parameter in model.named_parameters():
        parameter.detach().copy_(place_like(random_tensor(key, parameter.shape, parameter.device), parameter))
    return model


def empty_model(name: str) -> nn.Module:
    """Return a model whose parameters have a shape only."""
    config = model_config(name)
    family = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with parameters_on_meta():
        model: nn.Module = family.from_config(config, dtype=torch.float32, attn_implementation=PACKED_ATTENTION)
    return model


def random_tensor(name: str, shape: torch.Size, device: torch.device) -> Tensor:
    """Return the parameter of this name, in float32."""
    draw = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    if len(shape) == 1:  # norms multiply, biases add
        return torch.full(shape, float(name.endswith("weight")), device=device)
    return torch.randn(shape, generator=draw, device=device) * 0.02


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Make modules whose parameters have a shape only; buffers, such as the angles of a rotation, are real."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build_learner(
    model: nn.Module, bench: Bench, parallel: Parallel, tokens: int, offload: Offload | None = None
) -> Learner:
    """Return a learner without a reference whose micro-batches hold so many tokens."""
    limit = MicroLimit(tokens=tokens)
    optimizer = build_optimizer(
        model.named_parameters(), lr=1e-6, betas=(0.9, 0.999), weight_decay=0.01, strategy="adamw"
    )
    return Learner(
        model, optimizer, lambda step: 1.0,
        batching=Batching(True, limit, limit), parallel=parallel, device=torch.device(bench.kind), offload=offload,
    )  # fmt: skip


def make_samples(name: str, count: int, length: int, bench: Bench) -> list[Sample]:
    """Return samples of so many tokens, of which the first half is the prompt; four share one.

    Prompts of models with a tower begin with a picture, of about a million pixels on GPUs.
    """
    config = model_config(name)
    vocabulary, half = config.get_text_config().vocab_size, length // 2
    draw = torch.Generator().manual_seed(0)
    position_ids, inputs = torch.arange(length)[None], {}
    samples = []
    for index in range(count):
        if index % 4 == 0:
            prompt = torch.randint(0, vocabulary - 8, (half,), generator=draw, dtype=torch.int32)
            if hasattr(config, "vision_config"):
                prompt, position_ids, inputs = _with_picture(config, prompt, length, 4 if bench.tiny else 40, draw)
        answer = torch.randint(0, vocabulary - 8, (length - half,), generator=draw, dtype=torch.int32)
        trained = torch.arange(length) >= half
        samples.append(
            Sample(
                token_ids=torch.cat([prompt, answer]),
                loss_mask=trained,
                position_ids=position_ids,
                group_id=index // 4,
                reward=0.0,
                model_inputs=inputs,
                advantages=trained * (1.5 if index % 4 == 0 else -0.25),
            )
        )
    return samples


def _with_picture(
    config: Any, prompt: Tensor, length: int, side: int, draw: torch.Generator
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Put a picture of `side` x `side` patches at the beginning of a prompt; return positions and model inputs, too."""
    places = side * side // config.vision_config.spatial_merge_size**2
    prompt = prompt.clone()
    prompt[0], prompt[1 : places + 1] = config.vision_start_token_id, config.image_token_id
    kinds = torch.zeros(length, dtype=torch.int64)
    kinds[1 : places + 1] = 1
    grid = torch.tensor([[1, side, side]])
    ids = torch.cat([prompt, torch.zeros(length - len(prompt), dtype=torch.int32)])
    rule = position_ids_of(config)
    assert rule is not None
    positions = rule(ids, {"mm_token_type_ids": kinds, "image_grid_thw": grid})
    tower = config.vision_config
    width = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    pixels = torch.randn(side * side, width, generator=draw)
    return prompt, positions, {"pixel_values": pixels, "image_grid_thw": grid}
