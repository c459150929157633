"""Read ground truths: one text, or several of which each is right."""

import json
from collections.abc import Callable, Sequence


def read_truths(ground_truth: str | Sequence[str], *, blank: bool = False) -> list[str]:
    """Return the ground truths in a list of texts, in its JSON (`["5", "five"]`), or in one text.

    Raises TypeError if it is not text, and ValueError if it is blank, unless `blank` is set.
    """
    if isinstance(ground_truth, str):
        found = _read_list(ground_truth) or [ground_truth]
    elif isinstance(ground_truth, Sequence) and all(isinstance(truth, str) for truth in ground_truth):
        found = list(ground_truth)
    else:
        raise TypeError(f"the ground truth is {ground_truth!r:.80}, a {type(ground_truth).__name__}; write it as text")
    found = [truth for truth in found if blank or truth.strip()]
    if not found and not blank:
        raise ValueError(f"the ground truth {ground_truth!r:.80} is blank; nothing can be right")
    return found


def blank_problem(ground_truth: str | Sequence[str]) -> str | None:
    try:
        read_truths(ground_truth)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def emptied_problem(ground_truth: str, normalise: Callable[[str], str]) -> str | None:
    """Return why a ground truth is unusable if `normalise` leaves nothing of it, or None."""
    if normalise(ground_truth):
        return None
    return f"of the truth {ground_truth[:80]!r} nothing is left that is compared, so that an empty answer is right"


def _read_list(text: str) -> list[str] | None:
    if not text.lstrip().startswith('["') and not text.lstrip().startswith('[ "'):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and all(isinstance(one, str) for one in found) else None
