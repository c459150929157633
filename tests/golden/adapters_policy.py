"""Golden cases of policy losses, value loss, averages, entropy and rollout correction, told in r1-core's words.

ALGOS maps "fn" or "fn@variant" to a callable (inputs, params, case) -> dict. Where ours differs from a reference
because it follows the paper, `explained_policy.py` says why, and what the paper's formula gives.

Where references average otherwise than the papers (empty rows counted, a missing division by the batch), the case is
replayed with the totals that their average amounts to: which counts to divide by is the caller's to say.
"""

import math
from dataclasses import replace

import torch

from r1_core import losses
from r1_core.learner.logprobs import token_logprobs
from r1_core.losses import Correction, Rejection, ValueLoss, aggregate
from r1_core.losses.correction import diagnose, effective_sample_size, importance_weights, log_gap
from r1_core.objective import Objective
from r1_core.types import LossInputs, Totals

# The `max_completion_length` that TRL's cases were made with; they do not state it.
TRL_COMPLETION_LENGTH = 16


def own_totals(mask):
    """What the learner counts when these rows are the whole step."""
    lengths = mask.sum(-1)
    return Totals(int(lengths.sum()), int((lengths > 0).sum()), int(mask.shape[-1]))


def every_row(mask):
    """EasyR1 and TRL average over all rows, those without tokens too; the papers' sequences have tokens."""
    return replace(own_totals(mask), sequences=mask.shape[0])


def verl_totals(mask, mode, params):
    """veRL's totals and the factor that it multiplies by, because it averages over ranks afterwards."""
    given = params.get("global_batch_info", params)
    totals = own_totals(mask)
    totals = Totals(
        tokens=int(given.get("batch_num_tokens") or totals.tokens),
        sequences=int(given.get("global_batch_size") or totals.sequences),
        length=int(given.get("loss_scale_factor") or totals.length),
    )
    if mode == "seq-mean-token-sum-norm":
        # Not divided by the batch there: four rows of ones average to 4. Dr.GRPO's formula divides.
        return replace(totals, sequences=1), 1
    return totals, given.get("dp_size") or 1


def mask_of(inputs):
    return inputs["response_mask"].bool()


def loss_inputs(inputs, mask, totals, **more):
    return LossInputs(
        logprobs=inputs["log_probs"],
        loss_mask=mask,
        advantages=inputs["advantages"],
        old_logprobs=inputs["old_log_probs"],
        ref_logprobs=inputs.get("ref_log_probs"),
        totals=totals,
        **{"weights": inputs.get("rollout_is_weights"), **more},
    )


def replay(loss, inputs, mode, totals, scale=1, mask=None, **more):
    """The loss by these totals, and metrics as means over the case's own tokens."""
    mask = mask_of(inputs) if mask is None else mask
    objective = Objective(loss, mode, **more.pop("objective", {}))
    value = objective(loss_inputs(inputs, mask, totals, **more)).loss * scale
    metrics = objective(loss_inputs(inputs, mask, own_totals(mask), **more)).metrics
    return value, metrics


def easyr1(name, *settings):
    """An adapter that hands the named params of a case to the loss called `name`."""

    def adapter(inputs, params, case):
        loss = losses.get(name)(**{key: params[key] for key in settings})
        value, metrics = replay(loss, inputs, params["agg"], every_row(mask_of(inputs)))
        return {"loss": value, "metrics": metrics}

    return adapter


VERL_METRICS = {"actor/ppo_kl": "ppo_kl", "actor/pg_clipfrac": "pg_clipfrac_higher"}


def verl(name, *settings, mode=None, names=VERL_METRICS, **renamed):
    """The same for veRL; `mode` where it averages in one way only, whatever it is asked for."""

    def adapter(inputs, params, case):
        wanted = {key: params[key] for key in settings} | {ours: params[theirs] for ours, theirs in renamed.items()}
        way = mode or params["agg"]
        totals, scale = verl_totals(mask_of(inputs), way, params)
        value, metrics = replay(losses.get(name)(**wanted), inputs, way, totals, scale)
        named = {theirs: metrics[ours] for theirs, ours in names.items() if ours in metrics}
        if "pg_clipfrac_lower" in metrics:
            named["actor/pg_clipfrac_lower"] = metrics["pg_clipfrac_lower"]
        return {"loss": value, "metrics": named}

    return adapter


