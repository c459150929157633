"""A stored evaluation: its answers by row, and what they were sampled and graded with."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import comb
from pathlib import Path
from statistics import fmean

from r1_cli.runs.history import JsonObject
from r1_cli.runs.reader import RunReader
from r1_cli.runs.rows.choose import SampledAnswer, SampledGroup
from r1_cli.runs.rows.parts import OF_A_SOURCE, SETS, RowGroups, SampleFolder
from r1_cli.runs.rows.recorded import read_groups
from r1_cli.runs.statistics import Interval, mean_interval
from r1_rewards.reading.extract import final_answer

DIGEST = re.compile(r"[0-9a-f]{16,}(\+[0-9a-f]+)?")
MOST_BUDGETS = 6
AGAIN = "run the same command again"
MOST_MISSING = 0.01  # share of the answers, above which no figure is printed


class EvaluationError(ValueError):
    """Stored answers of which no figure can be told, or that cannot be compared."""


@dataclass(frozen=True, slots=True)
class EvaluatedSet:
    """The answers to one source of rows."""

    name: str  # of a suite with the name of its prompt
    about: JsonObject  # rows (their number), digest (of them), prompt, grader, n
    groups: Mapping[int, SampledGroup]  # by number of the row
    columns: RowGroups = field(default_factory=dict)  # by which the figures are split

    @property
    def total(self) -> int:
        """The number of answers that were asked for."""
        total: int = self.about["rows"] * self.about["n"]
        return total

    @property
    def missing(self) -> int:
        """The number of answers that are not there, or could not be graded."""
        return self.total - sum(len(group.scored) for group in self.groups.values())

    @property
    def misses_too_many(self) -> bool:
        return self.missing > MOST_MISSING * self.total

    @property
    def whole(self) -> list[SampledGroup]:
        """The groups of which an answer at least was scored, by row."""
        return [group for _, group in sorted(self.groups.items()) if group.scored]

    def by_group(self) -> dict[str, dict[str, Interval]]:
        """Return by column and value the share of right answers of the rows that have it; values in order."""
        marks = self.marks()
        found: dict[str, dict[str, Interval]] = {}
        for column, values in self.columns.items():
            rated = {value: [marks[row] for row in rows if row in marks] for value, rows in values.items()}
            found[column] = {value: mean_interval(rated[value]) for value in sorted(rated, key=_order) if rated[value]}
        return found

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
        """The path or name of the model, or its name at an endpoint."""
        path: str = RunReader(self.path).settings()["worker"]["actor"]["model"]["model_path"]
        named = str(self.identity["model"])
        return path if DIGEST.fullmatch(named) or named.startswith(path) else named


def require_complete(evaluation: Evaluation, *, partial: bool) -> list[str]:
    """Return lines with the bounds of sets of which answers are missing, wrong or right as these may be.

    Raises EvaluationError if more than MOST_MISSING of a set are, unless `partial`, or all of them.
    """
    lines = []
    for name, one in evaluation.sets.items():
        if not one.missing:
            continue
        told = f"{one.missing:,} of {one.total:,} answers of {name} are missing or could not be graded"
        if one.missing == one.total or (one.misses_too_many and not partial):
            failed = sum(answer.failed for group in one.groups.values() for answer in group.answers)
            way_out = "correct the grader, and grade the answers of --output again by --regrade" if failed else AGAIN
            way_out += ", or give --partial for figures with bounds"
            raise EvaluationError(f"{told}, more than {MOST_MISSING:.0%}: {way_out}")
        right = sum(answer.right for group in one.groups.values() for answer in group.answers)
        low, high = right / one.total, (right + one.missing) / one.total
        lines.append(f"{told}: the share of right answers is from {low:.3f} to {high:.3f}")
    return lines


def read_evaluation(path: Path) -> Evaluation:
    """Raises EvaluationError or ConfigError: the folder is not of `r1 eval --output`, or is damaged."""
    groups = read_groups([path])
    folder = SampleFolder(path)
    identity, columns = folder.identity(), folder.groups()
    if SETS not in identity:
        raise EvaluationError(f"{path} holds answers of r1 sample, not of r1 eval --output")
    size, known = identity["rows of a block"], identity[SETS]
    places: list[dict[int, SampledGroup]] = [{} for _ in known]
    for group in groups:
        source, block = divmod(group.block, OF_A_SOURCE)
        places[source][block * size + group.place] = group
    named = zip(known.items(), places, strict=True)
    sets = {name: EvaluatedSet(name, about, rows, columns.get(name, {})) for (name, about), rows in named}
    return Evaluation(path, identity, sets)


def _order(value: str) -> tuple[bool, float, str]:
    """Return a key that sorts numbers by size and before words."""
    try:
        return False, float(value), value
    except ValueError:
        return True, 0.0, value


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


# --- by the length of answers -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Budget:
    """What the answers are worth if longer ones count as cut, and so as wrong."""

    tokens: int  # at most
    right: Interval
    cut: float  # share of the answers

    def to_json(self) -> JsonObject:
        return {"tokens": self.tokens, "right": [self.right.value, self.right.low, self.right.high], "cut": self.cut}


def by_budget(groups: Sequence[SampledGroup]) -> list[Budget]:
    """Return the curve over budgets: the longest answer, and halves of it down to a shorter one than all right ones."""
    answers = [answer for group in groups for answer in group.scored]
    shortest = min((answer.tokens for answer in answers if answer.right), default=None)
    if shortest is None:
        return []
    tokens, found = max(answer.tokens for answer in answers), list[Budget]()
    while len(found) < MOST_BUDGETS and tokens >= shortest:
        rows = [fmean(one.right and one.tokens <= tokens for one in group.scored) for group in groups]
        cut = fmean(one.cut or one.tokens > tokens for one in answers)
        found.insert(0, Budget(tokens, mean_interval(rows), cut))
        tokens //= 2
    return found
