"""Models that say what they are told to of any reference answer, and prompts and responses to ask them about."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from r1_cli.build.rewards.base_scores import ScoreTerms
from r1_cli.build.rewards.reference_verifier import ModelQuery, ReferenceVerifier
from r1_cli.train.groups.group import to_reward_inputs
from r1_core.types import Sample
from r1_data.types import Prompt
from r1_rewards.reference.options import read_options
from r1_rewards.types import FailureRule, RewardInput
from r1_rollout.types import Completion

TAGGED = "<think>6*7</think> <answer> 41 </answer>"
TERMS = ScoreTerms("models/tiny", 1.0, "mean_exp_log_softmax", "r1", "tagged")


class Characters:
    """A tokenizer of one token a character."""

    eos_token = "$"

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> dict[str, Any]:
        return {"input_ids": [*map(ord, text)], "offset_mapping": [(i, i + 1) for i in range(len(text))]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))


class Canned:
    """Finds every token as likely as `value` says; remembers what it was asked."""

    def __init__(self, value: float = math.log(0.5), *, concurrent: bool = False, silent: bool = False) -> None:
        self.value, self.concurrent, self.silent = value, concurrent, silent
        self.calls: list[list[tuple[Any, list[int], int]]] = []

    def read_logprobs(self, prompts: Any, responses: Any, starts: Any, temperature: float = 1.0) -> list[list[float]]:
        self.calls.append([*zip(prompts, map(list, responses), starts, strict=True)])
        return [
            [] if self.silent else [self.value] * (len(response) - begin)
            for response, begin in zip(responses, starts, strict=True)
        ]


def prompt_of(truth: str = "42", row: int = 1, **columns: Any) -> Prompt:
    return Prompt(
        id=f"rows:{row}", text="6*7?", token_ids=[1, 2], engine_token_ids=[1, 2],
        position_ids=torch.arange(2)[None], ground_truth=truth, metadata=columns,
    )  # fmt: skip


def asking(reading: Any, policy: str = "score", longest: int = 1000, **options: Any) -> ReferenceVerifier:
    verifier = ReferenceVerifier(read_options(options))
    verifier.query = ModelQuery(reading, Characters(), "$", 1.0, longest, 1000, FailureRule(policy, 0.0))  # type: ignore[arg-type]
    return verifier


def inputs_of(*responses: str, prompt: Prompt | None = None) -> list[RewardInput]:
    completions = [Completion([*map(ord, text)], [-1.0] * len(text), "stop", 0) for text in responses]
    return to_reward_inputs(prompt or prompt_of(), completions, Characters())  # type: ignore[arg-type]


def cut(samples: Sequence[Sample]) -> tuple[list[Prompt], list[list[int]], list[int]]:
    """Samples as prompts, responses, and the places from which on they are read: the second token."""
    prompts, responses = [], []
    for sample in samples:
        if not sample.loss_mask.any():
            continue
        first = int(sample.loss_mask.int().argmax())
        ids = sample.token_ids.tolist()
        prompts.append(
            Prompt(
                id="rows:1", text="", token_ids=ids[:first], engine_token_ids=ids[:first], ground_truth="",
                position_ids=sample.position_ids[:, :first], model_inputs=sample.model_inputs,
            )
        )  # fmt: skip
        responses.append(ids[first:])
    return prompts, responses, [min(1, len(response) - 1) for response in responses]
