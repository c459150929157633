"""Golden cases of RLPR's and LMM-R1's trainers: advantages, rewards with KL and clip, controllers, the EMA-std filter.

Their `args` arrive as params, in plain Python. What they test of rewards and of text is not r1-core's.
"""

import math

import torch
from golden.adapters_advantages import at_last_token, group_ids
from golden.adapters_policy import own_totals

from r1_core import kl
from r1_core.advantages import GAE, GRPO, AdvantageInputs, DrGRPO, Reinforce, ReinforcePlusPlus
from r1_core.advantages.statistics import discounted_sums, group_statistics
from r1_core.filtering import EMAStd
from r1_core.kl_control import AdaptiveKL
from r1_core.losses import PPOClip, ValueLoss, aggregate
from r1_core.objective import Objective
from r1_core.types import LossInputs

# RLPR counts samples in groups of less spread than this as filtered.
NO_SPREAD = 1e-6


def floats(rows):
    return torch.tensor(rows, dtype=torch.float32)


# --- LMM-R1 ------------------------------------------------------------------------------------------------------


def bounds(params, key):
    return tuple(params[key]) if params.get(key) else None


def experience(params, rewards):
    """Scores on the last trained token, and the KL off every token unless its coefficient is below 0."""
    mask = torch.tensor(params["action_mask"]).bool()
    groups = torch.arange(len(mask)) // params.get("n_samples_per_prompt", 1)
    penalties = max(params["kl_coef"], 0.0) * floats(params["kl"]).double()
    values = floats(params["values"]) if params.get("values") else None
    placed = at_last_token(floats(rewards).double(), mask)
    return AdvantageInputs(placed, groups, mask, token_penalties=penalties, values=values)


def approx_kl(inputs, params, case):
    return {"out": kl.get(params["estimator"])(floats(params["log_probs"]), floats(params["base_log_probs"]))}


def token_reward(inputs, params, case):
    return {"token_rewards": experience(params, params["reward"]).clip(bounds(params, "clip_range")).shaped_rewards}


BASELINES = {"rloo": "leave_one_out", "reinforce_baseline": "mean", "group_norm": "group_norm", "dr_grpo": "mean"}


def advantages(inputs, params, case):
    data, kind = experience(params, params["rewards"]), params["estimator"]
    clip = bounds(params, "reward_clip_range")
    shared = {"norm_by_std": not params["no_advantage_std_norm"], "reward_clip": clip}
    if kind == "gae":
        estimator = GAE(params["gamma"], params["lambd"], unbiased=False, **shared)
        found, returns = estimator(data), estimator.estimate(data)[1]
    elif kind == "reinforce":
        found = ReinforcePlusPlus(params["gamma"], unbiased=False, **shared)(data)
        returns = discounted_sums(data.clip(clip).shaped_rewards, data.mask, params["gamma"])
    else:
        found = Reinforce(BASELINES[kind], whiten=kind not in ("group_norm", "dr_grpo"), **shared)(data)
        returns = Reinforce(BASELINES[kind], whiten=False, reward_clip=clip)(data)
    # What is logged as return is the sum of an answer's rewards, the first token's undiscounted return.
    sums = returns[torch.arange(len(returns)), data.mask.long().argmax(-1)]
    if kind in ("gae", "reinforce"):
        sums = torch.where(data.mask, data.clip(clip).shaped_rewards, 0.0).sum(-1)
    return {"advantages": found, "returns": returns, "return_sums": sums}


def adaptive_kl(inputs, params, case):
    controller, coefs = AdaptiveKL(params["init"], params["target"], params["horizon"]), []
    for divergence, samples in params["updates"]:
        controller = controller.update(divergence, samples)
        coefs.append(controller.coef)
    return {"out": coefs}


def way(params):
    return "token" if params.get("token_level_loss", True) else "seq"


def policy_loss(inputs, params, case):
    mask = torch.tensor(params["action_mask"]).bool()
    logprobs, given, old = (floats(params[name]) for name in ("log_probs", "advantages", "old_log_probs"))
    objective = Objective(PPOClip(params["clip_eps"], params["clip_eps"], math.inf), way(params))
    return {"out": objective(LossInputs(logprobs, mask, given, old, own_totals(mask))).loss}


def value_loss(inputs, params, case):
    mask = torch.tensor(params["action_mask"]).bool()
    values, old, returns = (floats(params[name]) for name in ("values", "old_values", "returns"))
    errors, _ = ValueLoss(params["clip_eps"])(values, old, returns, mask)
    return {"out": aggregate(errors, mask, way(params), own_totals(mask))}