def verl_geo_mean(inputs, params, case):
    # Ignores the aggregation asked for, and averages over all rows.
    loss = losses.get("gmpo")(clip_low=params["clip_low"], clip_high=params["clip_high"])
    mask, weights = mask_of(inputs), inputs.get("rollout_is_weights")
    if weights is not None:
        # One weight per sequence, the geometric mean of its tokens'.
        weights = importance_weights(torch.where(mask, weights.log(), 0.0), mask, "geometric")
    value, metrics = replay(loss, inputs, "seq", every_row(mask), weights=weights)
    return {
        "loss": value,
        "metrics": {
            "actor/ppo_kl": metrics["ppo_kl"],
            "actor/pg_clipfrac": metrics["pg_clipfrac_higher"],
            "actor/pg_clipfrac_lower": metrics["pg_clipfrac_lower"],
        },
    }


def verl_kl_cov(inputs, params, case):
    loss = losses.get("kl_cov")(ratio=params["kl_cov_ratio"], kl_coef=params["ppo_kl_coef"])
    totals, scale = verl_totals(mask_of(inputs), params["agg"], params)
    return {"loss": replay(loss, inputs, params["agg"], totals, scale)[0]}


def verl_clip_cov(inputs, params, case):
    loss = losses.get("clip_cov")(
        clip_low=params["clip_low"],
        clip_high=params["clip_high"],
        ratio=params["clip_cov_ratio"],
        cov_low=params["clip_cov_lb"],
        cov_high=params["clip_cov_ub"],
    )
    totals, scale = verl_totals(mask_of(inputs), params["agg"], params)
    value, metrics = replay(loss, inputs, params["agg"], totals, scale)
    # Its clip fraction counts the tokens that the covariance takes out, not those of the ratio clip.
    return {"loss": value, "metrics": {"actor/pg_clipfrac": metrics["cov_frac"], "actor/ppo_kl": metrics["ppo_kl"]}}


def parse_bounds(kind, bound):
    """veRL's "lower_upper" or "upper" as our bounds; its k1 is log(mu / pi), so they bound the inverse ratio there."""
    if not kind.endswith("k1"):
        return 0.0, float(bound)
    low, _, high = str(bound).rpartition("_")
    upper = float(high)
    lower = float(low) if low else 1.0 / upper
    return 1.0 / upper, 1.0 / lower


def rejections(kinds, bounds):
    if not kinds:
        return ()
    kinds = kinds.split(",")
    bounds = str(bounds).split(",")
    found = []
    for kind, bound in zip(kinds, bounds if len(bounds) == len(kinds) else bounds * len(kinds), strict=True):
        span, measure = kind.removeprefix("seq_").rsplit("_", 1)
        lower, upper = parse_bounds(kind, bound)
        found.append(Rejection(measure, span, upper, lower))
    return tuple(found)


def weighing(level, threshold, **more):
    """veRL's threshold: an upper bound to clamp at, or "lower_upper", outside of which a weight is 0 (IcePop)."""
    lower, _, upper = str(threshold or "2.0").rpartition("_")
    outside = "zero" if lower else "clamp"
    return Correction(level, upper=float(upper), lower=float(lower or 0.0), outside=outside, **more)


def gap_of(inputs):
    mask = mask_of(inputs)
    return log_gap(inputs["old_log_probs"], inputs["rollout_log_probs"], mask), mask


def weight_metrics(gap, mask, correction):
    """veRL's statistics of the weights, those that we have too: over tokens, before the upper bound is applied."""
    raw = importance_weights(gap, mask, correction.level)
    count = mask.sum().clamp(min=1)
    clamped = raw.clamp(1.0 / correction.upper, correction.upper) * mask
    return {"rollout_is_mean": raw.sum() / count, "rollout_is_eff_sample_size": effective_sample_size(clamped, mask)}


def divergence_metrics(gap, mask):
    found = diagnose(gap, mask)
    return {
        "kl": found["rollout_kl"],
        "k3_kl": found["rollout_kl_k3"],
        "chi2_token": found["rollout_chi2"],
    }


def correction_weights(inputs, params, case):
    gap, mask = gap_of(inputs)
    correction = weighing(params["level"], params["threshold"], normalize=params.get("batch_normalize", False))
    return {"weights": correction.weights(gap, mask), "metrics": weight_metrics(gap, mask, correction)}


def correction_rejection(inputs, params, case):
    gap, mask = gap_of(inputs)
    found = rejections(params["rollout_rs"], params["threshold"])
    kept = Correction(None, rejections=found).keep(gap, mask)
    count = mask.sum().clamp(min=1)
    return {"mask": kept.long(), "metrics": {"rollout_rs_masked_fraction": (mask & ~kept).sum() / count}}


