"""Fine-tuning of each family on gloo ranks: a case that `ranks` runs."""

from dataclasses import dataclass, replace
from typing import Any

import families
import torch
import transformers as hf
from family_prompts import make_learner, make_prompts, make_samples
from torch import Tensor

from r1_core.learner.parallel import Parallel, find_blocks, full_tensor, shard_model
from r1_core.losses import NLL
from r1_core.objective import Objective
from r1_core.types import Sample
from r1_data.types import Prompt

PICTURES = ("pictures around a video", "picture last")
LAYOUTS = ("padded", "packed", "packed, cut", "shared")


def build(family: str) -> Any:
    """A model with random weights; Mistral's has the sizes of Llama's."""
    if family != "mistral":
        return families.make_model(family, 1.0)
    own = families.make_config("llama")
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "eos_token_id", "pad_token_id", "tie_word_embeddings")  # fmt: skip
    config = hf.AutoConfig.for_model("mistral", **{name: getattr(own, name) for name in sizes})
    return families.make_model("llama", 1.0, config)


def make_demonstrations(family: str) -> tuple[list[Prompt], list[Sample]]:
    """Two answers to each prompt, every token of which is trained."""
    prompts = make_prompts("llama" if family == "mistral" else family, PICTURES)
    prompts = [*prompts, *prompts]
    samples = [
        replace(sample, prompt_length=len(prompt.token_ids), advantages=torch.ones(len(sample.token_ids)))
        for prompt, sample in zip(prompts, make_samples(prompts), strict=True)
    ]
    return prompts, samples


@dataclass(frozen=True)
class Found:
    """What a step of fine-tuning gives in a layout."""

    loss: float
    rows: list[float]  # mean of −log π of each
    gradients: dict[str, Tensor]


def fine_tune(family: str, ranks: bool = True) -> dict[str, Found]:
    """Return a step's results by layout; `ranks`: as one of the ranks that share the model."""
    _, samples = make_demonstrations(family)
    parallel, found = Parallel.join("cpu") if ranks else None, {}
    for layout in LAYOUTS:
        model = build(family)
        if parallel is not None:
            assert parallel.mesh is not None
            shard_model(model, find_blocks(model), parallel.mesh)
        rows = 3 if "cut" in layout else 99
        learner = make_learner(model, rows=rows, padding_free=layout != "padded", parallel=parallel)
        learner.batching = replace(learner.batching, share_prompts=layout == "shared")
        trained, metrics = learner.forward_backward_on_policy(samples, Objective(NLL()))
        each = [-one.old_logprobs.sum().item() / one.response_length for one in trained if one.old_logprobs is not None]
        kept = ((name, param.grad) for name, param in learner.model.named_parameters() if param.grad is not None)
        gradients = {name: full_tensor(grad).clone() for name, grad in kept}
        found[layout] = Found(metrics["pg_loss"], each, gradients)
    return found
