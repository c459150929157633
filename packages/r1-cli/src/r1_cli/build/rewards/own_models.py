"""Read log-probs of the run's own models: the learner's, or the engine's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from r1_cli.train.groups.group import extend_prompt, to_sample
from r1_cli.train.types import Policy
from r1_core.types import TOP_FIELDS, Sample
from r1_data.types import Prompt
from r1_rollout.types import PromptLike, Replaying

if TYPE_CHECKING:
    from r1_rollout.types import Tokens

FIELDS = {"policy": "old_logprobs", "reference": "ref_logprobs", "teacher": "teacher_logprobs"}


@dataclass(frozen=True, slots=True)
class LearnerReading:
    """Log-probs of the learner's policy, reference or teacher, in its own micro-batches and only at its temperature."""

    learner: Policy
    model: Literal["policy", "reference", "teacher"]
    temperature: float

    concurrent = False  # it is on the devices, and often in the process, of the engine

    def read_logprobs(
        self,
        prompts: Sequence[PromptLike],
        responses: "Sequence[Tokens]",
        starts: Sequence[int],
        temperature: float = 1.0,
    ) -> list[list[float]]:
        if temperature != self.temperature:
            raise ValueError(f"the learner computes at temperature {self.temperature}, not at {temperature}")
        field = FIELDS[self.model]
        samples = [to_read(*one) for one in zip(prompts, responses, starts, strict=True)]
        found = self.learner.add_logprobs(samples, [field])
        self.learner.offload()
        return [logprobs[sample.loss_mask].tolist() for sample in found if (logprobs := sample.get(field)) is not None]

    def read_top(
        self, prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", count: int, temperature: float
    ) -> list[Tensor]:
        """Return what `TokenModel.top` gives of each response, [n, 1 + 2 · count], by the learner's teacher."""
        samples = [to_read(*one, 0) for one in zip(prompts, responses, strict=True)]
        found = self.learner.add_logprobs(samples, ["teacher_top"])
        self.learner.offload()
        fields = ("teacher_logprobs", *TOP_FIELDS)
        columns = [[value for name in fields if (value := one.get(name)) is not None] for one in found]
        return [
            torch.cat([own[:, None], *(rest.float() for rest in top)], dim=-1)[one.loss_mask]
            for one, (own, *top) in zip(found, columns, strict=True)
        ]


def to_read(prompt: PromptLike, response: "Tokens", start: int) -> Sample:
    sample = to_sample(prompt, response)
    first = len(prompt.token_ids) + start
    return replace(sample, loss_mask=torch.arange(len(sample.token_ids)) >= first)


@dataclass(frozen=True, slots=True)
class ReplayReading:
    """Log-probs of an active engine, which replays the tokens before `starts` as a prompt."""

    engine: Replaying

    concurrent = False  # it samples

    def read_logprobs(
        self,
        prompts: Sequence[PromptLike],
        responses: "Sequence[Tokens]",
        starts: Sequence[int],
        temperature: float = 1.0,
    ) -> list[list[float]]:
        pairs = list(zip(responses, starts, strict=True))
        contexts = [
            extend_prompt(cast(Prompt, prompt), response[:start])
            for prompt, (response, start) in zip(prompts, pairs, strict=True)
        ]
        return self.engine.logprobs_of(contexts, [response[start:] for response, start in pairs], temperature)
