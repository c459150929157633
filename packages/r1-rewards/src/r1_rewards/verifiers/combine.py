"""Combine verifiers into a weighted sum and keep each one's parts as metrics."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field

from r1_rewards import verifiers
from r1_rewards.types import RewardSpecError, Score, suggest
from r1_rewards.verifiers import BUILTINS, find_verifier

TRUTH_IS_ANSWER = False  # a right one may be worth any share of the sum
MAX_PARTS = 32


@dataclass(frozen=True, slots=True)
class Part:
    reward: str  # a built-in verifier, or a service or file.py:function where a pool runs the sum
    weight: float
    options: Mapping[str, object] = field(default_factory=dict)


def score(response: str, ground_truth: str, *, parts: Mapping[str, object], **columns: object) -> Score:
    r"""Return the weighted sum of built-in verifiers; `parts` maps metric names to weights or settings.

    A name is a verifier's, `{"math": 0.9, "format": 0.1}`, or any other with settings that name the verifier, `{"tags":
    {"reward": "format", "weight": 0.1, "mode": "r1v"}}`; the other settings are the verifier's options. Weights may be
    negative and are not normalised. Parts: `overall`, each verifier's value under its name, and its other parts as
    `name/part`. Verifiers receive the `columns` they need. Raises RewardSpecError.

    Example: `score(r"\boxed{5}", "5", parts={"math": 0.9, "format": {"weight": 0.1, "mode": "box"}}).value` is 1.0.
    """
    scores = {}
    for name, part in read_parts(parts).items():
        if part.reward not in BUILTINS:
            raise RewardSpecError(
                f"parts.{name}: {part.reward!r} is no built-in verifier" + suggest(part.reward, BUILTINS)
            )
        verify = find_verifier(part.reward).score
        keywords = inspect.signature(verify).parameters.keys() - part.options
        taken = {key: value for key, value in columns.items() if key in keywords}
        scores[name] = verify(response, ground_truth, **part.options, **taken)
    return weighted_sum(scores, parts)


def truth_problem(ground_truth: str, *, parts: Mapping[str, object], **columns: object) -> str | None:
    for name, part in read_parts(parts).items():
        if part.reward in BUILTINS and (
            problem := verifiers.truth_problem(part.reward, ground_truth, part.options, columns)
        ):
            return f"{name}: {problem}"
    return None


def read_parts(parts: Mapping[str, object]) -> dict[str, Part]:
    if not isinstance(parts, Mapping) or not 0 < len(parts) <= MAX_PARTS:
        raise RewardSpecError(f"parts must map 1 to {MAX_PARTS} names to weights, as in {{math: 0.9, format: 0.1}}")
    return {str(name): _read_part(str(name), setting) for name, setting in parts.items()}


def weighted_sum(scores: Mapping[str, Score], parts: Mapping[str, object]) -> Score:
    weights = {name: part.weight for name, part in read_parts(parts).items()}
    overall = sum(weights[name] * found.value for name, found in scores.items())
    kept = {"overall": overall}
    for name, found in scores.items():
        kept[name] = found.value
        kept |= {f"{name}/{key}": value for key, value in found.parts.items() if key != "overall"}
    extracted = next((found.extracted for found in scores.values() if found.extracted is not None), None)
    reason = "; ".join(f"{name}: {found.reason}" for name, found in scores.items() if found.reason)
    return Score(overall, kept, extracted=extracted, reason=reason)


def _read_part(name: str, setting: object) -> Part:
    settings = dict(setting) if isinstance(setting, Mapping) else {"weight": setting}
    weight = settings.pop("weight", 1.0)
    reward = settings.pop("reward", name)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or weight == 0 or abs(weight) > 1e9:
        raise RewardSpecError(f"parts.{name}: the weight is {weight!r}; it must be a number other than 0")
    if not isinstance(reward, str) or reward == "combine":
        raise RewardSpecError(f"parts.{name}: the reward is {reward!r}; name a verifier or file.py:function")
    return Part(reward, float(weight), settings)
