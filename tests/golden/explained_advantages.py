"""Why our advantages, KL terms and statistics differ from a reference in some cases, and what the paper gives there.

`EXPLAINED` maps a function to one of a case that gives an `Explanation` or None. Its answers come from `formulas.py`,
for the cases that a reason covers and for those where the reference raises, is not finite, or is rounding noise.
"""

from collections import Counter

from golden import formulas
from golden.replay import Explanation, decode_inputs, is_target


def lists(case, *names):
    """Inputs as the dtype of the case rounds them, as lists of Python floats."""
    inputs = decode_inputs(case)
    return [inputs[name].detach().double().tolist() for name in names]


def instead(formula, *reasons):
    """Explain a case by the first reason that covers it, with what the formula gives in place of the reference."""

    def explain(case):
        if not is_target(case):
            return Explanation("the reference is no target", formula(case))
        reason = next((found for found in (reason(case) for reason in reasons) if found), None)
        return Explanation(reason, formula(case)) if reason else None

    return explain


# --- reasons -----------------------------------------------------------------------------------------------------


def names_of(case):
    return case["inputs"].get("index", case["inputs"].get("group_index", []))


def singleton(case):
    if 1 in Counter(names_of(case)).values():
        return "a group of one has nothing to compare with and gets 0; the reference leaves its reward as it is"
    return None


def floored_variance(case):
    """Its variance is at least 1e-6, with moments in one float32 pass, whatever the dtype of the case."""
    (token_rewards,) = lists(case, "token_level_rewards")
    rewards = formulas.scores(token_rewards)
    groups = [[r for r, its in zip(rewards, names_of(case), strict=True) if its == name] for name in names_of(case)]
    if case["dtype"] == "float64" or min(map(formulas.variance, groups)) < 1e-4:
        return "the reference takes moments in one float32 pass, variance floored at 1e-6; ours keeps its digits"
    return None


def has_gap(case):
    return any(row[t] > row[t - 1] for row in case["inputs"]["response_mask"] for t in range(1, len(row)))


def reset_at_gaps(case):
    if has_gap(case):
        return "the reference's return starts anew at an observation, so earlier turns get no credit for later ones"
    return None


def gaps_as_steps(case):
    if has_gap(case):
        return "the reference counts observations as steps of value 0; ours goes on to the next trained token"
    return None


def float32_pipeline(case):
    if case["dtype"] == "float64" or len(set(case["inputs"]["scores"])) == 1:
        return "the reference whitens in float32, ours in float64; they differ by float32's rounding"
    return None


def whole_reward(case):
    rewards, mask = lists(case, "token_level_rewards", "response_mask")
    for row, on in zip(rewards, mask, strict=True):
        last = max((t for t, shown in enumerate(on) if shown), default=-1)
        if any(row[:last]):
            return "the reference credits a token with rewards that came before it; ours counts what is still to come"
    return None


def clamped_kl(case):
    if any(abs(estimate) > 10 for row in kl_values(case, 0) for estimate in row):
        return "the reference clamps its estimate at 10, where the gradient is then 0; ours keeps on pulling"
    return None


def no_floor(case):
    if case["inputs"]["response_length"] > case["params"]["max_response_length"]:
        return "the reference goes below -factor past the maximum; in DAPO's formula it is -1 from there on"
    return None


def float32_moments(case):
    tokens = formulas.trained(*lists(case, "values", "mask"))
    if case["dtype"] == "float32" and formulas.mean(tokens) ** 2 > 900 * formulas.variance(tokens):
        return "the reference loses the variance of values far from 0 to float32; ours is taken in float64"
    return None


# --- what the papers give ----------------------------------------------------------------------------------------


def outcome(values_of):
    """An estimator with one number for each answer; its advantages are its returns."""

    def formula(case):
        token_rewards, mask = lists(case, "token_level_rewards", "response_mask")
        advantages = formulas.spread(values_of(formulas.scores(token_rewards), mask, case), mask)
        return {"advantages": advantages, "returns": advantages}

    return formula


