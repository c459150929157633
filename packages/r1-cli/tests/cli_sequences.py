"""What ranks that share sequences are compared with one process in: cases that `ranks` runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cli_ranks
import torch
from cli_families import ROWS, build, make_samples
from core_cases import off_policy
from core_critics import Course as CriticCourse
from core_critics import draw_head, make_critic, take_steps
from core_models import _rotate_vision, in_float64, with_siblings
from core_ranks import THREE
from ranks import patches
from torch import Tensor
from transformers.models.qwen3_vl import modeling_qwen3_vl
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe

from r1_cli.cluster.rank_client import RankClient, RankedPolicy
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.critic import ValueScorer, give_value_head
from r1_core.learner.microbatch import collate
from r1_core.learner.optim import build_optimizer
from r1_core.learner.parallel import Parallel, find_blocks, full_tensor, shard_model
from r1_core.learner.token_model import TokenModel
from r1_core.learner.trainable import LearnerInfo
from r1_core.losses import NLL
from r1_core.objective import Objective
from r1_core.types import Sample

ONE_BY_ONE = Batching(True, MicroLimit(1), MicroLimit(4))
SHARING = Batching(True, MicroLimit(3), MicroLimit(4), share_prompts=True)


@dataclass(frozen=True)
class Form:
    """How many ranks, how many of them share a sequence and a copy of the weights, and whether prompts are shared."""

    world: int
    sequence_size: int
    shard_size: int = -1
    share_prompts: bool = False

    def join(self) -> Parallel:
        return Parallel.join("cpu", shard_size=self.shard_size, sequence_size=self.sequence_size)

    @property
    def batching(self) -> Batching:
        return SHARING if self.share_prompts else ONE_BY_ONE


FORMS = {
    "none of 2": Form(2, 1),
    "2 of 2": Form(2, 2),
    "4 of 4, prompts shared": Form(4, 4, share_prompts=True),
    "2 of 4": Form(4, 2),
    "2 of 4, two copies, prompts shared": Form(4, 2, shard_size=2, share_prompts=True),
}
NEEDS = ("old_logprobs", "full_kl", "squared_probs", "ref_logprobs")


def samples_for(name: str) -> list[Sample]:
    """Five samples, of which the last trains nothing, further answers to two of their prompts, and one of one token."""
    model = build(name, packed=False)
    rows = ROWS["pictures"] if "vl" in name else [()] * 5
    samples = make_samples(name, rows, model.config)
    text = next(sample for sample in samples if not sample.model_inputs)
    one = replace(text, **{f: getattr(text, f)[..., :1] for f in ("token_ids", "loss_mask", "position_ids")})
    return off_policy([*with_siblings(samples), one])


def route(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a router of Qwen3 computes, which rounds to float32 by itself."""
    logits = hidden.flatten(0, -2) @ router.weight.T
    top, chosen = logits.softmax(-1).topk(router.top_k)
    return logits, top / top.sum(-1, keepdim=True), chosen


def build_learner(name: str, parallel: Parallel | None = None, batching: Batching = ONE_BY_ONE) -> Learner:
    """A learner in float64 with a reference; 8 heads, 2 key heads."""
    for family in (modeling_qwen3_vl, modeling_qwen3_vl_moe):
        patches.setattr(family, "apply_rotary_pos_emb_vision", _rotate_vision)
    models = [in_float64(build(name, packed=True, seed=seed, heads=8), patches) for seed in (0, 1)]
    for model in models:
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.forward = partial(route, module)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if parallel is not None:
            assert parallel.mesh is not None
            shard_model(model, find_blocks(model), parallel.mesh)
    optimizer = build_optimizer(models[0].named_parameters(), lr=1e-2)
    return Learner(
        models[0], optimizer, lambda step: 1.0, reference=models[1], batching=batching, max_grad_norm=0.5,
        parallel=parallel,
    )  # fmt: skip


