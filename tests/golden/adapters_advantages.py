"""From golden case names to our advantages, KL terms, filters and length punishment.

`ALGOS` maps a function to a callable (inputs, params, case) -> mapping. Where ours differs from a reference because it
follows the paper, `explained_advantages.py` says why, and what the paper's formula gives.
"""

import torch

from r1_core import kl
from r1_core.advantages import (
    GAE,
    GPG,
    GRPO,
    OPO,
    RLOO,
    AdvantageInputs,
    DrGRPO,
    GRPOPassK,
    OptimalTokenBaseline,
    Reinforce,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
)
from r1_core.advantages.statistics import discounted_sums, masked_mean, masked_variance, whiten
from r1_core.filtering import MeanRange
from r1_core.kl_control import AdaptiveKL, FixedKL
from r1_core.reward_shaping import overlong_punishment


def group_ids(names):
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names])


def token_inputs(inputs):
    mask = inputs["response_mask"].bool()
    names = inputs.get("index", list(range(len(mask))))
    return AdvantageInputs(
        inputs["token_level_rewards"],
        group_ids(names),
        mask,
        values=inputs.get("values"),
        baselines=inputs.get("reward_baselines"),
        old_logprobs=inputs.get("old_log_probs"),
        squared_probs=inputs.get("sum_pi_squared"),
        correction_weights=inputs.get("rollout_is_weights"),
    )


def returns_of(inputs, gamma=1.0):
    return discounted_sums(inputs.shaped_rewards, inputs.mask, gamma)


def outcome(build):
    """An adapter for an estimator whose advantages are also its returns."""

    def adapter(inputs, params, case):
        advantages = build(params)(token_inputs(inputs))
        return {"advantages": advantages, "returns": advantages}

    return adapter


def grpo(params):
    return GRPO(params.get("eps", 1e-6)) if params.get("norm_by_std", True) else DrGRPO()


def gae(inputs, params, case):
    data, estimator = token_inputs(inputs), GAE(params.get("gamma", 1.0), params.get("lam", 1.0))
    return {"advantages": estimator(data), "returns": estimator.estimate(data)[1]}


def reinforce_plus_plus(inputs, params, case):
    data, gamma = token_inputs(inputs), params.get("gamma", 1.0)
    return {"advantages": ReinforcePlusPlus(gamma)(data), "returns": returns_of(data, gamma)}


def remax(inputs, params, case):
    data = token_inputs(inputs)
    return {"advantages": ReMax()(data), "returns": returns_of(data)}


def optimal_token(by_column):
    def adapter(inputs, params, case):
        data = token_inputs(inputs)
        estimator = OptimalTokenBaseline(params.get("handle_zero_tail", True), by_column, params.get("eps", 1e-8))
        return {"advantages": estimator(data), "returns": returns_of(data)}

    return adapter


def at_last_token(scores, mask):
    last = mask & (mask.cumsum(-1) == mask.sum(-1, keepdim=True))
    return torch.where(last, scores[:, None], 0.0)


def pipeline(build):
    """OpenRLHF's whole step: scores [N] and the KL per token to advantages and returns."""

    def adapter(inputs, params, case):
        mask, scores = inputs["response_mask"].bool(), torch.as_tensor(inputs["scores"]).double()
        data = AdvantageInputs(
            at_last_token(scores, mask),
            group_ids(inputs["group_index"]),
            mask,
            token_penalties=max(params["kl_coef"], 0.0) * inputs["kl"].double(),
            values=inputs.get("values"),
        )
        return build(data, params, scores)

    return adapter


def pipeline_gae(data, params, scores):
    estimator = GAE(params["gamma"], params["lam"], unbiased=False)
    return {"advantages": estimator(data), "returns": estimator.estimate(data)[1]}


def pipeline_reinforce(data, params, scores):
    estimator = ReinforcePlusPlus(params["gamma"], unbiased=False)
    return {"advantages": estimator(data), "returns": returns_of(data, params["gamma"])}


def pipeline_baseline(baseline, whitened):
    def build(data, params, scores):
        # A row without tokens has no place for its score in token_rewards, but it counts in its group.
        empty = ~data.mask.any(-1)
        data.token_rewards[empty, 0] = scores[empty]
        returns = Reinforce(baseline, whiten=False)(data)
        return {"advantages": Reinforce(baseline)(data) if whitened else returns, "returns": returns}

    return build


def kl_estimate(inputs, params, case):
    policy, reference, name = inputs["log_probs"], inputs["ref_log_probs"], params["kl_type"]
    return {"kl": kl.full(policy, reference) if name == "full" else kl.get(name)(policy, reference)}


