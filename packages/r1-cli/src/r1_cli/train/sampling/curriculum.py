"""What a curriculum expects of the rows of a step, and what their answers then show."""

from collections.abc import Sequence
from statistics import fmean

from r1_cli.train.groups.group import Group, is_correct


def curriculum_metrics(rates: Sequence[float], groups: Sequence[Group]) -> dict[str, float]:
    """Return the pass rate that the curriculum expected of the groups' rows, and the one that they had.

    Args:
        rates: the expected pass rates, by row.
    """
    if not groups:
        return {}
    return {
        "curriculum/expected": fmean(rates[group.row] for group in groups),
        "curriculum/measured": fmean(fmean(map(is_correct, group.scores)) for group in groups),
    }
