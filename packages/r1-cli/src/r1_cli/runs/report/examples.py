"""Choose the recorded answers that a report shows, and embed their pictures."""

import math

from r1_cli.runs.reader import Row, RunReader

EACH = 3  # best, typical and worst answers
MOST_BYTES = 400_000  # of a picture
MOST_PICTURES = 6  # of an answer
COLUMNS = ["group", "sample", "prompt", "answer", "ground_truth", "media", "score", "parts", "reason", "failure"]


def choose(run: RunReader) -> tuple[int | None, dict[str, list[Row]]]:
    """Return the last recorded step and its best, median and worst answers, one per prompt."""
    for step in reversed(run.recorded_steps()):
        if rows := run.readable_samples(step, "train", COLUMNS):
            break
    else:
        return None, {}
    rows.sort(key=lambda row: row["score"] if math.isfinite(row["score"]) else -math.inf, reverse=True)
    places = sorted(range(len(rows)), key=lambda place: abs(place - len(rows) // 2))
    middle = [rows[place] for place in places]
    return step, {
        "best": _of_different_prompts(rows),
        "typical": _of_different_prompts(middle),
        "worst": _of_different_prompts(rows[::-1]),
    }


def _of_different_prompts(rows: list[Row]) -> list[Row]:
    chosen: dict[int, Row] = {}
    for row in rows:
        chosen.setdefault(row["group"], row)
        if len(chosen) == EACH:
            break
    return [*chosen.values()]


def pictures_of(run: RunReader, row: Row) -> list[str]:
    names = (row["media"] or ())[:MOST_PICTURES]
    return [found for name in names if (found := run.embed_media(name, MOST_BYTES))]
