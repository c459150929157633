"""From golden grader names to our verifiers.

A grader whose case carries `truth`, a judgement of mathematical equality, is followed there only as far as it is right;
`exact` graders are verdicts that we offer by name, and are matched to the letter.
"""

import hashlib
import re

from r1_rewards import (
    dapo,
    geo3k,
    gsm8k_verl,
    lmm_r1,
    math,
    math_dapo,
    math_easyr1,
    math_verl,
    numeric,
    prime_math,
    r1v,
    r1v_easyr1,
    search_r1,
)
from r1_rewards import format as response_format
from r1_rewards.reading import extract, prm800k


def text_of(case, key):
    """Return a text of a case, which may be written in runs: [[string, times], …]."""
    return case[key] if key in case else "".join(string * times for string, times in case.get(f"{key}_rle", []))


def parts(module):
    return lambda response, truth, params: dict(module.score(response, truth, **params).parts)


def value(module):
    return lambda response, truth, params: module.score(response, truth, **params).value


def correct(response, truth, params):
    return {"correct": bool(prime_math.score(response, truth).value), "extracted": None}


def signed(response, truth, params):
    found = math_dapo.score(response, truth, **params)
    return {"score": found.value, "acc": bool(found.parts["accuracy"])}


def table(response, truth, params):
    """Math-Verify's own tables say where it may look: only in formulas, only at numbers, or at both."""
    nowhere = extract.boxed(response) is None and (
        extract.formulas(response) is None or BROKEN_FORMULA.search(response)
    )
    if params.get("match_types") == ["latex"] and nowhere:
        return 0
    settings = {"digits": params.get("precision", 6), "strict": params.get("strict", True)}
    return int(math.score(response, truth, **settings).value)


# Math-Verify reads $…$ and \\(…\\) on one line only.
BROKEN_FORMULA = re.compile(r"(?<!\$)\$(?!\$)[^$\n]*\n[^$]*\$(?!\$)|\\\([^)\n]*\n[^)]*\\\)")

EXACT = {
    "dapo_normalize": lambda response, truth, params: dapo.normalise(response),
    "easyr1_android_gui": lambda response, truth, params: {"accuracy": numeric.score(response, truth).value},
    "easyr1_dapo": parts(dapo),
    "easyr1_math": parts(math_easyr1),
    "easyr1_r1v": parts(r1v_easyr1),
    "mathruler_extract": lambda response, truth, params: math_easyr1.boxed(response),
    "mathruler_grade": lambda response, truth, params: prm800k.grade(response, truth),
    "math_verify_plain": table,
    "math_verify_table": table,
    "trl_think_format": lambda response, truth, params: response_format.score(response, mode="think").value,
    "verl_geo3k": value(geo3k),
    "verl_gsm8k": value(gsm8k_verl),
    "verl_math": value(math_verl),
    "verl_math_dapo": signed,
    "verl_prime_math": correct,
    "verl_search_r1_em": value(search_r1),
}
# Judged by `truth` only: they are Math-Verify over the whole response, which also takes a right number in the prose.
BY_TRUTH = {"math_verify", "trl_accuracy", "verl_math_verify"}


def differences(case):
    """Run an exact grader and say, in words, where the answers differ; nothing if nowhere."""
    found = EXACT[case["grader"]](text_of(case, "response"), text_of(case, "ground_truth"), case.get("params") or {})
    wanted = case.get("table_expected", case["expected"])
    if isinstance(wanted, dict) and "sha256" in wanted:
        found, wanted = hashlib.sha256(found.encode()).hexdigest(), wanted["sha256"]
    if isinstance(wanted, dict):
        pairs = [(key, wanted[key], found[key]) for key in wanted if found.get(key) is not None]
    else:
        pairs = [("value", wanted, found)]
    return [f"{key}: {ours!r}, not {theirs!r}" for key, theirs, ours in pairs if not same(theirs, ours)]


def same(theirs, ours):
    numbers = isinstance(theirs, (int, float)) and isinstance(ours, (int, float))
    return abs(theirs - ours) < 1e-9 if numbers else theirs == ours


def explain_verdict(case):
    """Return why ours differs from an exact grader in this case, or None."""
    if case["expected"] == "timeout":
        return "the reference does not end; ours refuses to compute it"
    if max(len(text_of(case, "response")), len(text_of(case, "ground_truth"))) > 1_000:
        return "the reference reads answers of any length; ours has bounds on length and nesting"
    return None


LMM_R1_MARKERS = {"chatml": "<|im_start|>assistant\n", "base": "Assistant: ", "gemma3": "<start_of_turn>model\n"}
LMM_R1_ENDS = ("<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<pad>")


def lmm_r1_reward(args, case):
    """The server's protocol is `remote`'s affair; here its reward of the response that it cuts out of the query."""
    request = args["request"]
    response = request["query"][0].partition(LMM_R1_MARKERS[args["prompt_template"]])[2]
    for end in LMM_R1_ENDS:
        response = response.replace(end, "")
    score = lmm_r1.score(response.strip(), request["labels"][0])
    return {"acc_rewards": score.parts["accuracy"], "format_rewards": score.parts["format"], "rewards": score.value}


FUNCTIONS = {
    "r1v_accuracy": lambda args, case: r1v.score(args["content"], args["solution"]).parts["accuracy"],
    "r1v_format": lambda args, case: r1v.score(args["content"], "").parts["format"],
    "math_verifier_http": lmm_r1_reward,
}


def explain(case):
    """Return why ours differs in a case of LMM-R1's server or of R1-V, or None."""
    if case["fn"] == "r1v_accuracy":
        answer, truth = case["args"]["content"], case["args"]["solution"]
        if case["expected"] == 1.0 and r1v.answer_body(truth) in answer.partition("<answer>")[0]:
            return "the reference finds a right number anywhere in the response; ours reads the answer tag"
        if case["expected"] == 0.0 and "\n" in (r1v.answer_body(answer) or ""):
            return "the reference compares answers of one line only as text"
    if case["fn"] == "math_verifier_http":
        return explain_lmm_r1(case["args"], case["expected"])
    return None


def explain_lmm_r1(args, expected):
    query, labels = args["request"]["query"], args["request"].get("labels", [])
    if expected["status"] != 200 or len(query) != len(labels) or len(query) != 1:
        return "this is the protocol, which `remote` tests"
    if "<pad>" in query[0]:
        return "the reference leaves gemma's padding in the response, and so refuses its format"
    marker = LMM_R1_MARKERS.get(args["prompt_template"])
    if marker is None:
        return "the reference's marker of phi is an alternation that matches the first <"
    if not query[0].partition(marker)[2]:
        return "the reference grades the prompt where there is no response"
    if args["disable_format_reward"]:
        return "ours always has a format part"
    return None
