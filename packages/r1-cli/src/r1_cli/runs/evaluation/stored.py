"""A stored evaluation: its answers by row, and what they were sampled and graded with."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb
from pathlib import Path
from statistics import fmean

from r1_cli.config import ConfigError, Problem
from r1_cli.runs.history import JsonObject
from r1_cli.runs.rows.choose import SampledAnswer, SampledGroup
from r1_cli.runs.rows.parts import OF_A_SOURCE, SampleFolder
from r1_cli.runs.rows.recorded import read_groups
from r1_rewards.reading.extract import final_answer

SETS = "evaluated"  # in the folder's description: what each source is, by name
MOST_MISSING = 0.01  # share of the answers, above which no figure is printed


@dataclass(frozen=True, slots=True)
class EvaluatedSet:
    """The answers to one source of rows."""

    name: str  # of a suite with the name of its prompt
    about: JsonObject  # rows (their number), digest (of them), prompt, grader, n
    groups: Mapping[int, SampledGroup]  # by number of the row

    @property
    def missing(self) -> float:
        """The share of the answers that are not there, or could not be scored."""
        scored = sum(len(group.scored) for group in self.groups.values())
        return 1 - scored / max(self.about["rows"] * self.about["n"], 1)

    @property
    def whole(self) -> list[SampledGroup]:
        """The groups of which an answer at least was scored, by row."""
        return [group for _, group in sorted(self.groups.items()) if group.scored]

    def marks(self) -> dict[int, float]:
        """Return the share of right answers of each row."""
        return {row: rate for row, one in sorted(self.groups.items()) if (rate := one.pass_rate) is not None}


@dataclass(frozen=True)
class Evaluation:
    path: Path
    identity: JsonObject
    sets: Mapping[str, EvaluatedSet]

    @cached_property
    def model(self) -> str:
        return str(self.identity.get("named") or self.identity["model"])


def read_evaluation(path: Path) -> Evaluation:
    """Raises ConfigError: the folder is not of `r1 eval --output`, or is damaged."""
    groups = read_groups([path])
    identity = SampleFolder(path).identity()
    if SETS not in identity:
        message = "holds answers of r1 sample, not of r1 eval --output"
        raise ConfigError([Problem("FOLDER", message, str(path))])
    size, sets = identity["rows of a block"], identity[SETS]
    places: list[dict[int, SampledGroup]] = [{} for _ in sets]
    for group in groups:
        source, block = divmod(group.block, OF_A_SOURCE)
        places[source][block * size + group.place] = group
    named = zip(sets.items(), places, strict=True)
    return Evaluation(path, identity, {name: EvaluatedSet(name, about, rows) for (name, about), rows in named})


# --- figures of one row -----------------------------------------------------------------------------------------------


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of arXiv 2107.03374."""
    return 1.0 - comb(n - correct, k) / comb(n, k)


def majority_is_right(answers: Sequence[SampledAnswer]) -> bool:
    """Whether the most frequent final answer is right; ties go to the first."""
    found = [final_answer(answer.text) for answer in answers]
    votes = Counter(one for one in found if one is not None)
    return bool(votes) and answers[found.index(votes.most_common(1)[0][0])].right


def figures(groups: Sequence[SampledGroup]) -> dict[str, list[float]]:
    """Return the values of each row: accuracy, avg@n, pass@k for k = 1, 2, 4, … and n, maj@n, reward_score and parts.

    `accuracy` is whether the first answer is right, and `maj@n` whether the most frequent final answer is. n is the
    smallest number of answers of a row.
    """
    if not groups:
        raise ValueError("no answers to summarise")
    n = min(len(group.answers) for group in groups)
    first = [group.answers[:n] for group in groups]
    right = [[float(answer.right) for answer in answers] for answers in first]
    sizes = sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})
    return {
        "accuracy": [marks[0] for marks in right],
        f"avg@{n}": [fmean(marks) for marks in right],
        **{f"pass@{k}": [pass_at_k(n, int(sum(marks)), k) for marks in right] for k in sizes},
        f"maj@{n}": [float(majority_is_right(answers)) for answers in first],
        "reward_score": [fmean(answer.score for answer in group.answers) for group in groups],
    }
