"""Where the packages' types meet: prompts, completions and scores become the learner's samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from r1_core.types import Sample
from r1_data.types import Prompt
from r1_rewards.types import RewardInput, Score
from r1_rollout.types import Completion


class Decoder(Protocol):
    """The part of a tokenizer that turns answers back into text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt with its sampled answers and their scores, all in sampling order."""

    prompt: Prompt
    completions: list[Completion]
    responses: list[str]  # decoded completions
    scores: list[Score]
    baseline: float | None = None  # the score of the prompt's greedy answer, where one was sampled


def decode(completions: Sequence[Completion], tokenizer: Decoder, *, skip_special_tokens: bool = True) -> list[str]:
    """Return the text of each completion."""
    return [tokenizer.decode(c.token_ids, skip_special_tokens=skip_special_tokens) for c in completions]


def reward_inputs(prompt: Prompt, completions: Sequence[Completion], responses: Sequence[str]) -> list[RewardInput]:
    """Return what the verifier sees of each answer; columns that JSON cannot carry to a worker process stay behind."""
    metadata = {name: value for name, value in prompt.metadata.items() if is_json(value)}
    return [
        RewardInput(
            response=response,
            ground_truth=prompt.answer,
            response_length=len(completion.token_ids),
            prompt=prompt.text,
            metadata=metadata,
        )
        for completion, response in zip(completions, responses, strict=True)
    ]


def is_json(value: Any) -> bool:
    """Whether a column's value can be written as JSON; bytes and dates cannot."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_json(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_json, value))
    return value is None or isinstance(value, str | int | float | bool)


def extend_positions(position_ids: Tensor, length: int) -> Tensor:
    """Continue a prompt's positions over `length` answer tokens.

    Args:
        position_ids: int64 [axes, P]. The first axis counts tokens; the rotary axes of M-RoPE (arXiv 2409.12191,
            section 2.1) go on from the largest position that any of them has reached.

    Returns:
        int64 [axes, P + length].
    """
    starts = position_ids[:1].max() + 1
    if len(position_ids) > 1:
        rotary = (position_ids[1:].max() + 1).expand(len(position_ids) - 1)
        starts = torch.cat([starts[None], rotary])
    answer = starts.reshape(-1, 1) + torch.arange(length)
    return torch.cat([position_ids, answer], dim=1)


def to_samples(groups: Sequence[Group]) -> list[Sample]:
    """Return one sample per completion, group after group; `group_id` is the group's place in `groups`."""
    return [
        _to_sample(group.prompt, completion, score.value, group_id)
        for group_id, group in enumerate(groups)
        for completion, score in zip(group.completions, group.scores, strict=True)
    ]


def baselines(groups: Sequence[Group]) -> list[float] | None:
    """Return each sample's baseline, in the order of `to_samples`; None where none were sampled."""
    found = [group.baseline for group in groups for _ in group.completions if group.baseline is not None]
    return found or None


def _to_sample(prompt: Prompt, completion: Completion, reward: float, group_id: int) -> Sample:
    start, length = len(prompt.token_ids), len(completion.token_ids)
    return Sample(
        token_ids=torch.tensor(prompt.token_ids + completion.token_ids),
        loss_mask=torch.arange(start + length) >= start,
        position_ids=extend_positions(prompt.position_ids, length),
        group_id=group_id,
        reward=reward,
        model_inputs=prompt.model_inputs,
        rollout_logprobs=torch.cat([torch.zeros(start), torch.tensor(completion.logprobs)]),
    )
