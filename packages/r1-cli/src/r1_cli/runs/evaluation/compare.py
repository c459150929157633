"""Compare stored evaluations of the same rows, prompts and graders, paired by rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import lcm

from r1_cli.runs.evaluation.stored import EvaluatedSet, Evaluation, EvaluationError
from r1_cli.runs.history import JsonObject
from r1_cli.runs.statistics import (
    LEVEL,
    Difference,
    Difficulty,
    Interval,
    compare_rows,
    holm,
    mean_interval,
    smallest_difference,
)

MOST_STEPS = 1_000  # between a row's means of 0 and 1, up to which the test is exact
SAME = {"digest": "other rows", "prompt": "another prompt", "grader": "another grader"}


@dataclass(frozen=True, slots=True)
class Comparison:
    set: str  # name of the source, or of suite and prompt
    first: int  # number of the evaluation
    second: int
    means: tuple[Interval, Interval]
    k: tuple[int, int]  # answers a row
    difference: Difference
    adjusted: float  # p by Holm, over all comparisons of the command
    smallest: float  # difference that as many rows and answers show with 80 % power

    @property
    def significant(self) -> bool:
        return self.adjusted < LEVEL


def compare(evaluations: Sequence[Evaluation], *, partial: bool = False) -> list[Comparison]:
    """Compare each pair of evaluations on each set of rows that all have.

    Args:
        partial: compare the rows that both have, however many are missing.

    Raises:
        EvaluationError: they have other rows, prompts or graders, or more than MOST_MISSING of the answers are missing.
    """
    first = evaluations[0]
    names = [name for name in first.sets if all(name in one.sets for one in evaluations)]
    if not names:
        told = "; ".join(f"{one.path}: {', '.join(one.sets)}" for one in evaluations)
        raise EvaluationError(f"the folders have no rows with one prompt in common ({told})")
    problems = [one for name in names for one in _differing(evaluations, name, partial=partial)]
    if problems:
        raise EvaluationError("\n".join(problems))
    pairs = [(name, one, other) for name in names for one, other in combinations(range(len(evaluations)), 2)]
    found = [_compare(evaluations[one].sets[name], evaluations[other].sets[name]) for name, one, other in pairs]
    adjusted = holm([difference.p for difference, *_ in found])
    return [
        Comparison(name, one, other, means, k, difference, p, smallest)
        for (name, one, other), (difference, means, k, smallest), p in zip(pairs, found, adjusted, strict=True)
    ]


def _differing(evaluations: Sequence[Evaluation], name: str, *, partial: bool) -> Iterator[str]:
    first = evaluations[0]
    for one in evaluations[1:]:
        own, other = first.sets[name].about, one.sets[name].about
        for key, what in SAME.items():
            if own[key] != other[key]:
                told = f"{name} has {what} in {one.path} ({other[key]}) than in {first.path} ({own[key]})"
                yield f"{told}: such figures cannot be compared"
    for one in evaluations:
        if not partial and one.sets[name].misses_too_many:
            told = f"{one.sets[name].missing:,} of {one.sets[name].total:,} answers of {name} are missing in {one.path}"
            yield f"{told}: run its r1 eval again, or give --partial"


def _compare(
    first: EvaluatedSet, second: EvaluatedSet
) -> tuple[Difference, tuple[Interval, Interval], tuple[int, int], float]:
    one, other = first.marks(), second.marks()
    rows = [row for row in one if row in other]
    if not rows:
        raise EvaluationError(f"no row of {first.name} has answers in both folders")
    of_one, of_other = [one[row] for row in rows], [other[row] for row in rows]
    counts = {len(each.groups[row].scored) for each in (first, second) for row in rows}
    whole = lcm(*counts)
    difference = compare_rows(of_one, of_other, 1 / whole if whole <= MOST_STEPS else None)
    k = first.about["n"], second.about["n"]
    within = [Difficulty.of_rows(marks, n).within for marks, n in ((of_one, k[0]), (of_other, k[1]))]
    middle = Difficulty(sum(of_one + of_other) / (2 * len(rows)), sum(within) / 2)
    smallest = smallest_difference(middle, len(rows), min(k))
    return difference, (mean_interval(of_one), mean_interval(of_other)), k, smallest


def to_json(evaluations: Sequence[Evaluation], found: Sequence[Comparison]) -> JsonObject:
    return {
        "evaluations": [{"folder": str(one.path), "model": one.model} for one in evaluations],
        "comparisons": [
            {
                "set": one.set,
                "first": one.first,
                "second": one.second,
                "rows": one.difference.mean.rows,
                "means": [[mean.value, mean.low, mean.high] for mean in one.means],
                "difference": [one.difference.mean.value, one.difference.mean.low, one.difference.mean.high],
                "better": one.difference.better,
                "worse": one.difference.worse,
                "p": one.difference.p,
                "p_exact": one.difference.p_exact,
                "p_holm": one.adjusted,
                "significant": one.significant,
                "smallest_difference": one.smallest,
            }
            for one in found
        ],
    }


def format_comparisons(evaluations: Sequence[Evaluation], found: Sequence[Comparison]) -> Iterator[str]:
    """Yield the lines that the command prints."""
    letters = [chr(ord("A") + number) for number in range(len(evaluations))]
    for letter, evaluation in zip(letters, evaluations, strict=True):
        yield f"{letter}  {evaluation.path}  ({evaluation.model})"
    for one in found:
        first, second, difference = letters[one.first], letters[one.second], one.difference
        yield ""
        yield f"{one.set}, {difference.mean.rows} rows, {' and '.join(map(str, dict.fromkeys(one.k)))} answers a row"
        for letter, mean in zip((first, second), one.means, strict=True):
            yield f"  {letter}      {mean}"
        signed = difference.mean
        yield f"  {second} - {first}  {signed.value:+.3f} ({signed.low:+.3f} to {signed.high:+.3f}), paired by rows"
        yield f"         {second} is better in {difference.better} rows and worse in {difference.worse}"
        test = "McNemar" if set(one.k) == {1} else "sign flips"
        many = f", {one.adjusted:.3g} among {len(found)} comparisons (Holm)" if len(found) > 1 else ""
        shown = "significant" if one.significant else "not significant at 5 %"
        yield f"         p {difference.p:.3g} ({test}, mid-p; exact {difference.p_exact:.3g}){many}: {shown}"
        if one.smallest < 1:
            yield f"         a true difference of {one.smallest:.3f} would be found with 80 % power"
