"""A weighted sum of reference-probability rewards and verifiers in workers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from r1_cli.build.rewards.reference_verifier import ReferenceVerifier
from r1_rewards.reference.options import read_options
from r1_rewards.spec import MODEL_REWARDS
from r1_rewards.types import OpenVerifier, RewardInput, Score, Verifier
from r1_rewards.verifiers.combine import Part, read_parts


@dataclass(frozen=True, slots=True)
class MixedVerifier:
    """Adds rewards that read a model's log-probs to the sum of the others, whose failure is the result's."""

    others: Verifier | None
    asking: Mapping[str, tuple[float, ReferenceVerifier]]  # by the part's name: its weight, and the reward

    @property
    def per_sample(self) -> bool:
        alone = self.others is None or (isinstance(self.others, OpenVerifier) and self.others.per_sample)
        return alone and all(verifier.per_sample for _, verifier in self.asking.values())

    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score]:
        sums = self.others(inputs) if self.others else [Score(0.0, {"overall": 0.0})] * len(inputs)
        for name, (weight, verifier) in self.asking.items():
            sums = [_add(*one, name, weight) for one in zip(sums, verifier(inputs), strict=True)]
        return list(sums)


def _add(total: Score, found: Score, name: str, weight: float) -> Score:
    if total.error:
        return total
    value = total.value + weight * found.value
    parts = {**total.parts, "overall": value, name: found.value}
    parts |= {f"{name}/{key}": number for key, number in found.parts.items() if key != "overall"}
    told = [total.reason, f"{name}: {found.reason}" if found.reason else ""]
    return Score(value, parts, extracted=total.extracted, reason="; ".join(filter(None, told)))


def split_parts(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Part]]:
    written = kwargs.get("parts", {})
    asking = {name: part for name, part in read_parts(written).items() if part.reward in MODEL_REWARDS}
    return {name: setting for name, setting in written.items() if name not in asking}, asking


def open_asking(
    spec: str,
    kwargs: dict[str, Any],
    open_pool: Callable[[str, dict[str, Any]], Verifier],
    opened: list[ReferenceVerifier],
) -> Verifier | None:
    """Return the verifier of `spec` if it or a part of it reads a model's log-probs; add those parts to `opened`.

    Args:
        open_pool: opens verifiers that run in workers.
    """
    if spec in MODEL_REWARDS:
        opened.append(ReferenceVerifier(read_options(kwargs)))
        return opened[-1]
    others, parts = split_parts(kwargs) if spec == "combine" else ({}, {})
    if not parts:
        return None
    found = {name: (part.weight, ReferenceVerifier(read_options(part.options))) for name, part in parts.items()}
    opened += [verifier for _, verifier in found.values()]
    return MixedVerifier(open_pool("combine", {**kwargs, "parts": others}) if others else None, found)