def by_group(judge):
    return outcome(lambda rewards, mask, case: formulas.by_group(rewards, names_of(case), judge(case["params"])))


def opo(rewards, mask, case):
    return formulas.opo(rewards, names_of(case), [sum(row) for row in mask])


def gpg(rewards, mask, case):
    alpha = len(rewards) / max(sum(reward != 0 for reward in rewards), 1) / case["params"].get("f_norm", 1.0)
    distances = formulas.by_group(rewards, names_of(case), formulas.grpo(norm_by_std=False))
    return [alpha * distance for distance in distances]


def whitened_baseline(case):
    (mask,) = lists(case, "response_mask")
    distances = by_group(lambda params: formulas.grpo(norm_by_std=False))(case)["advantages"]
    advantages = formulas.whiten(distances, mask)
    return {"advantages": advantages, "returns": advantages}


def gae(case):
    params = case["params"]
    rewards, values, mask = lists(case, "token_level_rewards", "values", "response_mask")
    advantages, returns = formulas.gae(rewards, values, mask, params["gamma"], params["lam"])
    return {"advantages": formulas.whiten(advantages, mask), "returns": returns}


def reinforce_plus_plus(case):
    rewards, mask = lists(case, "token_level_rewards", "response_mask")
    returns = formulas.returns(rewards, mask, case["params"]["gamma"])
    return {"advantages": formulas.whiten(returns, mask), "returns": returns}


def remax(case):
    rewards, mask, baselines = lists(case, "token_level_rewards", "response_mask", "reward_baselines")
    returns = formulas.returns(rewards, mask, 1.0)
    advantages = [[g - baseline for g in row] for row, baseline in zip(returns, baselines, strict=True)]
    return {"advantages": advantages, "returns": returns}


def zero_in_groups_of_one(case):
    """The reference's advantages but for the groups of one; nothing to go by where the reference is no target."""
    if not is_target(case):
        return {}
    sizes = Counter(names_of(case))
    rows = zip(case["expected"]["advantages"], names_of(case), strict=True)
    return {"advantages": [[0.0] * len(row) if sizes[name] == 1 else row for row, name in rows]}


def pipeline(shape, *, whitened, discounted=False, critic=False):
    """Scores shaped by group, the KL off every token, returns (or GAE), whitening with the variance over n."""

    def formula(case):
        params = case["params"]
        scores, penalties, mask = lists(case, "scores", "kl", "response_mask")
        coef = max(params["kl_coef"], 0.0)
        shaped = formulas.by_group(scores, names_of(case), shape) if shape else scores
        placed = formulas.at_last_token(shaped, mask)
        rewards = [[r - coef * k for r, k in zip(*pair, strict=True)] for pair in zip(placed, penalties, strict=True)]
        gamma = params["gamma"] if discounted or critic else 1.0
        if critic:
            advantages, returns = formulas.gae(rewards, *lists(case, "values"), mask, gamma, params["lam"])
        else:
            advantages = returns = formulas.returns(rewards, mask, gamma)
        if whitened:
            advantages = formulas.whiten(advantages, mask, unbiased=False)
        return {"advantages": advantages, "returns": returns}

    return formula


def kl_values(case, which):
    """Estimates (0) or their derivatives (1) of every token."""
    names = ("old_log_probs" if "old_log_probs" in case["inputs"] else "log_probs", "ref_log_probs")
    kind, rows = case["params"]["kl_type"], zip(*lists(case, *names), strict=True)
    if kind == "full":
        return []
    return [
        [formulas.kl(kind, policy, reference)[which] for policy, reference in zip(*row, strict=True)] for row in rows
    ]


def kl(case):
    return {"kl": kl_values(case, 0), "grad_log_probs": kl_values(case, 1)}


