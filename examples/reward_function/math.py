"""EasyR1's mathematics reward: 0.9 for the right boxed answer, 0.1 for thinking before it."""

from typing import Any

from r1_rewards import extract, math
from r1_rewards import format as response_format

REWARD_NAME = "math"
REWARD_TYPE = "batch"


def compute_score(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    scores = []
    for reward_input in reward_inputs:
        answer = extract.boxed(reward_input["response"])
        accuracy = float(answer is not None and math.equal(answer, reward_input["ground_truth"]))
        format_score = float(response_format.has_think_box(response_format.unspaced_tags(reward_input["response"])))
        overall = (1 - format_weight) * accuracy + format_weight * format_score
        scores.append({"overall": overall, "format": format_score, "accuracy": accuracy})
    return scores
