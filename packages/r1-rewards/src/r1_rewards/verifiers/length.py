"""Penalize long responses linearly, as DAPO does."""

from r1_rewards.types import Score

TRUTH_IS_ANSWER = False  # it is not looked at


def score(
    response: str,
    ground_truth: str = "",
    *,
    max_length: int,
    buffer: int,
    factor: float = 1.0,
    response_length: int | None = None,
) -> Score:
    """Return the overlong penalty, from 0 down to -`factor`.

    Lengths are tokens; without a `response_length`, words are counted. See `overlong_punishment`.

    Example: `score("", max_length=100, buffer=20, response_length=90).value` is -0.5.
    """
    length = len(response.split()) if response_length is None else response_length
    punishment = overlong_punishment(length, max_length, buffer, factor)
    return Score(punishment, {"overall": punishment, "length": float(length)})


def overlong_punishment(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """Return 0 up to `max_length - buffer`, then fall linearly to -`factor` at `max_length` (arXiv 2503.14476).

    Raises ValueError unless 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer must be above 0 and at most max_length, got {buffer} and {max_length}")
    room = max_length - buffer - length
    return factor * min(max(room / buffer, -1.0), 0.0)