def kl_in_reward(case):
    params = case["params"]
    scores, mask = lists(case, "token_level_scores", "response_mask")
    estimates = kl_values(case, 0)
    penalised = [
        [score - params["init"] * estimate * on for score, estimate, on in zip(*row, strict=True)]
        for row in zip(scores, estimates, mask, strict=True)
    ]
    means = [formulas.mean(formulas.trained([row], [on])) for row, on in zip(estimates, mask, strict=True) if any(on)]
    error = formulas.clamp(formulas.mean(means) / params["target"] - 1, -0.2, 0.2)
    return {
        "token_level_rewards": penalised,
        "current_kl": formulas.mean(means),
        "coef_after": params["init"] * (1 + error * len(mask) / params["horizon"]),
    }


def overlong(case):
    params = case["params"]
    sizes = (params["max_response_length"], params["buffer"], params["factor"])
    return {"penalty": formulas.overlong(case["inputs"]["response_length"], *sizes)}


def masked_whiten(case):
    params = case["params"]
    shift = params.get("shift_mean", True)
    return {"out": formulas.whiten(*lists(case, "values", "mask"), eps=params.get("eps", 1e-8), shift=shift)}


def masked_mean(case):
    return {"out": formulas.mean(formulas.trained(*lists(case, "values", "mask")))}


def masked_mean_of_rows(case):
    rows = zip(*lists(case, "values", "mask"), strict=True)
    return {"out": [formulas.mean(formulas.trained([row], [on])) for row, on in rows]}


def masked_variance(case):
    return {"out": formulas.variance(formulas.trained(*lists(case, "values", "mask")), case["params"]["unbiased"])}


def grpo_of(params):
    return formulas.grpo(params.get("eps", 1e-6), params.get("norm_by_std", True))


def passk_of(params):
    return formulas.passk(params.get("eps", 1e-6), params.get("norm_by_std", True))


MEAN = formulas.grpo(norm_by_std=False)

EXPLAINED = {
    "adv.gae": instead(gae),
    "adv.grpo": instead(by_group(grpo_of), singleton),
    "adv.grpo_vectorized": instead(by_group(grpo_of), singleton, floored_variance),
    "adv.grpo_passk": instead(by_group(passk_of)),
    "adv.rloo": instead(by_group(lambda params: formulas.rloo), singleton),
    "adv.rloo_vectorized": instead(by_group(lambda params: formulas.rloo), singleton),
    "adv.opo": instead(outcome(opo), singleton),
    "adv.gpg": instead(outcome(gpg), singleton),
    "adv.reinforce_plus_plus": instead(reinforce_plus_plus, reset_at_gaps),
    "adv.reinforce_plus_plus_baseline": instead(whitened_baseline, singleton),
    "adv.remax": instead(remax),
    "adv.remax@easyr1": instead(remax, whole_reward),
    "adv.optimal_token_baseline": instead(zero_in_groups_of_one, singleton),
    "adv.tir_optimal_token_baseline": instead(zero_in_groups_of_one, singleton),
    "adv_pipeline.gae": instead(pipeline(None, whitened=True, critic=True), gaps_as_steps, float32_pipeline),
    "adv_pipeline.reinforce": instead(pipeline(None, whitened=True, discounted=True), gaps_as_steps, float32_pipeline),
    "adv_pipeline.reinforce_baseline": instead(pipeline(MEAN, whitened=True), singleton, float32_pipeline),
    "adv_pipeline.dr_grpo": instead(pipeline(MEAN, whitened=False), singleton),
    "adv_pipeline.rloo": instead(pipeline(formulas.rloo, whitened=False), singleton),
    "adv_pipeline.group_norm": instead(pipeline(formulas.grpo(eps=1e-9), whitened=False), singleton),
    "kl": instead(kl, clamped_kl),
    "kl_in_reward": instead(kl_in_reward, clamped_kl),
    "soft_overlong": instead(overlong),
    "soft_overlong@verl": instead(overlong, no_floor),
    "stats.masked_mean": instead(masked_mean),
    "stats.masked_mean_dim": instead(masked_mean_of_rows),
    "stats.masked_var": instead(masked_variance),
    "stats.masked_whiten": instead(masked_whiten, float32_moments),
    "stats.masked_whiten_noshift": instead(masked_whiten, float32_moments),
}
