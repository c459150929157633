"""DPO on a model's own answers, right against wrong, on the parts that `r1_cli.open` assembles.

    uv run python examples/one_file_dpo.py            # 12 steps, about half a minute on two CPU cores

The loss (arXiv 2305.18290) is of log-probs against the first model's; `weigh` gives its gradient as advantages.
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
from r1_core.preference import OBJECTIVE, PreferenceLoss, weigh

SETTINGS = ["examples/quickstart/config.yaml", "algorithm.disable_kl=false"]  # so that there is a reference
SHOWN = 100  # prompts on which accuracy is measured
LOSS = PreferenceLoss("dpo", beta=0.1)


def accuracy(parts: Parts) -> float:
    """Return the share of right answers to the first validation prompts."""
    groups = parts.sample([parts.val_prompts[row] for row in range(SHOWN)], n=1, seed=0)
    return fmean(group.responses[0].score.parts["accuracy"] for group in groups)


def train(parts: Parts, steps: int, chosen: float = 1.0) -> Iterator[dict[str, float]]:
    """Sample, pair answers of each prompt, prefer those of accuracy `chosen` to the others; yield a step's metrics."""
    for step in range(steps):
        pairs = []
        for group in parts.sample([parts.prompts[row] for row in parts.stream.batch(step)], seed=step + 1):
            ends = {one.score.parts["accuracy"]: one for one in group.responses}
            if len(ends) == 2:
                pairs.append(replace(group, responses=[ends[chosen], ends[1 - chosen]]))
        if pairs:
            samples, metrics = weigh(parts.learner.add_logprobs(to_samples(pairs), LOSS.needs), LOSS)
            parts.learner.forward_backward(samples, OBJECTIVE)
            yield {"pairs": len(pairs), **metrics, **parts.learner.optim_step()}


def main() -> None:
    """Train, a line a step."""
    parser = argparse.ArgumentParser(description="DPO in one file.")
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # so small a model is no faster with more
    with r1_cli.open(load_config(SETTINGS)[0]) as parts:
        print(f"accuracy {accuracy(parts):.2f}")
        for step, metrics in enumerate(train(parts, arguments.steps), 1):
            print(f"step {step}  " + "  ".join(f"{name} {metrics[name]:.3g}" for name in ("pairs", "rewards/margins")))
        print(f"accuracy {accuracy(parts):.2f}")


if __name__ == "__main__":
    main()
