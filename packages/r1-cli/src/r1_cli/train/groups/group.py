"""Groups: a prompt with its scored responses, and the samples that the learner trains on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from r1_core.filtering import GroupFilter
from r1_core.types import Sample
from r1_data.positions import append_positions
from r1_data.types import Prompt, is_json, json_columns
from r1_rewards.types import RewardInput, Score
from r1_rollout.routing import fill_up
from r1_rollout.types import Completion, PromptLike

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from r1_cli.train.groups.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Response:
    """One scored completion. Example: `Response(Completion([51, 2], …), "3", Score(1.0), reward=0.9)`."""

    completion: Completion
    text: str  # the completion, decoded; of an episode everything behind the prompt
    score: Score
    reward: float  # the shaped value of the score, which the estimator sees


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt with its scored responses."""

    prompt: Prompt
    responses: Sequence[Response]
    baseline: float | None = None  # reward of the prompt's greedy response, if one was sampled
    dropped: tuple[Score, ...] = ()  # scores of dropped responses, which failed
    truth_problem: str | None = None  # why no response can be correct, if known
    row: int = -1  # of the data set, to render the prompt again after a resume

    @property
    def episodes(self) -> "list[Trajectory]":
        """The responses that are episodes of several turns; none in a single-turn run."""
        return [episode for one in self.responses if (episode := as_episode(one.completion)) is not None]

    @property
    def completions(self) -> list[Completion]:
        return [response.completion for response in self.responses]

    @property
    def scores(self) -> list[Score]:
        return [response.score for response in self.responses]

    @property
    def rewards(self) -> list[float]:
        return [response.reward for response in self.responses]

    @property
    def version(self) -> int:
        return self.responses[0].completion.weight_version

    @property
    def data_source(self) -> str:
        return str(self.prompt.metadata.get("data_source", self.prompt.source))

    def with_rewards(self, rewards: Sequence[float]) -> "Group":
        pairs = zip(self.responses, rewards, strict=True)
        return replace(self, responses=[replace(response, reward=reward) for response, reward in pairs])

    def without_failures(self) -> "Group":
        kept = [response for response in self.responses if response.score.keep]
        if len(kept) == len(self.responses):
            return self
        return replace(self, responses=kept, dropped=tuple(score for score in self.scores if not score.keep))


def paths_of(completion: Completion) -> Sequence[Completion]:
    """Return what is trained of a response: itself, or the paths of an episode, in the order of `to_samples`."""
    episode = as_episode(completion)
    return (completion,) if episode is None else episode.paths


def as_episode(completion: Completion | None) -> "Trajectory | None":
    """Return the completion if it is an episode, without importing what episodes need."""
    return None if completion is None or type(completion) is Completion else cast("Trajectory", completion)


# --- inputs of verifiers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SampledInput(RewardInput):
    """One response to score, with token ids for verifiers in this process."""

    rendered: Prompt | None = None
    completion: Completion | None = None


def to_reward_inputs(
    prompt: Prompt,
    completions: Sequence[Completion],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    skip_special_tokens: bool = True,
) -> list[RewardInput]:
    """Return the verifier's input for each completion, without columns that JSON cannot hold.

    Of an episode the response is the last turn; the turns before it are messages.
    """
    metadata = json_columns(prompt.metadata)
    inputs: list[RewardInput] = [
        SampledInput(
            response=tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=skip_special_tokens),
            ground_truth=prompt.ground_truth,
            response_length=len(completion.token_ids),
            prompt=prompt.text,
            metadata=metadata,
            messages=prompt.messages if is_json(prompt.messages) else (),
            images=prompt.images,
            step=completion.weight_version,
            source=prompt.source,
            rendered=prompt,
            completion=completion,
        )
        for completion in completions
    ]
    if completions and as_episode(completions[0]):
        episodes = map(as_episode, completions)
        inputs = [one.reward_input(plain) for one, plain in zip(episodes, inputs, strict=True) if one]
    return inputs


# --- inputs of filters ------------------------------------------------------------------------------------------------


def filter_values(groups: Sequence[Group], key: str) -> list[list[float]]:
    """Return each response's value for the filter: the reward, or the part `key` of its score if it exists."""
    if key == "overall":
        return [group.rewards for group in groups]
    return [[one.score.parts.get(key, one.reward) for one in group.responses] for group in groups]


def passes(group_filter: GroupFilter, values: Sequence[Sequence[float]]) -> list[bool]:
    kept = group_filter.keep(*by_sample(values)).split([len(group) for group in values])
    return [bool(samples.any()) for samples in kept]


