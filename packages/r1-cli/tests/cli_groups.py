"""A scored group to test with, made by hand."""

from dataclasses import replace
from typing import Any

import torch

from r1_cli.train.groups.group import Group, Response
from r1_data.types import Prompt
from r1_rewards.types import Score
from r1_rollout.types import Completion


def group(responses: list[str], values: list[float], prompt_tokens: int = 3) -> Group:
    """One prompt whose i-th response has i + 1 tokens and scores `values[i]`."""
    prompt = Prompt(
        id="file:0",
        text="?",
        token_ids=list(range(prompt_tokens)),
        engine_token_ids=list(range(prompt_tokens)),
        position_ids=torch.arange(prompt_tokens)[None],
        ground_truth="1",
    )
    return Group(
        prompt,
        [
            Response(
                completion=Completion([7] * (i + 1), [-0.5] * (i + 1), "stop", 0),
                text=text,
                score=Score(value, {"overall": value, "accuracy": value}),
                reward=value,
            )
            for i, (text, value) in enumerate(zip(responses, values, strict=True))
        ],
    )


def change(of: Group, place: int, **changes: Any) -> Group:
    """Return the group with another response at `place`."""
    responses = list(of.responses)
    responses[place] = replace(responses[place], **changes)
    return replace(of, responses=responses)


def of_version(version: int, of: Group) -> Group:
    """Return the group as sampled from the weights `version`."""
    for place, response in enumerate(of.responses):
        of = change(of, place, completion=replace(response.completion, weight_version=version))
    return of
