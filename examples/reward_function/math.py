"""EasyR1's mathematics reward: 0.9 for the right boxed answer, 0.1 for thinking before it."""

import re
from typing import Any

from r1_rewards import math
from r1_rewards.extract import boxed

REWARD_NAME = "math"
REWARD_TYPE = "batch"

_SPACED_TAG = re.compile(r"<\s{0,8}(/?)\s{0,8}think\s{0,8}>")


def has_format(response: str) -> bool:
    r"""Whether the response starts with `<think>`, closes it, and has a `\boxed{…}` later; in linear time."""
    response = _SPACED_TAG.sub(r"<\1think>", response)
    thought_end = response.find("</think>")
    box = response.find(r"\boxed{", thought_end) if response.startswith("<think>") and thought_end >= 0 else -1
    return box >= 0 and response.find("}", box) >= 0


def compute_score(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    scores = []
    for reward_input in reward_inputs:
        answer = boxed(reward_input["response"])
        accuracy = float(answer is not None and math.equal(answer, reward_input["ground_truth"]))
        format_score = float(has_format(reward_input["response"]))
        overall = (1 - format_weight) * accuracy + format_weight * format_score
        scores.append({"overall": overall, "format": format_score, "accuracy": accuracy})
    return scores
