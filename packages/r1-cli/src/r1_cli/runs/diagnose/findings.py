"""A diagnosis of a run, and which diagnosis explains which."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A problem of a run, its evidence, and advice; `follows` names the problem that explains it."""

    signature: str
    what: str
    evidence: str
    advice: str
    follows: str = ""

    @property
    def advised(self) -> str:
        return f"first what it follows from, {self.follows!r}; then {self.advice}" if self.follows else self.advice


# A symptom, and what explains it where that is found as well.
CAUSES = {
    "constant_reward": ("failing_rewards", "truncation"),
    "no_variance": ("failing_rewards", "constant_reward", "rate_too_high", "entropy_collapse"),
    "truncation": ("rate_too_high", "calls_until_limit", "dropped_answers"),
    "no_tool_calls": ("rate_too_high",),
    "malformed_calls": ("rate_too_high",),
    "repeated_calls": ("rate_too_high", "malformed_calls"),
    "length_explosion": ("rate_too_high",),
    "entropy_collapse": ("rate_too_high",),
    "kl_runaway": ("rate_too_high",),
    "clipped_often": ("rate_too_high",),
    "repeated_answers": ("rate_too_high", "entropy_collapse"),
    "dead_media": ("rate_too_high",),
}


def causes_first(found: Iterable[Diagnosis]) -> list[Diagnosis]:
    by_name = {one.signature: one for one in found}
    told = []
    for name, one in by_name.items():
        cause = next((by_name[cause].what for cause in CAUSES.get(name, ()) if cause in by_name), "")
        told.append(replace(one, follows=cause))
    return sorted(told, key=lambda one: bool(one.follows))
