"""DAPO's reward (arXiv 2503.14476): 1 or -1 for the answer after "Answer:", less a punishment of long responses."""

from typing import Any

from r1_rewards import math
from r1_rewards.extract import stated

REWARD_NAME = "dapo"
REWARD_TYPE = "batch"

TAIL = 300  # characters; an answer stated before them does not count


def overlong_punishment(length: int, max_length: int, buffer: int, factor: float) -> float:
    """Equation 13: 0 up to max_length - buffer tokens, then falling linearly to -factor at max_length."""
    room = max_length - buffer - length
    return factor * min(max(room / buffer, -1.0), 0.0)


def compute_score(
    reward_inputs: list[dict[str, Any]],
    max_response_length: int,
    overlong_buffer_length: int,
    overlong_penalty_factor: float,
) -> list[dict[str, float]]:
    if not 0 < overlong_buffer_length <= max_response_length:
        raise ValueError(
            f"overlong_buffer_length must be above 0 and at most max_response_length, "
            f"got {overlong_buffer_length} and {max_response_length}"
        )
    scores = []
    for reward_input in reward_inputs:
        answer = stated(reward_input["response"][-TAIL:])
        right = answer is not None and math.equal(answer, reward_input["ground_truth"])
        accuracy = 1.0 if right else -1.0
        overlong = overlong_punishment(
            reward_input["response_length"], max_response_length, overlong_buffer_length, overlong_penalty_factor
        )
        scores.append(
            {
                "overall": accuracy + overlong,
                "accuracy": accuracy,
                "overlong": overlong,
                "accuracy_normalized": float(right),
            }
        )
    return scores
