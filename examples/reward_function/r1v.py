"""EasyR1's R1-V reward: half for the right answer in `<answer>`, half for `<think>…</think><answer>…</answer>`."""

import re
from typing import Any

from r1_rewards import r1v

REWARD_NAME = "r1v"
REWARD_TYPE = "batch"

_SPACED_TAG = re.compile(r"<\s{0,8}(/?)\s{0,8}(think|answer)\s{0,8}>")


def compute_score(reward_inputs: list[dict[str, Any]], format_weight: float = 0.5) -> list[dict[str, float]]:
    scores = []
    for reward_input in reward_inputs:
        response = _SPACED_TAG.sub(r"<\1\2>", reward_input["response"])
        parts = r1v.score(response, reward_input["ground_truth"]).parts
        overall = (1 - format_weight) * parts["accuracy"] + format_weight * parts["format"]
        scores.append({"overall": overall, "format": parts["format"], "accuracy": parts["accuracy"]})
    return scores
