"""Every verdict that a reference gives, ours gives too, or is right where it is wrong, or says why not.

`pytest tests/golden --golden-dir DIR` replays any folder of the same format; `-rs` lists what was skipped and why.
"""

import json
import math
import os
from pathlib import Path

import pytest
from golden import graders, graders_rlpr

from r1_rewards import RewardInput
from r1_rewards import load as load_verifier
from r1_rewards import math as math_verifier

HERE = Path(__file__).parent
AGREEMENT = 0.97
CANARIES = ("/tmp/golden_reward_canary", "/tmp/golden-reward-canary")
LOOSE = {"aggregate", "aggregate_one_more_adjusted", "total_reward"}


@pytest.fixture(scope="module")
def folder(request):
    return request.config.getoption("--golden-dir", default=None) or HERE / "cases"


def load(folder, name):
    file = folder / name
    if not file.exists():
        pytest.skip(f"{folder} has no {name}")
    return json.loads(file.read_text(encoding="utf-8"))


def test_exact_verdicts_are_those_of_the_references(folder):
    faults, replayed = [], 0
    for case in load(folder, "rewards.json"):
        if case["grader"] not in graders.EXACT:
            assert case["grader"] in graders.BY_TRUTH, f"no adapter for {case['grader']}"
            continue
        replayed += 1
        found = told(graders.differences, case)
        if found and not told(graders.explain_verdict, case):
            faults.append(f"{case['id']}: {found}")
    assert replayed
    assert not faults, "\n".join(faults)


def test_math_follows_the_truth_and_accepts_nothing_wrong(folder):
    cases = {}
    for case in load(folder, "rewards.json"):
        if "truth" in case:
            cases[graders.text_of(case, "response"), graders.text_of(case, "ground_truth")] = case["truth"]
    verdicts = {pair: math_verifier.score(*pair).value == 1.0 for pair in cases}
    accepted = [pair for pair, right in cases.items() if verdicts[pair] and not right]
    agreed = sum(verdicts[pair] == right for pair, right in cases.items())
    assert not accepted, accepted
    assert agreed >= AGREEMENT * len(cases), f"{agreed} of {len(cases)}"


def test_hostile_answers_get_a_verdict_within_the_deadline_and_do_nothing(folder):
    for canary in CANARIES:
        assert not os.path.exists(canary), f"{canary} is there before the test: remove it"
    cases = [case for case in load(folder, "rewards.json") if case.get("pathological")]
    inputs = [RewardInput(graders.text_of(case, "response"), graders.text_of(case, "ground_truth")) for case in cases]
    with load_verifier("math", timeout=60.0) as verifier:
        scores = verifier(inputs)
    assert inputs
    for case, score in zip(cases, scores, strict=True):
        assert score.error is None, f"{case['id']}: {score.error}"
        assert score.value in (0.0, 1.0)
    assert not any(map(os.path.exists, CANARIES))


@pytest.mark.parametrize("name", ["r1v.json", "lmm_r1.json", "rlpr.json"])
def test_functions_give_what_the_references_give(folder, name):
    faults, replayed = [], 0
    for case in load(folder, name):
        run = (graders.FUNCTIONS | graders_rlpr.FUNCTIONS).get(case["fn"])
        if run is None:  # an estimator or a loss
            continue
        if explained(case):
            continue
        replayed += 1
        fault = told(difference, run, case | {"folder": folder})
        if fault:
            faults.append(f"{case['id']} {case['fn']}@{case['variant']}: {fault}")
    assert replayed
    assert not faults, "\n".join(faults)


def told(compare, *arguments):
    """Return what a comparison finds; one that raises has found that, and hides no other case."""
    try:
        found = compare(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "; ".join(found) if isinstance(found, list) else found


def explained(case):
    """Return whether a difference has a reason; an explanation that expects another shape of case has none."""
    for explain in (graders.explain, graders_rlpr.explain):
        try:
            if explain(case):
                return True
        except (KeyError, IndexError, TypeError):
            continue
    return False


def test_a_case_that_raises_is_a_fault_of_its_own():
    assert told(lambda: {}["query"]) == "KeyError: 'query'"
    assert told(lambda: ["a", "b"]) == "a; b"
    assert not explained({"fn": "math_verifier_http", "args": {}, "expected": 1.0})
    assert explained({"fn": "math_verifier_http", "args": {"request": {"query": []}}, "expected": {"status": 200}})


def difference(run, case):
    wanted = case["expected"]
    if isinstance(wanted, dict) and "raises" in wanted:
        with pytest.raises(ValueError, match=r"."):
            run(case["args"], case)
        return None
    found = run(case["args"], case)
    if "json" in (wanted if isinstance(wanted, dict) else ()):  # a server's answer for one sample
        wanted = {key: values[0] for key, values in wanted["json"].items()}
    if not isinstance(wanted, dict):
        wanted, found = {"value": wanted}, {"value": found}
    tolerance = graders_rlpr.ROUNDED if case["variant"] == "openbmb_rlpr" and case["fn"] in LOOSE else 2e-5
    wrong = [key for key in wanted if found.get(key) is not None and not close(wanted[key], found[key], tolerance)]
    return "; ".join(f"{key} is {found[key]!r}, not {wanted[key]!r}" for key in wrong)


def close(theirs, ours, tolerance):
    if isinstance(theirs, str) and isinstance(ours, float):
        theirs = float(theirs)
    if not (isinstance(theirs, (int, float)) and isinstance(ours, (int, float))):
        return theirs == ours
    if math.isnan(theirs) or math.isnan(ours):
        return math.isnan(theirs) and math.isnan(ours)
    return theirs == ours or abs(theirs - ours) <= tolerance * max(abs(theirs), abs(ours)) + 1e-9
