"""Replays golden cases: what a reference computed, against what an adapter of ours computes.

A case has `id fn variant dtype status inputs params expected`. An adapter is a function (inputs, params, case) that
returns a mapping with the keys of `expected`; adapters are found under "fn@variant" or "fn". Numeric lists arrive as
tensors of the case's dtype (half precision as float32, in which ours computes), masks and ids as int64. For "grad_x",
inputs["x"] requires grad and the gradient of the sum of the "loss" (or of the first differentiable output) is taken
unless the adapter returns it. Advantages and returns are compared under the mask.

Cases with `args` in place of inputs and params (rlpr.json, lmm_r1.json) arrive as params, plain Python; an answer
without a name is called "out".

Where ours differs on purpose, an `Explanation` says why, and what ours gives instead: that is compared like any answer.
"""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Case = dict[str, Any]
Adapter = Callable[[dict[str, Any], dict[str, Any], Case], Mapping[str, Any]]


@dataclass(frozen=True)
class Explanation:
    """Why ours differs from the reference, and the answers that take the place of the reference's, by name."""

    reason: str
    expected: Mapping[str, Any] = field(default_factory=dict)
    raises: str | None = None  # part of the message of the ValueError that ours raises instead


# The explanation of a case, or None where ours gives what the reference does.
Explain = Callable[[Case], Explanation | None]

TOLERANCES = {
    "float64": (1e-7, 1e-9),
    "float32": (2e-5, 2e-6),
    "float16": (5e-3, 1e-3),
    "bfloat16": (4e-2, 1e-2),
    "int64": (0.0, 0.0),
}
INTEGERS = {"response_mask", "mask", "labels", "response_ids"}
PLAIN = {"index", "group_index", "kls", "n_steps", "uids", "lengths", "response_length"}
MASKED = {"advantages", "returns", "token_rewards"}
PARTITION_SLACK = 1.02


def load_cases(folder: Path, elsewhere: Collection[str] = ()) -> list[Case]:
    """Read every algos_*.json, rlpr*.json and lmm_r1*.json of a folder, in the last two not the functions `elsewhere`.

    Raises ValueError if there is no such file.
    """
    files = sorted(file for kind in ("algos_", "rlpr", "lmm_r1") for file in folder.glob(f"{kind}*.json"))
    if not files:
        raise ValueError(f"{folder} has no algos_*.json; give --golden-dir a folder of golden cases")
    cases = [case for file in files for case in json.loads(file.read_text(encoding="utf-8"))]
    return [unified(case) for case in cases if "args" not in case or case["fn"] not in elsewhere]


def unified(case: Case) -> Case:
    """The case in the form of algos_*.json, if it has `args`."""
    if "args" not in case:
        return case
    args, answer = case["args"], case["expected"]
    name = "token_rewards" if case["fn"] == "token_reward" else "out"
    return {
        "dtype": args.get("dtype", "float32"),
        "status": "normative",
        **{key: value for key, value in case.items() if key != "args"},
        "inputs": {},
        "params": args,
        "expected": answer if isinstance(answer, dict) else {name: answer},
    }


def find_adapter(adapters: Mapping[str, Adapter], case: Case) -> Adapter | None:
    return adapters.get(f"{case['fn']}@{case['variant']}", adapters.get(case["fn"]))


def is_target(case: Case) -> bool:
    """Whether the reference's answer is one to match: it neither raised nor is marked as noise."""
    return case["status"] == "normative" and "raises" not in case["expected"]


def target_faults(case: Case, adapter: Adapter) -> list[str]:
    """Say where ours differs from the reference; that ours refuses the case is a difference, too."""
    try:
        return differences(case, adapter)
    except ValueError as error:
        return [f"raises {error}"]


def explained_faults(case: Case, adapter: Adapter, explanation: Explanation) -> list[str]:
    """Say where ours differs from what the explanation states instead."""
    if explanation.raises is None:
        reference = case["expected"] if is_target(case) else {}
        return differences({**case, "expected": {**reference, **explanation.expected}}, adapter)
    try:
        got = run(case, adapter)
    except ValueError as error:
        return [] if explanation.raises in str(error) else [f"raises {error}, not {explanation.raises}"]
    return [f"gives {got}, but should raise {explanation.raises}"]


def strange_numbers(case: Case, adapter: Adapter) -> list[str]:
    """Say which answers of ours are not finite, for a case without an answer to compare with; it may be refused."""
    try:
        got = run(case, adapter)
    except ValueError:
        return []
    return [f"{key} is not finite" for key, value in got.items() if not all(map(_is_finite, _leaves(value)))]


def run(case: Case, adapter: Adapter) -> dict[str, Any]:
    return dict(adapter(decode_inputs(case), decode(case["params"]), case))


