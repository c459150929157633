"""A reward for choosing a numbered action of a screen: the last number of the response must be the right one."""

from typing import Any

from r1_rewards import gsm8k

REWARD_NAME = "android_gui"
REWARD_TYPE = "sequential"


def compute_score(reward_input: dict[str, Any]) -> dict[str, float]:
    chosen, right = gsm8k.final_number(reward_input["response"]), gsm8k.final_number(reward_input["ground_truth"])
    accuracy = float(chosen is not None and chosen == right)
    return {"overall": accuracy, "accuracy": accuracy}
