"""One of two gloo ranks: takes steps under FSDP2, saves after each, then steps from a single process's checkpoint.

Arguments: rank and a folder; for each model it writes to `<folder>/<model>` and finds the checkpoint `single1` there.
"""

import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import two_ranks
from core_models import in_float64, picture_samples, qwen2, qwen25_vl, text_samples

from r1_core.advantages import Reinforce, assign
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.optim import build_optimizer
from r1_core.learner.parallel import shard_model
from r1_core.losses import GSPO
from r1_core.objective import Objective

MODELS = {
    "qwen2": (lambda seed: qwen2(seed, tied=True), lambda: text_samples(((3, 4), (9, 9), (2, 6), (4, 3)))),
    # One picture in all, so that most micro-batches of both ranks have none.
    "qwen2.5-vl": (qwen25_vl, lambda: picture_samples((0, 0, 2, 0, 0))),
}


def learner_for(name, parallel=None):
    patch = pytest.MonkeyPatch()
    models = [in_float64(MODELS[name][0](seed), patch) for seed in (0, 1)]
    if parallel is not None:
        for model in models:
            body = model.model
            blocks = body.layers if name == "qwen2" else [*body.language_model.layers, *body.visual.blocks]
            shard_model(model, blocks, parallel.mesh)
    optimizer = build_optimizer(models[0].named_parameters(), lr=1e-2)
    batching = Batching(True, MicroLimit(1), MicroLimit(2))
    return Learner(
        models[0], optimizer, lambda step: 1.0, reference=models[1], batching=batching, max_grad_norm=0.5,
        parallel=parallel,
    )  # fmt: skip


# One whose gradient is taken going forward, one that sees whole sequences, for which logits are computed again, and one
# that computes the reference's logits, too.
OBJECTIVES = (
    Objective(kl_penalty="low_var_kl", kl_coef=0.1),
    Objective(GSPO(), "seq", entropy_coef=0.01),
    Objective(kl_penalty="full", kl_coef=0.1),
)


def step(learner, name):
    samples = learner.annotate(MODELS[name][1](), ["old_logprobs", "full_kl"])
    samples = assign(
        learner.annotate(samples, ["ref_logprobs"]), Reinforce(whiten=False), kl_penalty="full", kl_coef=0.1
    )
    metrics = learner.forward_backward(samples, OBJECTIVES[learner.step % 3])
    return {**metrics, **learner.optim_step()}


def assert_one_pass_is_enough(learner, name):
    """The old log-probs and the gradient of one forward pass are those of two."""
    samples = assign(learner.annotate(MODELS[name][1](), ["ref_logprobs"]), Reinforce(whiten=False))
    outcomes = []
    for once in (True, False):
        if once:
            annotated, metrics = learner.forward_backward_on_policy(samples, OBJECTIVES[0])
        else:
            annotated = learner.annotate(samples, ["old_logprobs"])
            metrics = learner.forward_backward(annotated, OBJECTIVES[0])
        grads = {n: p.grad.to_local().clone() for n, p in learner.model.named_parameters()}
        learner.optimizer.zero_grad()
        outcomes.append((torch.cat([s.old_logprobs for s in annotated]), metrics, grads))
    (one, metrics, grads), (two, expected, wanted) = outcomes
    torch.testing.assert_close(one, two, atol=1e-6, rtol=0)
    assert metrics == pytest.approx(expected, abs=1e-6)
    for key, grad in grads.items():
        torch.testing.assert_close(grad, wanted[key], atol=1e-6, rtol=0, msg=key)


def run(name, parallel, folder):
    learner = learner_for(name, parallel)
    assert_one_pass_is_enough(learner, name)
    for i in (1, 2, 3):
        step(learner, name)
        learner.save(folder / f"after{i}")
    assert {n for n, _ in learner.weights()} == {n for n, _ in learner.model.named_parameters()}
    whole_weights = {n: t.clone() for n, t in learner.weights()}
    learner.ablate({"model.norm.weight" if name == "qwen2" else "model.language_model.norm.weight": None})
    zeros = [n for n, t in learner.weights() if not t.any() and whole_weights[n].any()]
    assert [n.rpartition("norm")[2] for n in zeros] == [".weight"]
    learner.restore()
    assert all(t.equal(whole_weights[n]) for n, t in learner.weights())
    resumed = learner_for(name, parallel)
    resumed.load(folder / "single1")
    step(resumed, name)
    resumed.annotate(MODELS[name][1]())  # a forward without backward must leave nothing unsharded behind
    resumed.save(folder / "resumed")


def main(rank, folder):
    warnings.filterwarnings("error", message=".*returned a view")
    parallel = two_ranks.join(rank, folder)
    for name in MODELS:
        run(name, parallel, Path(folder) / name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
