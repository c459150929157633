"""Every policy loss under every aggregation, samples off policy for them, and the cuts that must not matter."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from core_models import VOCAB, in_float64, qwen2, reads_pack, text_samples
from torch import Tensor

from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.optim import build_optimizer
from r1_core.learner.parallel import Parallel, shard_model
from r1_core.losses import AGGREGATIONS, POLICY_LOSSES, Correction, Rejection
from r1_core.objective import Objective
from r1_core.registry import Registry
from r1_core.types import Sample

WIDE = {"clip_low": 0.2, "clip_high": 0.3}
# The settings that make each loss do all it can on a few tokens.
SETTINGS = {
    "gspo": WIDE,
    "gspo_token": WIDE,
    "luspo": WIDE,
    "clip_cov": {"ratio": 0.3, "cov_low": 0.0},
    "kl_cov": {"ratio": 0.3},
}


def distinct(registry: Registry[Any]) -> list[str]:
    """The names of a registry without second names of the same entry."""
    names: dict[Any, str] = {}
    for name in registry:
        names.setdefault(registry.get(name), name)
    return list(names.values())


OBJECTIVES = {
    f"{loss}, {aggregation}": Objective(POLICY_LOSSES.get(loss)(**SETTINGS.get(loss, {})), aggregation)
    for loss in distinct(POLICY_LOSSES)
    for aggregation in distinct(AGGREGATIONS)
} | {
    "KL term": Objective(aggregation="seq", kl_penalty="low_var_kl", kl_coef=0.5),
    "entropy bonus": Objective(aggregation="seq-mean-token-sum", entropy_coef=0.5),
    "off-policy mask": Objective(off_policy_threshold=0.1),
    "correction": Objective(
        correction=Correction("sequence", normalize=True, rejections=(Rejection("k1", "token", 2.0, 0.5),))
    ),
}
LENGTHS = ((3, 4), (5, 1), (2, 6), (4, 3), (3, 9), (2, 2), (6, 2))
# Of the seven samples: one micro-batch, three, and seven; and by tokens.
LIMITS = {
    "7 samples": MicroLimit(7),
    "3 samples": MicroLimit(3),
    "1 sample": MicroLimit(1),
    "17 tokens": MicroLimit(tokens=17),
}
CUTS = {
    f"{'packed' if packed else 'padded'}, {name}": Batching(packed, limit, limit)
    for packed in (True, False)
    for name, limit in LIMITS.items()
}
CUTS |= {
    f"sharing prompts, {name}": Batching(True, limit, limit, share_prompts=True)
    for name, limit in LIMITS.items()
    if name != "1 sample"
}
# A round of two processes on one machine is mostly waiting: two rounds that fill, and four of which the last does not.
CUTS_FOR_RANKS = {name: CUTS[name] for name in ("packed, 3 samples", "padded, 1 sample")}


def off_policy_samples() -> list[Sample]:
    """Uneven samples, the third with a hole in its mask, the last without trained tokens; all log-probs are drawn.

    The first and the fifth have a prompt in common, and the third and the sixth.
    """
    samples = [
        replace(sample, prompt_length=prompt)
        for sample, (prompt, _) in zip(text_samples(LENGTHS), LENGTHS, strict=True)
    ]
    for one, other in ((0, 4), (2, 5)):
        samples[other].token_ids[: samples[one].prompt_length] = samples[one].token_ids[: samples[one].prompt_length]
    return off_policy(samples)


def off_policy(samples: Sequence[Sample]) -> list[Sample]:
    """Samples of a policy that has moved on, ready for every objective."""
    generator = torch.Generator().manual_seed(2)
    moved = []
    for sample in samples:
        old, ref, rollout, weights = 0.4 * torch.randn(4, len(sample.token_ids), generator=generator)
        old = old - torch.tensor(VOCAB).log()  # about what a random model says
        moved.append(
            replace(
                sample,
                advantages=torch.randn((), generator=generator).expand(sample.token_ids.shape),
                old_logprobs=old,
                ref_logprobs=old + ref,
                rollout_logprobs=old + rollout,
                weights=weights.exp(),
            )
        )
    return moved


def policy_learner(monkeypatch, parallel: Parallel | None = None) -> Learner:
    model = in_float64(reads_pack(qwen2()), monkeypatch)
    if parallel is not None:
        shard_model(model, [], parallel.mesh)
    optimizer = build_optimizer(model.named_parameters(), lr=1e-3)
    return Learner(model, optimizer, lambda step: 1.0, parallel=parallel)


def outcome(
    learner: Learner, objective: Objective, batching: Batching, samples: Sequence[Sample] | None = None
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and gradients of one step."""
    learner.batching = batching
    learner.optimizer.zero_grad()
    metrics = learner.forward_backward(off_policy_samples() if samples is None else samples, objective)
    return metrics, {name: param.grad for name, param in learner.model.named_parameters()}