def verb_by_verb() -> tuple[list[Any], LearnerInfo]:
    """What comes back of all verbs of ranks that share sequences, and their info."""

    def build_both(parallel: Parallel) -> tuple[Learner, Objective]:
        return build_learner("qwen2", parallel), cli_ranks.OBJECTIVES["KL"]

    learner = RankedPolicy(RankClient(cli_ranks.Together(cli_ranks.meet(build_both, sequence_size=2))))
    seen = cli_ranks.go_through(learner, cli_ranks.step_samples("text"), cli_ranks.OBJECTIVES["KL"], pads=False)
    return seen, learner.describe()


@dataclass
class Course:
    """What a learner went through."""

    logprobs: Tensor  # float64, of a pack of all samples
    annotated: dict[str, Tensor]
    metrics: list[dict[str, float]]
    gradients: dict[str, Tensor]  # of the first step
    weights: dict[str, Tensor]


def exact_logprobs(learner: Learner, samples: Sequence[Sample]) -> Tensor:
    """Log-probs of one pack as the model says them, not rounded."""
    share = learner.batching.share_prompts
    batch = collate(samples, padding_free=True, share_prompts=share, sequence=learner.parallel.sequence)
    with torch.no_grad():
        return TokenModel(learner.model)(batch).logprobs


def take_course(name: str, objective: str, form: Form | None = None) -> Course:
    """Three steps from the first weights."""
    learner = build_learner(name) if form is None else build_learner(name, form.join(), form.batching)
    samples = samples_for(name)
    logprobs = exact_logprobs(learner, samples)
    annotated = learner.add_logprobs(samples, NEEDS)
    found = {need: torch.cat([getattr(sample, need) for sample in annotated]) for need in NEEDS}
    course = Course(logprobs, found, [], {}, {})
    for _ in range(3):
        metrics = learner.forward_backward(samples, THREE[objective])
        trained = [(key, param) for key, param in learner.model.named_parameters() if param.grad is not None]
        course.gradients = course.gradients or {key: full_tensor(param.grad).clone() for key, param in trained}
        course.metrics.append(metrics | learner.optim_step())
    course.weights = {key: tensor.clone() for key, tensor in learner.weights()}
    return course


def fine_tune(name: str, form: Form | None = None) -> tuple[tuple[float, Tensor], dict[str, float], dict[str, Tensor]]:
    """The mean of -log-probs of all tokens, these log-probs, and metrics and gradients of a step of fine-tuning."""
    learner = build_learner(name) if form is None else build_learner(name, form.join(), form.batching)
    samples = [replace(sample, advantages=sample.loss_mask.double()) for sample in samples_for(name)]
    samples = [replace(sample, old_logprobs=None, weights=None, rollout_logprobs=None) for sample in samples]
    found, metrics = learner.forward_backward_on_policy(samples, Objective(NLL()))
    logprobs = torch.cat([sample.old_logprobs[sample.loss_mask] for sample in found])
    gradients = {
        key: full_tensor(param.grad).clone()
        for key, param in learner.model.named_parameters()
        if param.grad is not None
    }
    return (-logprobs.mean().item(), logprobs), metrics, gradients


def forecast(name: str, form: Form | None = None) -> tuple[Tensor, CriticCourse]:
    """Exact values of a pack of all samples, and three steps of a critic whose sequences alone are shared."""
    model = build(name, packed=True, heads=8)
    draw_head(give_value_head(model))
    model = in_float64(model, patches)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    parallel = None if form is None else replace(form, sequence_size=1).join().with_sequence_size(form.sequence_size)
    critic = make_critic(model, parallel, batching=ONE_BY_ONE if form is None else form.batching)
    samples, share = samples_for(name), critic.batching.share_prompts
    batch = collate(samples, padding_free=True, share_prompts=share, sequence=critic.parallel.sequence)
    with torch.no_grad():
        values = ValueScorer(critic.model)(batch)
    return values, take_steps(critic, samples)