# --- RLPR --------------------------------------------------------------------------------------------------------


def outcome(estimator):
    def adapter(inputs, params, case):
        lengths, scores = torch.tensor(params["lengths"]), floats(params["scores"])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        data = AdvantageInputs(at_last_token(scores.double(), mask), group_ids(params["groups"]), mask)
        stds = group_statistics(scores, data.group_ids).std
        share = float((stds < NO_SPREAD).float().mean())
        return {"advantages": estimator(data), "stds": stds, "filter_rate": share}

    return adapter


def batches(params):
    """Rewards and groups of one generated batch after the other."""
    for batch in params["stream"]:
        rewards = floats(batch)
        yield rewards.flatten(), torch.arange(len(rewards)).repeat_interleave(rewards.shape[1])


def mean_std(rewards, groups):
    """The mean over samples of their groups' finite stds, in a list that is empty if there is none."""
    stds = group_statistics(rewards, groups).std
    stds = stds[stds.isfinite()]
    return [float(stds.mean())] if len(stds) else []


def ema_std_easyr1(inputs, params, case):
    """Its average moves with every generated batch, before that batch is judged: our filter with a step for each."""
    ema = EMAStd(params["beta"], params["ema_ratio"], ema_start_step=0, filter_start_step=1, never_empty=False)
    stream, steps, wanted = batches(params), [], params["rollout_batch_size"]
    while True:
        step, kept, threshold, rate, lists, means, used = len(steps) + 1, [], None, None, [], [], 0
        while len(kept) < wanted:
            rewards, groups = next(stream, (None, None))
            if rewards is None:
                return {"out": steps}
            used, chosen = used + 1, groups.unique().tolist()
            if step >= params["ema_start_step"]:
                ema = ema.observe(rewards, groups)
                means += mean_std(rewards, groups)
            if step >= params["filter_start_step"] and ema.average is not None:
                threshold = ema.threshold
                passed = groups[ema.keep(rewards, groups)].unique().tolist()
                rate = 1 - len(passed) / len(chosen)
                # With nothing left it trains on everything.
                if passed:
                    chosen = passed
                    lists.append(passed)
            kept += chosen
        steps.append(
            {
                "step": step,
                "gen_batches_used": used,
                "ema_mean": ema.average,
                "batch_mean_stds": means,
                "threshold_last": threshold,
                "filter_rate_last": rate,
                "kept_groups_per_filtered_gen_batch": lists,
                "final_group_ids": kept[:wanted],
            }
        )


def ema_std_openbmb(inputs, params, case):
    """Its average moves once a step, with all that the step generated, and a step is judged by those before: ours."""
    ema = EMAStd(params["beta"], params["ema_ratio"], params["ema_start_step"], params["filter_start_step"], False)
    stream, steps, wanted = batches(params), [], params["rollout_batch_size"]
    surplus = []
    while True:
        step, kept, rate, lists, seen = len(steps) + 1, list(surplus), None, [], []
        threshold = ema.threshold
        while len(kept) < wanted:
            rewards, groups = next(stream, (None, None))
            if rewards is None:
                return {"steps": steps, "end": "stream exhausted"}
            passed = groups[ema.keep(rewards, groups)].unique().tolist()
            if threshold is not None:
                rate = 1 - len(passed) / len(groups.unique())
                lists.append(passed)
            kept += [[len(seen), group] for group in passed]
            seen.append((rewards, groups + 1000 * len(seen)))
        steps.append(
            {
                "step": step,
                "gen_batches_used": len(seen),
                "threshold_lower": threshold or 0,
                "filter_rate_last": rate,
                "kept_groups_per_filtered_gen_batch": lists,
                "final_group_ids": kept[:wanted],
                "ema_mean": None if threshold is None else ema.average,
            }
        )
        if not params.get("filter_cache_regenerate", True):
            surplus = [[number - len(seen), group] for number, group in kept[wanted:]]
        ema = ema.observe(*(torch.cat(parts) for parts in zip(*seen, strict=True)))


ALGOS = {
    "approx_kl@lmm_r1": approx_kl,
    "token_reward@lmm_r1": token_reward,
    "advantages@lmm_r1": advantages,
    "adaptive_kl@lmm_r1": adaptive_kl,
    "policy_loss@lmm_r1": policy_loss,
    "value_loss@lmm_r1": value_loss,
    "grpo_advantage": outcome(GRPO()),
    "grpo_nostd_advantage": outcome(DrGRPO()),
    "ema_std_filter@easyr1_rlpr": ema_std_easyr1,
    "ema_std_filter@openbmb_rlpr": ema_std_openbmb,
}
