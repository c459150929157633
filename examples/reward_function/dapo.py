"""DAPO's reward (arXiv 2503.14476): 1 or -1 for the answer after "Answer:", less a punishment of long responses."""

from typing import Any

from r1_rewards import extract, length, math

REWARD_NAME = "dapo"
REWARD_TYPE = "batch"

TAIL = 300  # characters; an answer stated before them does not count


def compute_score(
    reward_inputs: list[dict[str, Any]],
    max_response_length: int,
    overlong_buffer_length: int,
    overlong_penalty_factor: float,
) -> list[dict[str, float]]:
    scores = []
    for reward_input in reward_inputs:
        answer = extract.stated(reward_input["response"][-TAIL:])
        right = answer is not None and math.equal(answer, reward_input["ground_truth"])
        accuracy = 1.0 if right else -1.0
        overlong = length.overlong_punishment(
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