def differences(case: Case, adapter: Adapter, slack: float = 1.0) -> list[str]:
    """Run one case and say, in words, where the answers differ by more than slack tolerances; nothing if nowhere."""
    inputs = decode_inputs(case)
    got = dict(adapter(inputs, decode(case["params"]), case))
    if case["fn"] == "partition":
        return _partition_faults(case, got["partitions"])
    expected = case["expected"]
    for key in expected:
        if key.startswith("grad_") and key not in got:
            got[key] = _gradient(expected, got, inputs[key.removeprefix("grad_")])
    metrics = expected.get("metrics", {})
    pairs = [(f"metrics.{key}", metrics[key], got["metrics"][key]) for key in metrics if key in got.get("metrics", {})]
    faults: list[str] = []
    for key, value in expected.items():
        if key in ("metrics", "reference_raises"):
            continue
        if key not in got:
            faults.append(f"{key}: not returned")
        else:
            pairs.append((key, value, got[key]))
    for key, value, ours in pairs:
        mask = shown(case) if key in MASKED else None
        faults += [f"{key} {fault}" for fault in _mismatch(value, ours, case["dtype"], mask, slack)]
    return faults


def shown(case: Case) -> Any:
    """The mask under which advantages count, None if the case has none."""
    return case["inputs"].get("response_mask", case["params"].get("action_mask"))


def decode(value: Any) -> Any:
    """Turn the strings "nan", "inf" and "-inf" of a JSON value into floats."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value


def rounded(values: list[float], dtype: str) -> list[float]:
    """The numbers as a tensor of this dtype holds them."""
    return list(map(float, torch.tensor(values, dtype=getattr(torch, dtype))))


def decode_inputs(case: Case) -> dict[str, Any]:
    half, dtype = None, torch.float64 if case["dtype"] == "float64" else torch.float32
    if case["dtype"] in ("float16", "bfloat16"):
        half = getattr(torch, case["dtype"])
    inputs: dict[str, Any] = {}
    for name, value in case["inputs"].items():
        if name in INTEGERS:
            inputs[name] = torch.tensor(value, dtype=torch.int64)
        elif isinstance(value, list) and name not in PLAIN:
            inputs[name] = torch.tensor(decode(value), dtype=half or dtype).to(dtype)
        else:
            inputs[name] = decode(value)
        if f"grad_{name}" in case["expected"]:
            inputs[name].requires_grad_(True)
    return inputs


def _gradient(expected: Mapping[str, Any], got: Mapping[str, Any], leaf: torch.Tensor) -> torch.Tensor:
    candidates = [got.get("loss"), *(got.get(key) for key in expected)]
    output = next((item for item in candidates if isinstance(item, torch.Tensor) and item.requires_grad), None)
    if output is None:
        return torch.zeros_like(leaf)
    (gradient,) = torch.autograd.grad(output.sum(), leaf, retain_graph=True, allow_unused=True)
    return torch.zeros_like(leaf) if gradient is None else gradient


def _mismatch(expected: Any, got: Any, dtype: str, mask: Any, slack: float) -> list[str]:
    """Return at most one sentence: the first place where the two differ by more than the tolerance."""
    want, have = list(_leaves(expected)), list(_leaves(got))
    if len(want) != len(have):
        return [f"has {len(have)} numbers, not {len(want)}"]
    counted = list(_leaves(mask)) if mask is not None else []
    rtol, atol = (slack * tolerance for tolerance in TOLERANCES[dtype])
    for i, (theirs, ours) in enumerate(zip(want, have, strict=True)):
        if len(counted) == len(want) and not counted[i]:
            continue
        a, b = decode(theirs), decode(ours)
        if isinstance(a, (str, type(None))) or isinstance(b, (str, type(None))):
            same = a == b
        elif math.isnan(a) or math.isnan(b):
            same = math.isnan(a) and math.isnan(b)
        else:
            same = a == b or abs(a - b) <= atol + rtol * abs(a)
        if not same:
            return [f"at {i}: {b!r}, not {a!r}"]
    return []


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach().tolist()
    if isinstance(value, Mapping):
        value = [item for key in sorted(value) for item in (key, value[key])]
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _partition_faults(case: Case, partitions: list[list[int]]) -> list[str]:
    """A partition must be valid, and its largest bin no larger than the reference's."""
    lengths, params = case["inputs"]["lengths"], case["params"]
    if len(partitions) != params["k"]:
        return [f"{len(partitions)} partitions, not {params['k']}"]
    if sorted(i for part in partitions for i in part) != list(range(len(lengths))):
        return ["some item is missing or there twice"]
    if not all(partitions):
        return ["a partition is empty"]
    if params["equal_size"] and len({len(part) for part in partitions}) > 1:
        return ["sizes differ"]
    largest = max(sum(lengths[i] for i in part) for part in partitions)
    limit = case["expected"]["max_sum"] * PARTITION_SLACK
    return [f"largest bin {largest} is above {limit}"] if largest > limit else []
