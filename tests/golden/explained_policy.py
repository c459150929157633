"""Why our losses and corrections differ from a reference in some cases, and what the papers' formulas give there.

`EXPLAINED` maps a function to one of a case that gives an `Explanation` or None. The formulas are written out here in
float64 with the log-ratio clamped to ±20, as it is everywhere in ours; gradients come from autograd. How a reference
averages is the adapters' to say.
"""

import torch
from golden import formulas
from golden.adapters_policy import every_row, verl_totals
from golden.replay import Explanation, decode, decode_inputs, is_target

LIMIT = 20.0


def doubles(case):
    return {
        name: value.detach().double() if value.is_floating_point() else value
        for name, value in decode_inputs(case).items()
        if isinstance(value, torch.Tensor)
    }


def clamped(gap):
    return gap.clamp(-LIMIT, LIMIT)


def mean_of_rows(values, mask):
    return torch.where(mask, values, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def averaged(losses, mask, mode, totals):
    """The average by these counts, of what is trained."""
    losses = torch.where(mask, losses, 0.0)
    if mode in ("token", "token-mean"):
        return losses.sum() / max(totals.tokens, 1)
    if mode in ("seq", "seq-mean-token-mean"):
        return mean_of_rows(losses, mask).sum() / max(totals.sequences, 1)
    length = totals.length if mode == "seq-mean-token-sum-norm" else 1
    return losses.sum() / (max(totals.sequences, 1) * length)


def with_gradient(per_token, mode=None, totals_of=None):
    """Answers `loss` and `grad_log_probs` of a formula (log-ratio [B, R], inputs, mask, params) for each token."""

    def formula(case):
        inputs, params = doubles(case), decode(case["params"])
        mask = inputs["response_mask"].bool()
        leaf = inputs["log_probs"].requires_grad_()
        way = mode or params["agg"]
        totals, scale = totals_of(mask) if totals_of else verl_totals(mask, way, params)
        gap = torch.where(mask, leaf - inputs["old_log_probs"], 0.0)
        weights = inputs.get("rollout_is_weights", torch.ones_like(gap))
        losses = per_token(gap, inputs | {"leaf": leaf}, mask, params) * weights
        loss = averaged(losses, mask, way, totals) * scale
        (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        gradient = torch.zeros_like(leaf) if gradient is None else gradient
        return {"loss": float(loss.detach()), "grad_log_probs": gradient.tolist(), "metrics": {}}

    return formula


def all_rows(mask):
    return every_row(mask), 1


def surrogate(ratio, advantages, params):
    low, high = 1 - params["clip_low"], 1 + params["clip_high"]
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))


def covariance(inputs, mask):
    """(A − mean A)·(log pi − mean log pi) of the trained tokens, −inf elsewhere."""
    parts = [inputs[name].detach()[mask] for name in ("advantages", "log_probs")]
    found = torch.full(mask.shape, -torch.inf, dtype=torch.float64)
    found[mask] = (parts[0] - parts[0].mean()) * (parts[1] - parts[1].mean())
    return found


def kl_cov(gap, inputs, mask, params):
    """−A·ratio, plus coef·|log ratio| on the share of tokens of the highest covariance."""
    found = covariance(inputs, mask)
    number = max(int(params["kl_cov_ratio"] * int(mask.sum())), 1)
    highest = found >= found[mask].sort(descending=True).values[number - 1]
    penalty = torch.where(highest & mask, params["ppo_kl_coef"] * clamped(gap).abs(), 0.0)
    return -inputs["advantages"] * clamped(gap).exp() + penalty


def clip_cov(gap, inputs, mask, params):
    """PPO's loss, 0 on tokens in the band of covariance that it does not clip; for shares that take the whole band."""
    found = covariance(inputs, mask)
    inside = (found > params["clip_cov_lb"]) & (found < params["clip_cov_ub"])
    losses, ratio = surrogate(clamped(gap).exp(), inputs["advantages"], params), clamped(gap).exp()
    free = losses == -inputs["advantages"] * ratio
    return torch.where(inside & free, 0.0, losses)


def geo_mean(gap, inputs, mask, params):
    """−mean A·exp(mean of the worse of x and clip(x)) of the row."""
    sign = inputs["advantages"].sign()
    worse = sign * torch.minimum(sign * gap, sign * gap.clamp(-params["clip_low"], params["clip_high"]))
    ratio = clamped(mean_of_rows(worse, mask)).exp()
    return (-mean_of_rows(inputs["advantages"], mask) * ratio).expand(gap.shape)


def gspo(gap, inputs, mask, params):
    ratio = clamped(mean_of_rows(gap, mask)).exp().expand(gap.shape)
    return surrogate(ratio, inputs["advantages"], params)


def gspo_token(gap, inputs, mask, params):
    ratio = (clamped(mean_of_rows(gap.detach(), mask)) + gap - gap.detach()).exp()
    return surrogate(ratio, inputs["advantages"], params)


def cispo(gap, inputs, mask, params):
    weight = clamped(gap.detach()).exp().clamp(1 - params["clip_low"], 1 + params["clip_high"])
    return -weight * inputs["advantages"] * inputs["leaf"]


