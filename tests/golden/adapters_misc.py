"""From golden case names to our learning-rate schedule."""

from r1_core.optim import learning_rate_scale


def learning_rates(inputs, params, case):
    steps = range(params["steps"])
    settings = {
        "kind": params["kind"],
        "warmup_steps": params["warmup"],
        "total_steps": params.get("total", params["steps"]),
        "min_lr_ratio": params.get("min_lr_ratio", 0.0),
    }
    return {"lrs": [learning_rate_scale(step, **settings) for step in steps]}


def other_ends(case):
    """The two agree from the end of the warm-up to the last step of the run."""
    params, theirs = case["params"], case["expected"]["lrs"]
    ours = learning_rates({}, params, case)["lrs"]
    last = params.get("total", params["steps"])
    apart = {step for step, pair in enumerate(zip(ours, theirs, strict=True)) if abs(pair[0] - pair[1]) > 1e-9}
    if apart and all(step < params["warmup"] for step in apart):
        return "the reference's first warm-up step has rate 0 and so trains nothing; ours is one step ahead"
    if apart and all(step < params["warmup"] or step > last for step in apart):
        return "past the last step the reference's cosine rises again; ours stays at its lowest"
    return None


ALGOS = {"lr_schedule": learning_rates}
EXPLAINED = {"lr_schedule": other_ends}
