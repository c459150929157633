"""Fine-tuning on a model's own right answers (rejection sampling), on the parts that `r1_cli.open` assembles.

    uv run python examples/one_file_sft.py --save FOLDER     # 12 steps, about half a minute on two CPU cores

DeepSeek-R1 (arXiv 2501.12948) uses this between its stages. What is trained is −log pi of the tokens of right answers.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

import torch

import r1_cli
from r1_cli.jobs.own_loop import Parts
from r1_cli.train.groups.group import to_samples
from r1_core import Objective
from r1_core.losses.nll import NLL

CONFIG = "examples/quickstart/config.yaml"
SHOWN = 100  # prompts on which accuracy is measured


def accuracy(parts: Parts) -> float:
    """Return the share of right answers to the first validation prompts."""
    groups = parts.sample([parts.val_prompts[row] for row in range(SHOWN)], n=1, seed=0)
    return fmean(group.responses[0].score.parts["accuracy"] for group in groups)


def train(parts: Parts, steps: int, least: float = 1.0) -> Iterator[dict[str, float]]:
    """Sample, fine-tune on one answer a prompt whose accuracy is at least `least`; yield each step's metrics."""
    for step in range(steps):
        groups = parts.sample([parts.prompts[row] for row in parts.stream.batch(step)], seed=step + 1)
        right = [(group, [one for one in group.responses if one.score.parts["accuracy"] >= least]) for group in groups]
        chosen = [replace(group, responses=responses[:1]) for group, responses in right if responses]
        samples = [replace(one, advantages=one.loss_mask.float()) for one in to_samples(chosen)]  # weights: 1
        if samples:
            _, metrics = parts.learner.forward_backward_on_policy(samples, Objective(NLL()))
            yield {"chosen": len(chosen), **metrics, **parts.learner.optim_step()}


def main() -> None:
    """Train, a line a step."""
    parser = argparse.ArgumentParser(description="Rejection sampling and fine-tuning in one file.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save", metavar="FOLDER", help="of the trained model, for Hugging Face's from_pretrained")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # so small a model is no faster with more
    with r1_cli.open(CONFIG) as parts:
        print(f"accuracy {accuracy(parts):.2f}")
        for step, metrics in enumerate(train(parts, arguments.steps), 1):
            print(f"step {step}  chosen {metrics['chosen']}  nll {metrics['nll']:.3g}")
        print(f"accuracy {accuracy(parts):.2f}")
        if arguments.save:
            parts.save(arguments.save)


if __name__ == "__main__":
    main()
