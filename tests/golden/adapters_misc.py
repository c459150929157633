"""From golden case names to our learning-rate schedule."""

from r1_core.learner.optim import learning_rate_scale


def learning_rates(inputs, params, case):
    steps = range(params["steps"])
    settings = {
        "kind": params["kind"],
        "warmup_steps": params["warmup"],
        "total_steps": params.get("total", params["steps"]),
        "min_lr_ratio": params.get("min_lr_ratio", 0.0),
    }
    return {"lrs": [learning_rate_scale(step, **settings) for step in steps]}


ALGOS = {"lr_schedule": learning_rates}
