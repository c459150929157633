"""Distillation on policy on the parts that `r1_cli.open` assembles: the model answers, a better one judges each token.

    uv run python examples/one_file_sft.py --save teacher
    uv run python examples/one_file_distillation.py teacher  # 12 steps, about half a minute on two CPU cores

What is trained is KL(policy, teacher) over the vocabulary at sampled tokens (arXiv 2306.13649), without a reward.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

import torch

import r1_cli
from r1_cli.config import load_config
from r1_cli.jobs.own_loop import Parts
from r1_cli.train.groups.group import to_samples
from r1_core import Objective
from r1_core.losses.gradient import PolicyGradient

SETTINGS = ["examples/quickstart/config.yaml", "algorithm.distillation.form=loss", "worker.rollout.n=1"]
SIZE = ["data.rollout_batch_size=48", "worker.actor.global_batch_size=48"]  # prompts of a step
SHOWN = 100  # prompts on which accuracy is measured
OBJECTIVE = Objective(PolicyGradient(), divergence="reverse_kl")


def accuracy(parts: Parts) -> float:
    """Return the share of right answers to the first validation prompts."""
    groups = parts.sample([parts.val_prompts[row] for row in range(SHOWN)], seed=0)
    return fmean(group.responses[0].score.parts["accuracy"] for group in groups)


def train(parts: Parts, steps: int) -> Iterator[dict[str, float]]:
    """Sample an answer to each prompt, and move its tokens' distributions to the teacher's; yield metrics."""
    for step in range(steps):
        groups = parts.sample([parts.prompts[row] for row in parts.stream.batch(step)], seed=step + 1)
        samples = [replace(one, advantages=torch.zeros(one.loss_mask.shape)) for one in to_samples(groups)]
        _, metrics = parts.learner.forward_backward_on_policy(samples, OBJECTIVE)
        yield {"kl": metrics["distillation_loss"], **metrics, **parts.learner.optim_step()}


def main() -> None:
    """Train, a line a step."""
    parser = argparse.ArgumentParser(description="Distillation on policy in one file.")
    parser.add_argument("teacher", help="folder of a model with the quickstart's tokenizer")
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # so small a model is no faster with more
    config, _ = load_config([*SETTINGS, *SIZE, f"worker.teacher.model.model_path={arguments.teacher}"])
    with r1_cli.open(config) as parts:
        print(f"accuracy {accuracy(parts):.2f}")
        for step, metrics in enumerate(train(parts, arguments.steps), 1):
            print(f"step {step}  kl {metrics['kl']:.3f}  grad_norm {metrics['grad_norm']:.3g}")
        print(f"accuracy {accuracy(parts):.2f}")


if __name__ == "__main__":
    main()
