"""Where ours differs from RLPR's and LMM-R1's trainers, and what it gives there."""

from collections import Counter

from golden import formulas
from golden.replay import Explanation, decode, is_target, rounded

NO_SPREAD = 1e-6


def group_advantages(norm_by_std):
    """Explain groups of one, groups of nearly equal rewards, and what the reference raises on."""

    def explain(case):
        params = case["params"]
        scores, names = rounded(decode(params["scores"]), "float32"), params["groups"]
        stds = [
            formulas.variance([score for score, its in zip(scores, names, strict=True) if its == name]) ** 0.5
            for name in names
        ]
        if 1 in Counter(names).values():
            reason = "a group of one has nothing to compare with and gets 0; the reference leaves its reward as it is"
        elif any(0 < std < NO_SPREAD for std in stds):
            reason = "rewards that differ in their last float32 digits differ; the reference rounds or drops them"
        else:
            return None
        values = formulas.by_group(scores, names, formulas.grpo(1e-6, norm_by_std))
        rows = [[value * (t < length) for t in range(max(params["lengths"]))]
                for value, length in zip(values, params["lengths"], strict=True)]  # fmt: skip
        answer = {"advantages": rows, "stds": stds, "filter_rate": formulas.mean([std < NO_SPREAD for std in stds])}
        expected = case["expected"] if is_target(case) else answer
        return Explanation(reason, {key: value for key, value in answer.items() if key in expected})

    return explain


def needs_a_step(case):
    params = case["params"]
    if params["filter_start_step"] <= params["ema_start_step"]:
        return Explanation("the reference divides by no steps at all", raises="filter_start_step")
    return None


def no_tokens(case):
    if not any(map(any, case["params"]["action_mask"])):
        return Explanation("the reference divides by no tokens", {"out": 0.0})
    return None


def one_sample(case):
    """`group_norm` of groups of one is NaN in the reference, which refuses them before it gets there."""
    params = case["params"]
    if params["n_samples_per_prompt"] == 1 and params["estimator"] in ("group_norm", "rloo"):
        penalties = [[-max(params["kl_coef"], 0.0) * kl for kl in row] for row in params["kl"]]
        returns = formulas.returns(penalties, params["action_mask"], 1.0)
        sums = [next((g for g, on in zip(*row, strict=True) if on), 0.0)
                for row in zip(returns, params["action_mask"], strict=True)]  # fmt: skip
        advantages = returns
        if params["estimator"] == "rloo":
            scale = not params["no_advantage_std_norm"]
            advantages = formulas.whiten(returns, params["action_mask"], unbiased=False, scale=scale)
        answer = {"advantages": advantages, "returns": returns, "return_sums": sums}
        return Explanation("a group of one has nothing to compare with and gets 0", answer)
    return None


EXPLAINED = {
    "grpo_advantage": group_advantages(norm_by_std=True),
    "grpo_nostd_advantage": group_advantages(norm_by_std=False),
    "ema_std_filter@openbmb_rlpr": needs_a_step,
    "policy_loss@lmm_r1": no_tokens,
    "value_loss@lmm_r1": no_tokens,
    "advantages@lmm_r1": one_sample,
}
