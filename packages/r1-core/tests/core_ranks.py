"""What ranks are compared with one process in: models, samples, forms of parallelism, and cases that `ranks` runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from core_cases import CUTS_FOR_RANKS, OBJECTIVES, off_policy, off_policy_samples, outcome, policy_learner
from core_models import in_float64, picture_samples, qwen2, qwen25_vl, reads_pack, text_samples, with_siblings
from ranks import patches

from r1_core.advantages import Reinforce, assign
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.offload import Offload, bytes_on_device, states_of, tensors_of
from r1_core.learner.optim import build_optimizer
from r1_core.learner.parallel import Parallel, Shard, find_blocks, full_tensor, shard_model
from r1_core.losses import GSPO
from r1_core.objective import Objective

# One whose gradient is taken going forward, one that sees whole sequences, for which logits are computed again, and one
# that computes the reference's logits, too.
THREE = {
    "KL term": Objective(kl_penalty="low_var_kl", kl_coef=0.1),
    "whole sequences": Objective(GSPO(), "seq", entropy_coef=0.01),
    "full KL": Objective(kl_penalty="full", kl_coef=0.1),
}
ALL = OBJECTIVES | THREE
ONE_BY_ONE = Batching(True, MicroLimit(1), MicroLimit(2))
SHARING = Batching(True, MicroLimit(2), MicroLimit(2), share_prompts=True)  # groups of three are cut

AS_THEY_ARE = Shard()


@dataclass(frozen=True)
class Form:
    """How ranks share a model."""

    world: int = 2
    shard_size: int = -1
    shard: Shard = AS_THEY_ARE

    def join(self) -> Parallel:
        return Parallel.join("cpu", shard_size=self.shard_size)


FORMS = {
    "full": Form(),
    "hybrid": Form(world=4, shard_size=2),
    "a copy each": Form(shard_size=1),
    "whole until backward": Form(shard=Shard(reshard=False)),
    "offloaded": Form(shard=Shard(offload=True)),
}
MODELS = {
    "text, tied": partial(qwen2, tied=True),
    "pictures": qwen25_vl,
    "pictures, tower frozen": qwen25_vl,
}


def samples_for(name: str) -> list:
    """Text; or one prompt with pictures, so that most micro-batches have none, and rounds too. Some share prompts."""
    return off_policy_samples() if name == "text, tied" else off_policy(with_siblings(picture_samples((0, 0, 2, 0, 0))))


def build(name: str, parallel: Parallel | None = None, shard: Shard | None = None, *, exact: bool = True) -> Learner:
    """A learner with a reference; in float64 if it is to be `exact`. Ranks share prompts, one process does not."""
    patches.undo()  # another learner of this case may have been exact
    models = [reads_pack(MODELS[name](seed)) for seed in (0, 1)]
    for model in models:
        if exact:
            in_float64(model, patches)
        if name.endswith("frozen"):
            model.model.visual.requires_grad_(False)
        if parallel is not None:
            shard_model(model, find_blocks(model), parallel.mesh, shard or Shard())
    optimizer = build_optimizer(models[0].named_parameters(), lr=1e-2)
    batching = ONE_BY_ONE if parallel is None else SHARING
    return Learner(
        models[0], optimizer, lambda step: 1.0, reference=models[1], batching=batching, max_grad_norm=0.5,
        parallel=parallel, fillers=picture_samples((1,), seed=9) if name == "pictures" else (),
        device=torch.device("cpu"),
    )  # fmt: skip


@dataclass
class Course:
    """What a learner went through: metrics and gradients of each step, and the weights at the end."""

    metrics: list[dict[str, float]]
    gradients: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]


def take_steps(learner: Learner, name: str, objectives: Sequence[str]) -> Course:
    """One step of each objective."""
    course = Course([], [], {})
    for objective in objectives:
        metrics = learner.forward_backward(samples_for(name), ALL[objective])
        trained = [(key, param) for key, param in learner.model.named_parameters() if param.grad is not None]
        course.gradients.append({key: full_tensor(param.grad).clone() for key, param in trained})
        course.metrics.append(metrics | learner.optim_step())
    course.weights = {key: tensor.clone() for key, tensor in learner.weights()}
    return course


def courses(name: str, triples: Sequence[Sequence[str]], form: Form | None = None) -> list[Course]:
    """Three steps from the first weights for each of the triples of objectives; the first rank brings tensors back."""
    parallel = None if form is None else form.join()
    found = [take_steps(build(name, parallel, form and form.shard), name, triple) for triple in triples]
    if parallel is not None and parallel.rank > 0:
        return [Course(course.metrics, [], {}) for course in found]
    return found


# --- cases ----------------------------------------------------------------------------------------------------------


def half_precision(name: str) -> dict[str, Any]:
    """A step in bfloat16 over float32 weights."""
    parallel = Parallel.join("cpu")
    learner = build(name, parallel, Shard(torch.bfloat16, torch.float32), exact=False)
    samples = samples_for(name)
    logprobs = [sample.old_logprobs for sample in learner.add_logprobs(samples, ["old_logprobs"])]
    metrics = learner.forward_backward(samples, THREE["KL term"])
    gradients = {key: param.grad for key, param in learner.model.named_parameters() if param.grad is not None}
    dtypes = {str(tensor.dtype) for tensor in gradients.values()} | {str(t.dtype) for _, t in learner.weights()}
    return metrics | learner.optim_step() | {"dtypes": dtypes, "logprobs": torch.cat(logprobs)}


def every_gradient() -> dict[tuple[str, str], tuple[dict[str, float], dict[str, torch.Tensor]]]:
    """Metrics and gradients of every objective, by cut and objective."""
    learner = policy_learner(patches, Parallel.join("cpu"))
    found = {}
    for cut, batching in CUTS_FOR_RANKS.items():
        for name, objective in OBJECTIVES.items():
            metrics, grads = outcome(learner, objective, batching)
            found[cut, name] = metrics, {key: full_tensor(grad) for key, grad in grads.items()}
    return found


# --- checkpoints ----------------------------------------------------------------------------------------------------


def on_policy_step(learner: Learner, name: str) -> dict[str, float]:
    """A step with old log-probs and full KL of its own."""
    own = text_samples(((3, 4), (9, 9), (2, 6), (4, 3))) if name == "text, tied" else picture_samples((0, 0, 2, 0, 0))
    samples = learner.add_logprobs(learner.add_logprobs(own, ["old_logprobs", "full_kl"]), ["ref_logprobs"])
    samples = assign(samples, Reinforce(whiten=False), kl_penalty="full", kl_coef=0.1)
    metrics = learner.forward_backward(samples, [*THREE.values()][learner.step % 3])
    return {**metrics, **learner.optim_step()}


def train_and_save(name: str, folder: Path, form: Form | None = None) -> None:
    """Three steps, each saved as `after…`; with a form also one from the checkpoint `single1`, as `resumed`."""
    parallel = None if form is None else form.join()
    learner = build(name, parallel, form and form.shard)
    for i in (1, 2, 3):
        on_policy_step(learner, name)
        learner.save(folder / (f"single{i}" if form is None else f"after{i}"))
    if form is None:
        return
    _check_zeroed_weights(learner, "model.norm.weight" if name == "text, tied" else "model.language_model.norm.weight")
    resumed = build(name, parallel, form.shard)
    resumed.load(folder / "single1")
    on_policy_step(resumed, name)
    resumed.add_logprobs(samples_for(name))  # a forward without backward must leave nothing unsharded behind
    resumed.save(folder / "resumed")


def _check_zeroed_weights(learner: Learner, tensor: str) -> None:
    """Setting a tensor to zero changes that one alone, and is undone to the bit."""
    before = {n: t.clone() for n, t in learner.weights()}
    assert before.keys() == {n for n, _ in learner.model.named_parameters()}
    learner.zero_weights({tensor: None})
    assert [n for n, t in learner.weights() if not t.equal(before[n])] == [tensor]
    learner.restore_weights()
    assert all(t.equal(before[n]) for n, t in learner.weights())


def one_pass(name: str) -> None:
    """The old log-probs and the gradient of one forward pass are those of two."""
    learner = build(name, Parallel.join("cpu"))
    samples = [replace(sample, old_logprobs=None) for sample in samples_for(name)]
    outcomes = []
    for once in (True, False):
        if once:
            annotated, metrics = learner.forward_backward_on_policy(samples, THREE["KL term"])
        else:
            annotated = learner.add_logprobs(samples, ["old_logprobs"])
            metrics = learner.forward_backward(annotated, THREE["KL term"])
        grads = {n: p.grad.to_local().clone() for n, p in learner.model.named_parameters()}
        learner.optimizer.zero_grad()
        outcomes.append((torch.cat([s.old_logprobs for s in annotated]), metrics, grads))
    (one, metrics, grads), (two, expected, wanted) = outcomes
    torch.testing.assert_close(one, two, atol=1e-6, rtol=0)
    assert metrics == pytest.approx(expected, abs=1e-6)
    for key, grad in grads.items():
        torch.testing.assert_close(grad, wanted[key], atol=1e-6, rtol=0, msg=key)


def offloaded_steps(shard_size: int) -> tuple[tuple[int, ...], list[float], list[float]]:
    """Two steps with the states away between them, and without; return the bytes that were there meanwhile, too."""
    parallel, lines = Parallel.join("cpu", shard_size=shard_size), []
    away: tuple[int, ...] = ()
    for offload in (Offload(), Offload(weights=True, optimizer=True, reference=True)):
        models = [qwen2(0, tied=True), qwen2(1)]
        for model in models:
            shard_model(model, find_blocks(model), parallel.mesh)
        optimizer = build_optimizer(models[0].named_parameters(), lr=1e-2)
        learner = Learner(
            models[0], optimizer, lambda step: 1.0, reference=models[1], parallel=parallel, offload=offload
        )
        line = []
        for _ in range(2):
            samples = assign(learner.add_logprobs(text_samples()), Reinforce())
            line += learner.forward_backward(samples, Objective(kl_penalty="low_var_kl", kl_coef=0.1)).values()
            line += learner.optim_step().values()
            line += [tensor.double().sum().item() for _, tensor in learner.weights()]
            learner.offload()
            states = tensors_of(models[0]), states_of(optimizer), tensors_of(models[1])
            away = tuple(bytes_on_device(one) for one in states)
        lines.append(line)
    return away, *lines