def kl_controller(params):
    if params["type"] == "fixed":
        return FixedKL(params["init"])
    return AdaptiveKL(params["init"], params["target"], params["horizon"])


def kl_coefs(inputs, params, case):
    controller, coefs = kl_controller(params), []
    for divergence, samples in zip(inputs["kls"], inputs["n_steps"], strict=True):
        controller = controller.update(divergence, samples)
        coefs.append(controller.coef)
    return {"coefs": coefs}


def kl_in_reward(inputs, params, case):
    policy, reference, mask = inputs["old_log_probs"], inputs["ref_log_probs"], inputs["response_mask"].bool()
    controller = AdaptiveKL(params["init"], params["target"], params["horizon"])
    penalties = kl.reward_penalties(params["kl_type"], policy, reference, mask, controller.coef)
    divergence = kl.sequence_mean(kl.reward_penalties(params["kl_type"], policy, reference, mask, 1.0), mask)
    return {
        "token_level_rewards": inputs["token_level_scores"] - penalties,
        "current_kl": divergence,
        "coef_used": controller.coef,
        "coef_after": controller.update(divergence, len(mask)).coef,
    }


def online_filter(inputs, params, case):
    # The replay of the cases' authors hands every "scores" over as it is in the file, ours as a mapping too.
    scores = torch.as_tensor(case["inputs"]["scores"][params["key"]], dtype=torch.float64)
    keep = MeanRange(params["low"], params["high"]).keep(scores, group_ids(inputs["uids"]))
    return {"kept_rows": keep.nonzero().flatten()}


def soft_overlong(inputs, params, case):
    length = torch.tensor([inputs["response_length"]])
    penalty = overlong_punishment(length, params["max_response_length"], params["buffer"], params["factor"])
    return {"penalty": float(penalty[0])}


def whitened(inputs, params, case):
    """Ours is 0 off the mask; the references scale those values along, so the adapter does too."""
    values, mask = inputs["values"].double(), inputs["mask"].bool()
    shift = params.get("shift_mean", True)
    eps = params.get("eps", 1e-8)
    mean, variance = masked_mean(values, mask), masked_variance(values, mask)
    elsewhere = (values - mean) * torch.rsqrt(variance + eps) + (0.0 if shift else mean)
    return {"out": torch.where(mask, whiten(values, mask, eps, shift), elsewhere)}


def mean_of_rows(inputs, params, case):
    values, mask = (inputs[name].movedim(params.get("dim", -1), -1) for name in ("values", "mask"))
    return {"out": torch.vmap(masked_mean)(values, mask)}


ALGOS = {
    "adv.gae": gae,
    "adv.grpo": outcome(grpo),
    "adv.grpo_vectorized": outcome(grpo),
    "adv.grpo_passk": outcome(lambda params: GRPOPassK(params.get("norm_by_std", True), params.get("eps", 1e-6))),
    "adv.rloo": outcome(lambda params: RLOO()),
    "adv.rloo_vectorized": outcome(lambda params: RLOO()),
    "adv.opo": outcome(lambda params: OPO()),
    "adv.gpg": outcome(lambda params: GPG(params.get("f_norm", 1.0), counted="nonzero")),
    "adv.reinforce_plus_plus": reinforce_plus_plus,
    "adv.reinforce_plus_plus_baseline": outcome(lambda params: ReinforcePlusPlusBaseline()),
    "adv.remax": remax,
    "adv.optimal_token_baseline": optimal_token(by_column=True),
    "adv.tir_optimal_token_baseline": optimal_token(by_column=False),
    "adv_pipeline.gae": pipeline(pipeline_gae),
    "adv_pipeline.reinforce": pipeline(pipeline_reinforce),
    "adv_pipeline.rloo": pipeline(pipeline_baseline("leave_one_out", whitened=False)),
    "adv_pipeline.group_norm": pipeline(pipeline_baseline("group_norm", whitened=False)),
    "adv_pipeline.dr_grpo": pipeline(pipeline_baseline("mean", whitened=False)),
    "adv_pipeline.reinforce_baseline": pipeline(pipeline_baseline("mean", whitened=True)),
    "kl": kl_estimate,
    "kl_controller": kl_coefs,
    "kl_in_reward": kl_in_reward,
    "online_filter": online_filter,
    "soft_overlong": soft_overlong,
    "stats.masked_mean": lambda inputs, params, case: {"out": masked_mean(inputs["values"], inputs["mask"])},
    "stats.masked_mean_dim": mean_of_rows,
    "stats.masked_var": lambda inputs, params, case: {
        "out": masked_variance(inputs["values"], inputs["mask"], params["unbiased"])
    },
    "stats.masked_whiten": whitened,
    "stats.masked_whiten_noshift": whitened,
}