def divergences(prefix=""):
    """The statistics of the gap between rollout and learner that ours has too."""

    def formula(case):
        inputs = doubles(case)
        mask = inputs["response_mask"].bool()
        gap = (inputs["old_log_probs"] - inputs["rollout_log_probs"])[mask]
        bounded = clamped(gap)
        found = {
            "kl": -gap.mean(),
            "k3_kl": (bounded.exp() - 1 - bounded).mean(),
            "chi2_token": ((2 * bounded).exp() - 1).mean(),
        }
        return {"metrics": {f"{prefix}{name}": float(value) for name, value in found.items()}}

    return formula


def zeros(case):
    """What a batch without trained tokens gives."""
    inputs = decode_inputs(case)
    grads = {key: torch.zeros_like(inputs[key[5:]]).tolist() for key in case["expected"] if key.startswith("grad_")}
    return {**({"loss": 0.0} if "loss" in case["expected"] else {}), **grads, "metrics": {}}


def masked_out(case):
    mask = case["inputs"].get("response_mask", case["inputs"].get("mask"))
    return mask is not None and not any(map(any, mask))


def widest(case, first, second, *, rows=False):
    """The largest |first − second| among the case's trained tokens, or of the mean over a row's."""
    inputs = doubles(case)
    mask = inputs["response_mask"].bool()
    gap = torch.where(mask, inputs[first] - inputs[second], 0.0)
    return float((mean_of_rows(gap, mask) if rows else gap).abs().max())


def unclamped(formula, first="log_probs", second="old_log_probs", *, limit=LIMIT, rows=False):
    """Explain cases whose log-ratios pass `limit`, where ours and theirs stop exp at different points."""

    def explain(case):
        if masked_out(case):
            return empty(case)
        if widest(case, first, second, rows=rows) <= limit:
            return None
        reason = (
            f"log-ratios pass {limit:g}: ours are clamped to ±20 everywhere, so that a loss stays finite; the "
            "reference clamps them elsewhere or not at all"
        )
        return Explanation(reason, formula(case))

    return explain


def empty(case):
    if masked_out(case) and not is_target(case):
        return Explanation("the reference divides by no tokens", zeros(case))
    return None


def clip_past_zero(case):
    """EasyR1 takes the logarithm of 1 − clip_low."""
    if case["params"]["clip_low"] > 1:
        formula = with_gradient(cispo, totals_of=all_rows)
        return Explanation(
            "a clip_low above 1 gives NaN in the reference; in ours there is no lower bound", formula(case)
        )
    return empty(case)


def nothing_kept(case):
    """veRL's loss where all tokens were rejected."""
    if is_target(case) or case["expected"]["loss"] != "nan":
        return None
    return Explanation("the reference divides by no tokens", zeros(case))


def exact_entropy(case):
    """The mean entropy by its definition, and its gradient."""
    if is_target(case):
        return None
    logits = doubles(case)["logits"].tolist()
    values = [[formulas.entropy(token) for token in row] for row in logits]
    slopes = torch.tensor([[formulas.entropy_gradient(token) for token in row] for row in logits], dtype=torch.float64)
    reason = "the reference loses digits of the entropy of peaked distributions to float32"
    if case["fn"] == "entropy_from_logits":
        return Explanation(reason, {"entropy": values, "grad_logits": slopes.tolist()})
    mask = torch.tensor(case["inputs"]["response_mask"]).bool()
    leaf = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    mode = case["params"]["agg"]
    totals, scale = verl_totals(mask, mode, case["params"])
    loss = averaged(leaf, mask, mode, totals) * scale
    (weights,) = torch.autograd.grad(loss, leaf)
    return Explanation(reason, {"loss": float(loss.detach()), "grad_logits": (weights[..., None] * slopes).tolist()})


GAP = ("old_log_probs", "rollout_log_probs")
SEQUENCE = {"mode": "seq-mean-token-mean"}

EXPLAINED = {
    **dict.fromkeys(
        ("policy_loss.vanilla", "policy_loss.gpg", "policy_loss.cispo", "policy_loss.reinforce", "policy_loss.sapo"),
        empty,
    ),
    "agg_loss": empty,
    "value_loss": empty,
    "policy_loss.cispo@easyr1": clip_past_zero,
    "policy_loss.bypass_mode@verl": nothing_kept,
    # No clamp: losses near 1e21 at log-ratios of ±50.
    "policy_loss.kl_cov@verl": unclamped(with_gradient(kl_cov)),
    "policy_loss.clip_cov@verl": unclamped(with_gradient(clip_cov)),
    "policy_loss.geo_mean@verl": unclamped(with_gradient(geo_mean, "seq", all_rows), rows=True),
    "policy_loss.gspo@openrlhf": unclamped(with_gradient(gspo, **SEQUENCE), rows=True),
    # The sequence's log-ratio is clamped at 10 there.
    "policy_loss.gspo@verl": unclamped(with_gradient(gspo_token, **SEQUENCE), limit=10.0, rows=True),
    # The statistic k3 is not clamped; the weights and masks of the same cases are compared.
    "rollout_correction.offpolicy_metrics@verl": unclamped(divergences(), *GAP),
    "rollout_correction.full@verl": unclamped(divergences("rollout_corr/"), *GAP),
    "entropy_loss@verl": exact_entropy,
    "entropy_from_logits@verl": exact_entropy,
}
