"""GRPO from first line to last: a small vision-language model learns to count shapes, on r1's four leaf packages.

    uv run python examples/one_file.py                # 60 steps, a minute or two on two CPU cores

What `r1 train` adds to this is what a run needs and the algorithm does not: configuration, dynamic sampling, proof that
the engine has the learner's weights, validation, checkpoints, resumption, logs. One step of it, read in this order:

    sample      n responses to each prompt, with the log-prob of every token          r1_data, r1_rollout
    reward      a number for each response                                            r1_rewards
    advantage   each response against the others of its group       `grpo_advantages`
    loss        PPO's clipped surrogate, token by token             `ClippedLoss`
    update      gradient, clip, AdamW; the engine gets the new weights                    r1_core
"""

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.utils.logging import disable_progress_bar

from r1_core import Batching, Learner, LossInputs, MicroLimit, Objective, Sample, build_optimizer
from r1_data import Prompt, PromptDataset, Renderer, Stream, read_rows
from r1_rewards import RewardInput, load
from r1_rollout import EmbeddedEngine, SamplingParams
from r1_rollout.types import Completion
from r1_rollout.weights import LocalWeights

HERE = Path(__file__).resolve().parent / "quickstart"
PROMPTS, RESPONSES = 16, 8  # prompts a step; responses to each, which are a group
CLIP_LOW, CLIP_HIGH = 0.2, 0.3  # how far a token's probability may move before its gradient stops: 0.8 to 1.3 times


# --- the algorithm ---------------------------------------------------------------------------------------------------


def grpo_advantages(rewards: Tensor) -> Tensor:
    """Return how much better each response is than its group's mean, in standard deviations of the group.

    arXiv 2402.03300 (DeepSeekMath). Where all are equally good there is nothing to learn: zero.

    Args:
        rewards: float [groups, responses].

    Returns:
        float [groups, responses].
    """
    distance = rewards - rewards.mean(dim=1, keepdim=True)
    return distance / (rewards.std(dim=1, keepdim=True) + 1e-6)


class ClippedLoss:
    """max(−A·ratio, −A·clip(ratio)) of each token, with ratio = π(token) / π_old(token).

    arXiv 1707.06347 (PPO), with the higher upper bound of arXiv 2503.14476 (DAPO). `Objective` takes the mean
    over all tokens of the step. There is no KL term, and so no reference model.
    """

    needs = ()  # nothing of all samples before the first gradient
    token_wise = True  # a token's loss depends on no other token

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return losses [rows, tokens]; what the tensors hold where `loss_mask` is false has no meaning."""
        log_ratio = torch.where(inputs.loss_mask, inputs.logprobs - inputs.old_logprobs, 0.0)
        advantages = torch.where(inputs.loss_mask, inputs.advantages, 0.0)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        return torch.maximum(-advantages * ratio, -advantages * clipped), {}


@dataclass(frozen=True, slots=True)
class Trainer:
    """What a step needs: prompts, engine, reward, learner."""

    dataset: PromptDataset
    stream: Stream
    engine: EmbeddedEngine
    decode: Callable[[Sequence[int]], str]
    judge: Callable[[list[RewardInput]], list[float]]
    learner: Learner

    def step(self, number: int) -> dict[str, float]:
        """Sample, judge, compare, update; return what happened. Steps count from 0."""
        prompts = [self.dataset[row] for row in self.stream.batch(number)]

        with self.engine.active(LocalWeights(self.learner.weights(), version=number)):
            sampling = SamplingParams(max_tokens=20, n=RESPONSES, temperature=1.0, seed=number)
            groups = dict(self.engine.generate(prompts, sampling))
        pairs = [(index, completion) for index in range(len(prompts)) for completion in groups[index]]

        asked = [
            RewardInput(self.decode(completion.token_ids), prompts[index].ground_truth) for index, completion in pairs
        ]
        rewards = torch.tensor(self.judge(asked), dtype=torch.float64).reshape(len(prompts), RESPONSES)

        samples = [to_sample(prompts[index], completion, group=index) for index, completion in pairs]
        samples = self.learner.add_logprobs(samples, {"old_logprobs"})  # the learner's own log-probs
        advantages = grpo_advantages(rewards).flatten().tolist()
        samples = [
            replace(sample, advantages=sample.loss_mask * advantage)  # the same for every token of a response
            for sample, advantage in zip(samples, advantages, strict=True)
        ]

        self.learner.forward_backward(samples, Objective(ClippedLoss()))
        update = self.learner.optim_step()
        return {
            "reward": float(rewards.mean()),
            "groups that teach": float((rewards.std(dim=1) > 0).float().mean()),
            "tokens": fmean(len(completion.token_ids) for _, completion in pairs),
            "grad_norm": update["grad_norm"],
        }


def to_sample(prompt: Prompt, completion: Completion, group: int) -> Sample:
    """Return prompt and response as one row of tokens, of which the response's are trained."""
    start, length = len(prompt.token_ids), len(completion.token_ids)
    return Sample(
        token_ids=torch.tensor([*prompt.token_ids, *completion.token_ids]),
        loss_mask=torch.arange(start + length) >= start,
        position_ids=continue_positions(prompt.position_ids, length),
        group_id=group,
        reward=0.0,  # only r1_core's own estimators look here
        model_inputs=prompt.model_inputs,  # the picture
    )


# --- the parts -------------------------------------------------------------------------------------------------------


def continue_positions(positions: Tensor, length: int) -> Tensor:
    """Continue a prompt's positions, int64 [axes, P], over a response. One axis counts tokens, the rest rotate."""
    first = torch.cat([positions[:1].max()[None], positions[1:].max().expand(len(positions) - 1)]) + 1
    return torch.cat([positions, first[:, None] + torch.arange(length)], dim=1)


@contextmanager
def open_trainer(prompts: int = PROMPTS, learning_rate: float = 1e-4) -> Iterator[Trainer]:
    """Give a trainer of the quickstart's model; its reward processes end with the block."""
    processor = AutoProcessor.from_pretrained(HERE / "model")
    policy = AutoModelForImageTextToText.from_pretrained(HERE / "model", dtype=torch.float32)

    renderer = Renderer(processor, min_pixels=3136, max_pixels=50176)
    dataset = PromptDataset(read_rows(str(HERE / "train.parquet")), renderer, max_prompt_length=64)
    engine = EmbeddedEngine(
        copy.deepcopy(policy),
        end_token_ids={processor.tokenizer.eos_token_id},
        banned_token_ids={policy.config.image_token_id, policy.config.video_token_id},
    )
    optimizer = build_optimizer(policy.named_parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    learner = Learner(
        policy,
        optimizer,
        lambda step: min(1.0, (step + 1) / 5),  # five steps of warm-up
        batching=Batching(padding_free=False, update=MicroLimit(32), experience=MicroLimit(64)),
    )
    with load(f"{HERE / 'reward.py'}:compute_score") as verifier:
        yield Trainer(
            dataset,
            Stream(len(dataset), prompts, seed=1, shuffle=True),
            engine,
            lambda token_ids: processor.tokenizer.decode(token_ids, skip_special_tokens=True),
            lambda inputs: [score.value for score in verifier(inputs)],
            learner,
        )


def main() -> None:
    """Train, a line a step."""
    parser = argparse.ArgumentParser(description="GRPO in one file.")
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    disable_progress_bar()
    with open_trainer() as trainer:
        for number in range(steps):
            record = trainer.step(number)
            print(f"step {number + 1}  " + "  ".join(f"{name} {value:.3g}" for name, value in record.items()))


if __name__ == "__main__":
    main()
