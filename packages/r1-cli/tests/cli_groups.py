"""A scored group to test with, made by hand."""

import torch

from r1_cli.groups.group import Group
from r1_data.types import Prompt
from r1_rewards.types import Score
from r1_rollout.types import Completion


def group(responses: list[str], values: list[float], prompt_tokens: int = 3) -> Group:
    """One prompt whose i-th answer has i + 1 tokens and scores `values[i]`."""
    prompt = Prompt(
        id="file:0",
        text="?",
        token_ids=list(range(prompt_tokens)),
        engine_token_ids=list(range(prompt_tokens)),
        position_ids=torch.arange(prompt_tokens)[None],
        ground_truth="1",
    )
    completions = [Completion([7] * (i + 1), [-0.5] * (i + 1), "stop", 0) for i in range(len(responses))]
    scores = [Score(value, {"overall": value, "accuracy": value}) for value in values]
    return Group(prompt, completions, responses, scores, [score.value for score in scores])
