"""Adapters take cases that no reference was asked for: other shapes, masks, dtypes, averages, missing settings.

Each golden case in the repository is changed in several ways. Where a formula of the paper is written down, ours must
give what it gives; everywhere else finite numbers, or a ValueError that says what is wrong.
"""

import copy
from pathlib import Path

import pytest
from golden import replay
from golden.test_golden import explain

CASES = replay.load_cases(Path(__file__).parent / "cases")
# One case of each function that has rows of tokens.
BASES = {
    f"{case['fn']}@{case['variant']}": case
    for case in reversed(CASES)
    if replay.is_target(case) and {"response_mask", "mask"} & case["inputs"].keys()
}
WAYS = {
    "easyr1": ["token", "seq"],
    "verl": ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"],
}
# Settings that a reference has a default for.
OPTIONAL = ("eps", "norm_by_std", "shift_mean", "handle_zero_tail", "f_norm", "global_batch_info", "beta", "delta")


def mask_name(case):
    return "response_mask" if "response_mask" in case["inputs"] else "mask"


def each_input(case, change):
    case["inputs"] = {
        name: change(value) if isinstance(value, list) else value for name, value in case["inputs"].items()
    }


def one_row(case):
    each_input(case, lambda value: value[:1])


def one_token(case):
    each_input(case, lambda value: [row[:1] if isinstance(row, list) else row for row in value])


def none_trained(case):
    name = mask_name(case)
    case["inputs"][name] = [[0] * len(row) for row in case["inputs"][name]]


def with_holes(case):
    name = mask_name(case)
    holed = [[on and (t + i) % 3 != 1 for t, on in enumerate(row)] for i, row in enumerate(case["inputs"][name])]
    case["inputs"][name] = [list(map(int, row)) for row in holed]


def no_settings(case):
    case["params"] = {name: value for name, value in case["params"].items() if name not in OPTIONAL}


def numbered_groups(case):
    for name in ("index", "group_index", "uids"):
        if name in case["inputs"]:
            case["inputs"][name] = [row % 2 - 10**9 for row in range(len(case["inputs"][name]))]


CHANGES = {
    "one row": one_row,
    "one token": one_token,
    "one row of one token": lambda case: (one_row(case), one_token(case)),
    "no tokens": none_trained,
    "holes": with_holes,
    "defaults": no_settings,
    "numbered groups": numbered_groups,
    "float64": lambda case: case.update(dtype="float64"),
    "bfloat16": lambda case: case.update(dtype="bfloat16"),
    "float16": lambda case: case.update(dtype="float16"),
}


def faults(case, adapters):
    """What differs from the formula if there is one; whatever the reference says, it was not asked this."""
    table, explanations = adapters
    adapter = replay.find_adapter(table, case)
    case["status"] = "informative"
    explanation = explain(explanations, case)
    if explanation and explanation.expected:
        return replay.explained_faults(case, adapter, explanation)
    return replay.strange_numbers(case, adapter)


@pytest.mark.parametrize("name", BASES)
def test_a_changed_case_gives_the_formula_or_finite_numbers(name, adapters, subtests):
    for change, apply in CHANGES.items():
        with subtests.test(change):
            case = copy.deepcopy(BASES[name])
            apply(case)
            assert not faults(case, adapters)


@pytest.mark.parametrize("name", [name for name, case in BASES.items() if {"agg", "mode"} & case["params"].keys()])
def test_every_average_can_be_asked_for(name, adapters):
    key = "agg" if "agg" in BASES[name]["params"] else "mode"
    for way in WAYS.get(BASES[name]["variant"], WAYS["verl"]):
        case = copy.deepcopy(BASES[name])
        case["params"][key] = way
        assert not faults(case, adapters)
