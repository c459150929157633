"""The reward of the quickstart: is the count right, and is the answer in the form that was asked for?"""

import re

REWARD_NAME = "shapes"
REWARD_TYPE = "batch"

FORM = re.compile(r"<think>[^<]*</think>\s*\\boxed\{(\d+)\}\s*")


def compute_score(reward_inputs: list[dict[str, object]], format_weight: float = 0.1) -> list[dict[str, float]]:
    r"""Score each answer: 1 when `<think>…</think>\boxed{N}` holds the right N, `format_weight` when only the form is.

    Each input has `response` and `ground_truth`; each score has `overall` and its parts `accuracy` and `format`, which
    appear as `reward/accuracy` and `reward/format` in the log.
    """
    scores = []
    for item in reward_inputs:
        found = FORM.fullmatch(str(item["response"]))
        form = float(found is not None)
        accuracy = float(found is not None and found[1] == str(item["ground_truth"]))
        overall = (1 - format_weight) * accuracy + format_weight * form
        scores.append({"overall": overall, "accuracy": accuracy, "format": form})
    return scores
