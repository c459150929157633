"""What a curriculum learns from the answers of a step, and what it expected of their rows."""

import logging
from collections.abc import Sequence
from statistics import fmean

from r1_cli.train.groups.group import Group
from r1_cli.train.groups.stream_position import StreamPosition
from r1_cli.train.types import PromptStream
from r1_data.curriculum import OnlineStream, RowCounts

log = logging.getLogger("r1")

PATIENCE = 10  # epochs after which rows without an answer are told
NAMED = 3  # rows in a message


def count_answers(stream: PromptStream, counts: RowCounts | None, groups: Sequence[Group]) -> RowCounts | None:
    """Return the counts with the answers of these groups; None unless the stream reads them."""
    if not isinstance(stream, OnlineStream):
        return None
    marks = ((group.row, [score.is_correct for score in group.scores]) for group in groups)
    return stream.count(counts, ((row, len(of_row), sum(of_row)) for row, of_row in marks))


def curriculum_metrics(
    stream: PromptStream,
    rates: Sequence[float] | None,
    before: StreamPosition,
    after: StreamPosition,
    groups: Sequence[Group],
) -> dict[str, float]:
    """Return the pass rate that the curriculum expected of the sampled rows, and the one that they had.

    Args:
        rates: recorded pass rates by row; None: an online curriculum, or none.
        before: the position before the groups were sampled.
        after: the position after them.
    """
    online, metrics = stream if isinstance(stream, OnlineStream) else None, dict[str, float]()
    if (rates is None and online is None) or not groups:
        return metrics
    expected = online.expect(before.counts) if online else rates or ()
    metrics["curriculum/expected"] = fmean(float(expected[group.row]) for group in groups)
    metrics["curriculum/measured"] = fmean(fmean(score.is_correct for score in group.scores) for group in groups)
    if online and after.counts is not None:
        unseen = [int(row) for row in (after.counts.asked == 0).nonzero()[0]]
        metrics["curriculum/rows_seen"] = 1 - len(unseen) / online.size
        told = PATIENCE * online.size // online.batch_size  # batches
        if unseen and before.cursor // told < after.cursor // told:
            rows = ", ".join(map(str, unseen[:NAMED]))
            message = "%d of %d rows have no answer after %d epochs, such as row %s of those kept (from 0): raise "
            message += "data.curriculum.explore, unless these rows cannot be read or scored"
            log.warning(message, len(unseen), online.size, after.cursor // told * PATIENCE, rows)
    return metrics