def correction_metrics(inputs, params, case):
    return {"metrics": divergence_metrics(*gap_of(inputs))}


def correction_full(inputs, params, case):
    gap, mask = gap_of(inputs)
    found = rejections(params["rollout_rs"], params["rs_threshold"])
    correction = weighing(params["rollout_is"], params["threshold"], rejections=found)
    metrics = weight_metrics(gap, mask, correction) | divergence_metrics(gap, mask)
    return {
        "weights": correction.weights(gap, mask),
        "mask": correction.keep(gap, mask).long(),
        "metrics": {f"rollout_corr/{name}": value for name, value in metrics.items()},
    }


def bypass_mode(inputs, params, case):
    """veRL's loss where the rollout's log-probs stand in for the old ones: weights from the current policy."""
    mask = mask_of(inputs)
    gap = log_gap(inputs["log_probs"], inputs["old_log_probs"], mask)
    correction = weighing(
        params["rollout_is"],
        params["rollout_is_threshold"],
        normalize=params["rollout_is_batch_normalize"],
        rejections=rejections(params["rollout_rs"], params["rollout_rs_threshold"]),
    )
    kept = correction.keep(gap, mask)
    totals, scale = verl_totals(kept, params["agg"], params)
    if params["loss_type"] != "ppo_clip":
        loss, weights = losses.get("reinforce")(), correction.weights(gap, mask)
    else:
        # PPO's own ratio is the weight.
        loss = losses.get("default")(params["clip_low"], params["clip_high"], params["clip_dual"])
        weights = None
    value, _ = replay(loss, inputs, params["agg"], totals, scale, kept, weights=weights)
    metrics = {f"rollout_corr/{name}": number for name, number in divergence_metrics(gap, mask).items()}
    return {"loss": value, "metrics": metrics}


def openrlhf(name, *settings):
    def adapter(inputs, params, case):
        wanted = {key: params[key] for key in settings}
        wanted["clip_dual"] = params["clip_dual"] or math.inf
        mask = mask_of(inputs)
        mode = params["agg"]
        totals, scale = verl_totals(mask, mode, params)
        weights = openrlhf_weights(inputs, params)
        value, metrics = replay(losses.get(name)(**wanted), inputs, mode, totals, scale, weights=weights)
        return {"loss": value, "metrics": {"ppo_kl": metrics["ppo_kl"]}}

    return adapter


def openrlhf_weights(inputs, params):
    kind = params.get("is_correction")
    if kind is None:
        return None
    (lower, upper), (gap, mask) = params["is_threshold"], gap_of(inputs)
    if kind == "tis":
        return Correction("token", upper, lower).weights(gap, mask)
    if kind == "icepop":
        return Correction("token", upper, lower, outside="zero").weights(gap, mask)
    # Whole sequences by their geometric ratio, with plain token weights; what is dropped still counts in the mean.
    kept = Rejection("k1", "mean", upper, lower).keep(gap, mask)
    return importance_weights(gap, mask, "token") * kept


def trl(inputs, params, case):
    """TRL's `_compute_loss`; its grpo and luspo average over all rows, its dapo, cispo and vespo over all tokens."""
    kind, mask = params["loss_type"], mask_of(inputs)
    low, high = params["clip_low"], params["clip_high"]
    more = {"off_policy_threshold": params.get("off_policy_mask_threshold", math.inf)}
    if params.get("beta"):
        more |= {"kl_penalty": "low_var_kl", "kl_coef": params["beta"]}
    if kind == "cispo":
        # Its clip_high is the bound itself, and there is no lower one.
        loss = losses.get("cispo")(clip_low=1.0, clip_high=high - 1.0)
    elif kind in ("sapo", "vespo"):
        loss = losses.get(kind)()
    elif kind == "luspo" or params.get("level") == "sequence":
        loss = losses.get("luspo" if kind == "luspo" else "gspo")(clip_low=low, clip_high=high)
    elif params.get("level") == "sequence_token":
        loss = losses.get("gspo_token")(clip_low=low, clip_high=high)
    else:
        loss = losses.get("default")(low, high, params.get("delta") or math.inf)
    ways = {"grpo": "seq", "luspo": "seq", "sapo": "seq", "dr_grpo": "seq-mean-token-sum-norm"}
    totals = replace(every_row(mask), length=TRL_COMPLETION_LENGTH)
    value, metrics = replay(loss, inputs, ways.get(kind, "token"), totals, objective=more)
    return {"loss": value, "metrics": {"kl": metrics["kl_loss"]} if "kl_loss" in metrics else {}}


