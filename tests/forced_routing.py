"""Mixtures of experts whose routing is forced by hand: the reference that router replay is compared with.

Each family's gate weights are written out here, so that nothing of r1's seam is used.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from architectures import SumOfLogprobs, compute_alone, make_samples
from tiny_models import make_model
from torch import Tensor
from torch.nn import functional as F

from r1_cli.models.load import configure_modules, enable_gradient_checkpointing
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.types import Sample

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "glm4_moe")


def weigh(family: str, router: Any, hidden: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
    """Return what a router of the family returns, with weights of the chosen experts [tokens, k]."""
    hidden = hidden.reshape(-1, hidden.shape[-1])
    logits = F.linear(hidden, router.weight, getattr(router, "bias", None))
    if family == "gpt_oss":
        return logits, logits.gather(1, chosen).softmax(-1), chosen
    scores = logits.sigmoid() if family == "glm4_moe" else logits.softmax(-1)
    weights = scores.gather(1, chosen)
    if family != "qwen3_moe" or router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if family == "glm4_moe" else 0.0))
    if family == "glm4_moe":
        weights = weights * router.routed_scaling_factor
    return logits, weights, chosen


def routers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


def force(family: str, model: Any, experts: Tensor) -> None:
    """Let a model's routers choose `experts` [tokens, routers, k] in each forward of so many tokens."""
    for number, router in enumerate(routers_of(model)):

        def forward(hidden: Tensor, router: Any = router, number: int = number) -> tuple[Tensor, ...]:
            return weigh(family, router, hidden, experts[:, number].long())

        router.forward = forward


def choose(family: str, sample: Sample, seed: int) -> Tensor:
    """Return the experts that another router would choose for a sample, uint8 [L, 2, 2]: two of four, in any order."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.rand(len(sample.token_ids), 2, 4, generator=draw)
    experts = scores.topk(2).indices.to(torch.uint8)
    return experts[:, : len(routers_of(make_model(family)))]


def make_learner(family: str, layout: Any = "shared", *, checkpointed: bool = False) -> tuple[Learner, Any]:
    """Return a learner, and a copy of its model that attends by its own eager attention."""
    model = make_model(family)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    configure_modules(model, torch.float32, torch.device("cpu"))
    if checkpointed:
        enable_gradient_checkpointing(model)
    batching = Batching(update=MicroLimit(4), experience=MicroLimit(4), share_prompts=True)
    learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.0), lambda step: 1.0, batching=batching)
    if layout != "shared":
        learner.set_layout(layout)
    return learner, plain


def with_choices(family: str) -> list[Sample]:
    """Return samples of two prompts; those of a prompt share its experts, as an engine computes it once."""
    samples = make_samples(1)
    found = []
    for number, sample in enumerate(samples):
        experts = choose(family, sample, number)
        experts[: sample.prompt_length] = choose(family, sample, 9 + sample.group_id)[: sample.prompt_length]
        found.append(replace(sample, routed_experts=experts))
    return found


def compute_forced(family: str, plain: Any, samples: Sequence[Sample]) -> list[Tensor]:
    """Return the log-probs of each sample's answer, by the model's own eager forward with forced experts."""
    found = []
    for sample in samples:
        assert sample.routed_experts is not None
        force(family, plain, sample.routed_experts)
        found.append(compute_alone(plain, sample))
    return found


# --- ranks ------------------------------------------------------------------------------------------------------------


def compare_on_ranks(path: str, family: str, sequence: int) -> tuple[float, float, dict[str, float]]:
    """Return how far log-probs and gradients on ranks are from the forced forward's, and the metrics of the update."""
    from loading_ranks import load

    from r1_core.learner.parallel import Parallel, full_tensor

    parallel = Parallel.join("cpu", sequence_size=sequence)
    model, plain = load(path, parallel), make_model(family)
    plain.set_attn_implementation("eager")
    enable_gradient_checkpointing(model)
    batching = Batching(update=MicroLimit(2), experience=MicroLimit(2), share_prompts=True)
    learner = Learner(
        model, torch.optim.SGD(model.parameters(), lr=0.0), lambda step: 1.0, batching=batching, parallel=parallel
    )
    samples = with_choices(family)
    expected = torch.cat(compute_forced(family, plain, samples))
    gap = (learner.compute_logprobs(samples, ["old_logprobs"])["old_logprobs"] - expected).abs().max()
    metrics = learner.forward_backward(samples, SumOfLogprobs())
    expected.sum().backward()
    own = dict(model.named_parameters())
    off = [
        float((full_tensor(own[name].grad) - parameter.grad).norm() / parameter.grad.norm())
        for name, parameter in plain.named_parameters()
        if parameter.grad is not None
    ]
    return float(gap), max(off), metrics