def by_sample(values: Sequence[Sequence[float]]) -> tuple[Tensor, Tensor]:
    """Return the values of all groups and their group indices: float64 [N] and int64 [N]."""
    lengths = torch.tensor([len(group) for group in values], dtype=torch.int64)
    flat = torch.tensor([value for group in values for value in group], dtype=torch.float64)
    return flat, torch.arange(len(values)).repeat_interleave(lengths)


# --- samples of the learner -------------------------------------------------------------------------------------------


def to_samples(groups: Sequence[Group]) -> list[Sample]:
    """Return one sample per response, or per path of an episode, group after group.

    `group_id` is the index in `groups`, and `episode_id` the index of an episode's first sample. If only some have
    recorded experts (an episode may end without an answer), the others' are unknown.
    """
    samples: list[Sample] = []
    for group_id, group in enumerate(groups):
        if episodes := group.episodes:
            for episode, reward in zip(episodes, group.rewards, strict=True):
                samples += episode.to_samples(group.prompt, group_id, reward, episode_id=len(samples))
            continue
        responses = [(one.completion.token_ids, one.completion.logprobs, one.reward) for one in group.responses]
        sampled = _samples_of(group.prompt, responses, group_id)
        samples += map(with_routing, sampled, [one.routed_experts for one in group.completions])
    if any(lacking := [one.routed_experts is None for one in samples]) and not all(lacking):
        other = samples[lacking.index(False)].routed_experts
        assert other is not None
        unknown = fill_up(other[:0].numpy(), max(len(one.token_ids) for one in samples))
        samples = [
            with_routing(one, unknown[: len(one.token_ids)]) if one.routed_experts is None else one for one in samples
        ]
    return samples


def with_routing(sample: Sample, routed: NDArray[Any] | None) -> Sample:
    return sample if routed is None else replace(sample, routed_experts=torch.from_numpy(routed))


def to_sample(prompt: PromptLike, token_ids: Sequence[int] | NDArray[np.int32]) -> Sample:
    (sample,) = _samples_of(prompt, [(token_ids, None, 0.0)], group_id=0)
    return sample


def _samples_of(
    prompt: PromptLike,
    responses: Sequence[tuple[Sequence[int] | NDArray[np.int32], NDArray[np.float32] | None, float]],
    group_id: int,
) -> list[Sample]:
    """Return samples from (tokens, log-probs or None, reward). They share one loss mask and positions."""
    start, longest = len(prompt.token_ids), max((len(token_ids) for token_ids, _, _ in responses), default=0)
    prompt_ids, nothing = np.array(prompt.token_ids, dtype=np.int64), np.zeros(start, dtype=np.float32)
    loss_mask = torch.arange(start + longest) >= start
    position_ids = extend_positions(prompt.position_ids, longest)
    return [
        Sample(
            token_ids=torch.from_numpy(np.concatenate([prompt_ids, np.asarray(token_ids, dtype=np.int64)])),
            loss_mask=loss_mask[: start + len(token_ids)],
            position_ids=position_ids[:, : start + len(token_ids)],
            group_id=group_id,
            reward=reward,
            model_inputs=prompt.model_inputs,
            prompt_length=start,
            rollout_logprobs=None if logprobs is None else torch.from_numpy(np.concatenate([nothing, logprobs])),
        )
        for token_ids, logprobs, reward in responses
    ]


def extend_prompt(prompt: Prompt, token_ids: Sequence[int] | NDArray[np.int32]) -> Prompt:
    more = [int(token) for token in token_ids]
    return replace(
        prompt,
        token_ids=[*prompt.token_ids, *more],
        engine_token_ids=[*prompt.engine_token_ids, *more],
        position_ids=extend_positions(prompt.position_ids, len(token_ids)),
    )


def extend_positions(position_ids: Tensor, length: int) -> Tensor:
    """Continue a prompt's positions, int64 [axes, P], over `length` response tokens: int64 [axes, P + length]."""
    return append_positions(position_ids, torch.arange(length).expand(len(position_ids), -1))


# --- other inputs of estimators ---------------------------------------------------------------------------------------


def baselines(groups: Sequence[Group]) -> list[float] | None:
    """Return each response's baseline, in order; None without greedy responses."""
    found = [group.baseline for group in groups for _ in group.responses if group.baseline is not None]
    return found or None


def part_rewards(groups: Sequence[Group]) -> list[dict[str, float]]:
    """Return the parts of each response's score under the same names; the score's value replaces missing parts."""
    scores = [score for group in groups for score in group.scores]
    names = sorted({name for score in scores for name in score.parts} - {"overall"})
    return [{name: score.parts.get(name, score.value) for name in names} for score in scores]