def average(inputs, params, case):
    mask, mode = inputs["mask"].bool(), params["mode"]
    totals, scale = (every_row(mask), 1) if case["variant"] == "easyr1" else verl_totals(mask, mode, params)
    return {"loss": aggregate(inputs["values"], mask, mode, totals) * scale}


def value_loss(inputs, params, case):
    mask, mode = mask_of(inputs), params["agg"]
    totals, scale = (every_row(mask), 1) if case["variant"] == "easyr1" else verl_totals(mask, mode, params)
    values, metrics = ValueLoss(params["cliprange_value"])(inputs["vpreds"], inputs["values"], inputs["returns"], mask)
    means = {name: aggregate(value, mask, "token", own_totals(mask)) for name, value in metrics.items()}
    return {"loss": aggregate(values, mask, mode, totals) * scale, "metrics": means}


def entropies(logits):
    flat = logits.flatten(0, -2)
    targets = torch.zeros(len(flat), dtype=torch.long)
    entropy = token_logprobs(flat, targets, with_entropy=True, entropy_gradient=True)[1]
    return entropy.view(logits.shape[:-1])


def logprobs_from_logits(inputs, params, case):
    logits, labels = inputs["logits"], inputs["labels"]
    logprobs, _ = token_logprobs(logits.flatten(0, -2), labels.flatten())
    return {next(key for key in case["expected"] if not key.startswith("grad_")): logprobs.view(labels.shape)}


def entropy_from_logits(inputs, params, case):
    return {"entropy": entropies(inputs["logits"])}


def entropy_loss(inputs, params, case):
    mask, mode = mask_of(inputs), params["agg"]
    totals, scale = verl_totals(mask, mode, params)
    return {"loss": aggregate(entropies(inputs["logits"]), mask, mode, totals) * scale}


CLIP = ("clip_low", "clip_high")
DUAL = (*CLIP, "clip_dual")
TAUS = ("tau_pos", "tau_neg")

ALGOS = {
    "policy_loss.vanilla@easyr1": easyr1("default", *DUAL),
    "policy_loss.gspo@easyr1": easyr1("gspo", *DUAL),
    "policy_loss.gspo_token@easyr1": easyr1("gspo_token", *DUAL),
    "policy_loss.cispo@easyr1": easyr1("cispo", *CLIP),
    "policy_loss.sapo@easyr1": easyr1("sapo", *TAUS),
    "policy_loss.vanilla@verl": verl("default", *DUAL),
    # veRL's gspo is the token form; it and sapo ignore the aggregation asked for.
    "policy_loss.gspo@verl": verl("gspo_token", *CLIP, mode="seq-mean-token-mean"),
    "policy_loss.sapo@verl": verl("sapo", *TAUS, mode="seq-mean-token-mean"),
    "policy_loss.cispo@verl": verl("cispo", *CLIP),
    "policy_loss.dppo_tv@verl": verl("dppo_tv", *DUAL),
    "policy_loss.dppo_kl@verl": verl("dppo_kl", *DUAL),
    "policy_loss.gpg@verl": verl("gpg", names={}),
    "policy_loss.reinforce@verl": verl("reinforce", names={}),
    "policy_loss.geo_mean@verl": verl_geo_mean,
    "policy_loss.kl_cov@verl": verl_kl_cov,
    "policy_loss.clip_cov@verl": verl_clip_cov,
    "policy_loss.bypass_mode@verl": bypass_mode,
    **{
        f"policy_loss.{theirs}{correction}@openrlhf": openrlhf(ours, *CLIP)
        for theirs, ours in (("vanilla", "default"), ("gspo", "gspo"))
        for correction in ("", "+tis", "+icepop", "+seq-mask-tis")
    },
    **{
        f"policy_loss_trl.{kind}@trl": trl
        for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")
    },
    "agg_loss": average,
    "value_loss": value_loss,
    "log_probs_from_logits": logprobs_from_logits,
    "entropy_loss@verl": entropy_loss,
    "entropy_from_logits@verl": entropy_from_logits,
    "rollout_correction.weights@verl": correction_weights,
    "rollout_correction.rejection@verl": correction_rejection,
    "rollout_correction.offpolicy_metrics@verl": correction_metrics,
    "rollout_correction.full@verl": correction_full,
}
