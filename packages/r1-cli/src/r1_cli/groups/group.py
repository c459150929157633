"""Where the packages' types meet: prompts, completions and scores become the learner's samples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from r1_cli.groups.columns import is_json, json_columns
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
    rewards: list[float]  # what an estimator sees: the scores' values, and what was done to them
    baseline: float | None = None  # the reward of the prompt's greedy answer, where one was sampled
    dropped: tuple[Score, ...] = ()  # of answers that could not be scored and have left the group

    @property
    def data_source(self) -> str:
        """What the row's results are reported under."""
        return str(self.prompt.metadata.get("data_source", self.prompt.source))


def drop_failures(group: Group) -> Group:
    """Return the group without the answers that the failure policy wants left out."""
    kept = [place for place, score in enumerate(group.scores) if score.keep]
    if len(kept) == len(group.scores):
        return group
    return replace(
        group,
        completions=[group.completions[place] for place in kept],
        responses=[group.responses[place] for place in kept],
        scores=[group.scores[place] for place in kept],
        rewards=[group.rewards[place] for place in kept],
        dropped=tuple(score for score in group.scores if not score.keep),
    )


def decode(completions: Sequence[Completion], tokenizer: Decoder, *, skip_special_tokens: bool = True) -> list[str]:
    """Return the text of each completion."""
    return [tokenizer.decode(c.token_ids.tolist(), skip_special_tokens=skip_special_tokens) for c in completions]


def reward_inputs(prompt: Prompt, completions: Sequence[Completion], responses: Sequence[str]) -> list[RewardInput]:
    """Return what the verifier sees of each answer; columns that JSON cannot carry to a worker process stay behind."""
    metadata = json_columns(prompt.metadata)
    return [
        RewardInput(
            response=response,
            ground_truth=prompt.ground_truth,
            response_length=len(completion.token_ids),
            prompt=prompt.text,
            metadata=metadata,
            messages=prompt.messages if is_json(prompt.messages) else (),
            images=prompt.images,
            step=completion.weight_version,
            source=prompt.source,
        )
        for completion, response in zip(completions, responses, strict=True)
    ]


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
        _to_sample(group.prompt, completion, reward, group_id)
        for group_id, group in enumerate(groups)
        for completion, reward in zip(group.completions, group.rewards, strict=True)
    ]


def baselines(groups: Sequence[Group]) -> list[float] | None:
    """Return each sample's baseline, in the order of `to_samples`; None where none were sampled."""
    found = [group.baseline for group in groups for _ in group.completions if group.baseline is not None]
    return found or None


def part_rewards(groups: Sequence[Group]) -> list[dict[str, float]]:
    """Return the parts of each sample's score, in the order of `to_samples`, all under the same names.

    The value of the score stands for a part that it lacks, as one of an answer that could not be scored does.
    """
    scores = [score for group in groups for score in group.scores]
    names = sorted({name for score in scores for name in score.parts} - {"overall"})
    return [{name: score.parts.get(name, score.value) for name in names} for score in scores]


def _to_sample(prompt: Prompt, completion: Completion, reward: float, group_id: int) -> Sample:
    start, length = len(prompt.token_ids), len(completion.token_ids)
    return Sample(
        token_ids=torch.cat([torch.tensor(prompt.token_ids), torch.from_numpy(completion.token_ids).long()]),
        loss_mask=torch.arange(start + length) >= start,
        position_ids=extend_positions(prompt.position_ids, length),
        group_id=group_id,
        reward=reward,
        model_inputs=prompt.model_inputs,
        rollout_logprobs=torch.cat([torch.zeros(start), torch.from_numpy(completion.logprobs)]),
    )
