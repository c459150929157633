"""The arithmetic that an update cannot do without, as `learner.py` counts it: each prompt and picture once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from r1_core import Sample


@dataclass(frozen=True, slots=True)
class Work:
    """What has to be computed of an update's samples, each prompt once."""

    tokens: int  # through the layers
    predicted: int  # through the head
    pairs: int  # of tokens, one of which looks at the other
    patches: int  # through the tower's layers
    patch_pairs: int  # of patches, over all of the tower's layers

    @classmethod
    def of(cls, model: Any, samples: Sequence[Sample], groups: int, answers: int, prompt: int, answer: int) -> "Work":
        """Count the work of groups of equal lengths, one picture a prompt at most."""
        pairs = prompt * (prompt + 1) // 2 + answers * (answer * prompt + answer * (answer + 1) // 2)
        patches = patch_pairs = 0
        grid = samples[0].model_inputs.get("image_grid_thw")
        if grid is not None:
            patches = int(grid.prod())
            tower = model.config.vision_config
            window = (tower.window_size // tower.patch_size) ** 2
            whole = len(tower.fullatt_block_indexes)
            patch_pairs = patches * (whole * patches + (tower.depth - whole) * min(window, patches))
        counts = (prompt + answers * answer, answers * answer, pairs, patches, patch_pairs)
        return cls(*(groups * one for one in counts))


def useful_flops(model: Any, work: Work) -> float:
    """Return the FLOPs of an update's forward and backward passes, nothing computed twice."""
    text, inner = model.config.get_text_config(), 0.0
    head = model.get_output_embeddings().weight
    tower = getattr(model.config, "vision_config", None) and model.get_encoder(modality="image")
    apart = {id(head), *(id(p) for p in tower.parameters())} if tower else {id(head)}
    looked_up = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    for name, p in model.named_parameters():
        if id(p) not in apart | looked_up and p.dim() > 1:
            share = text.num_experts_per_tok / text.num_experts if ".experts." in name else 1.0
            inner += share * p.numel()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    found = 6 * (inner * work.tokens + head.numel() * work.predicted)
    found += 12 * text.num_hidden_layers * text.num_attention_heads * size * work.pairs
    if tower:
        merged = model.config.vision_config.spatial_merge_size**2
        for name, p in tower.named_parameters():
            if p.dim() > 1:
                found += 6 * p.numel() * work.patches / (merged if "merger" in name else 1)
        found += 12 * model.config.vision_config.hidden_size * work.patch_pairs
    return found
