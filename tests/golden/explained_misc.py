"""Where our learning-rate schedule differs from the reference's, and what it is there."""

import math

from golden.replay import Explanation


def scale(step, params):
    """(step + 1) / warmup, then 1 or half a cosine from 1 to `min_lr_ratio` at the last step of the run, and on."""
    warmup, last = params["warmup"], params.get("total", params["steps"])
    if step < warmup:
        return (step + 1) / warmup
    if params["kind"] == "constant":
        return 1.0
    done = min((step - warmup) / max(last - warmup, 1), 1.0)
    low = params.get("min_lr_ratio", 0.0)
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))


def other_ends(case):
    """The two agree from the end of the warm-up to the last step of the run."""
    params = case["params"]
    answer = {"lrs": [scale(step, params) for step in range(params["steps"])]}
    if params["steps"] > params.get("total", params["steps"]) + 1:
        return Explanation("past the last step the reference's cosine rises again; ours stays at its lowest", answer)
    if params["warmup"]:
        return Explanation(
            "the reference's first warm-up step has rate 0 and so trains nothing; ours is one step ahead", answer
        )
    return None


EXPLAINED = {"lr_schedule": other_ends}
