"""From golden case names of RLPR to our reference-probability reward.

`FUNCTIONS` maps a function to a callable (args, case) that returns what `expected` holds, or a part of it; `EXPLAINED`
maps it to a function of the case that says where ours differs and why.
"""

import math
from functools import lru_cache

import torch

from r1_rewards import format as response_format
from r1_rewards import repetition
from r1_rewards.reference.reference_probability import LOG_HALF, Settings, combine, prompted_format
from r1_rewards.reference.shaping import aggregate, bins, shaping
from r1_rewards.reference.splice import splice, splice_alone

EOS = "<|endoftext|>"
ROUNDED = 2**-8  # OpenBMB/RLPR passes its score through bfloat16


MODES = {"R1": "r1", "R1_nothink": "r1_nothink"}


def mode_of(args):
    return MODES.get(args["mode"], f"unknown {args['mode']}")


def picked(args):
    values = torch.tensor([float(value) for value in args["log_probs"]])
    values = values.to(getattr(torch, args.get("dtype", "float32"))).double().tolist()
    return [value for value, kept in zip(values, args["mask"], strict=True) if kept]


def aggregated(args, case):
    value = aggregate(picked(args), args["aggregation"])
    return min(max(value, 0.0), 1.0) if case["variant"] == "easyr1_rlpr" and not math.isnan(value) else value


def one_more_adjusted(args, case):
    *others, last = picked(args)
    return aggregate([*others, min(last, LOG_HALF)], args["aggregation"])


def total(args, case):
    settings = Settings(
        format_weight=args["format_weight"],
        format_mode=mode_of(args),
        aggregation=args["aggregation"],
        shaping_function_name=args["shaping"],
        discrete_function_name=args.get("discrete", "identity"),
        use_debiasing=args["use_debiasing"],
        clip=case["variant"] == "easyr1_rlpr",
    )
    parts = combine(picked(args), args["response"], float(args["scoreA"] or 0.0), settings).parts
    return parts | {"scoreA": parts["score_a"], "scoreB": parts["score_b"]}


def base_from_logits(args, case):
    first = len(args["prompt_ids"]) - 1
    logprobs = []
    for row, token in zip(args["logits"][first:], args["gt_ids"], strict=False):
        logprobs.append(row[token] - math.log(sum(math.exp(logit) for logit in row)))
    return min(max(aggregate(logprobs, args["aggregation"]), 0.0), 1.0)


@lru_cache(maxsize=1)
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def spliced(args, case):
    mode, rule = mode_of(args), "strict" if case["variant"] == "easyr1_rlpr" else "lenient"
    coder = tokenizer(case["folder"] / "rlpr_tokenizer")
    # EasyR1_RLPR's padding is the end token here, so that it masks the end token out with it.
    eos = "" if rule == "strict" else EOS
    found = splice(args["response"].removesuffix(EOS), args["ground_truth"], coder, eos=eos, mode=mode, rule=rule)
    if found is None:
        return {"scored": False, "masked_token_ids": []}
    start = 0 if rule == "strict" else found.reference_start
    kept = [place for place in found.scored if place - start < args["max_response_length"]]
    whole = len(kept) == len(found.scored)
    return {
        "scored": bool(kept),
        "text": args["prompt"] + found.text if whole else None,
        "masked_token_ids": [found.ids[place] for place in kept],
        "mask_indices_in_response": [place - start for place in kept],
    }


def base_end_to_end(args, case):
    coder = tokenizer(case["folder"] / "rlpr_tokenizer")
    prompt = coder.apply_chat_template(args["messages"], tokenize=False, add_generation_prompt=True)
    easyr1 = case["variant"] == "easyr1_rlpr"
    alone = splice_alone(args["ground_truth"], coder, eos=EOS, context="suffix" if easyr1 else "plain")
    shift = len(coder(prompt, add_special_tokens=False)["input_ids"])
    logprobs = []
    for place in alone.scored:
        position = shift + place - 1  # the logits before a token predict it
        logits = [-((7 * token + 3 * position) % 11) / 5 for token in range(len(coder))]
        logprobs.append(logits[alone.ids[place]] - math.log(sum(map(math.exp, logits))))
    return {"scoreA": aggregate(logprobs, args["aggregation"]), "text": prompt + alone.text}


def repeated(args, case):
    limit = args["max_repetitions_limit"]
    return repetition.score(args["text"], ngram=args["window_size"], limit=limit).value


FUNCTIONS = {
    "aggregate": aggregated,
    "aggregate_one_more_adjusted": one_more_adjusted,
    "shaping": lambda args, case: shaping(args["name"])(float(args["x"])),
    "map_to_bins": lambda args, case: bins(f"bin_{args['num_bins']}")(float(args["score"])),
    "format_reward": lambda args, case: response_format.score(args["response"], mode=mode_of(args)).value,
    "format_reward_validation": lambda args, case: prompted_format(args["response"], args["prompt"], mode_of(args)),
    "total_reward": total,
    "score_a": base_from_logits,
    "score_a_end_to_end": base_end_to_end,
    "splice_reference": spliced,
    "repetition_penalty": repeated,
}


def explain(case):
    """Return why a case is not replayed: ours differs from the reference there on purpose."""
    args, expected = case["args"], case["expected"]
    truth = args.get("ground_truth", "x")
    if case["fn"] in ("splice_reference", "score_a_end_to_end") and truth != truth.strip():
        return "ours drops blanks around the reference, for both scores alike"
    if case["fn"] in ("splice_reference", "score_a_end_to_end") and not truth:
        return "the reference scores an empty answer on the closing tag, or as certain; ours leaves it unscored"
    if case["variant"] == "easyr1_rlpr":
        return explain_easyr1(case, args, expected)
    return None


def explain_easyr1(case, args, expected):
    if case["fn"] == "aggregate" and "nan" in args["log_probs"]:
        return "NaN among the log-probs is 1.0 in the reference, the highest reward; ours leaves it unscored"
    if case["fn"] == "shaping" and args["name"] == "one_minus":
        return "the reference lacks a shaping that OpenBMB/RLPR has"
    if case["fn"] == "total_reward" and args["format_weight"] == -1:
        return "the reference computes 2p - f for a format weight of -1; OpenBMB/RLPR's rule is ours"
    in_prompt = case["fn"] == "splice_reference" and args["ground_truth"] in args["prompt"]
    if in_prompt and not expected["scored"]:
        return "the reference finds the answer's text in the prompt and scores nothing; ours knows its place"
    return None
