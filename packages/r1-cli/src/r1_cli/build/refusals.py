"""Say why a model, or a layout of its batches, is refused."""

import logging
import re
from traceback import walk_tb

import torch
from torch import nn

log = logging.getLogger("r1")

MIXES = (
    "pictures of {name} cannot be used: its vision tower mixes the pictures of a batch's rows; train on rows without "
    "pictures, or a model of docs/models.md whose pictures are read"
)
SEES_LATER = "lets a token see later ones"
OTHER = "has other log-probs than its own eager attention"
_FAILED = re.compile(r"cannot be computed(?: and differentiated)? \((.*)\)")
# How models ask for inputs that a row of text has not.
_NEEDED = re.compile(
    r"required positional argument|(must|have to) (specify|be (provided|passed|set))|(is|are) required|cannot be None"
    r"|has to be not-None|Exactly 1 of",
    re.IGNORECASE,
)


def explain_refusal(name: str, fault: str) -> str:
    """Return the sentence that refuses an architecture which no layout computes correctly."""
    instead = "train another"
    if fault.startswith(SEES_LATER):
        fault, instead = f"with its own eager attention, too, it {fault}", "train a causal language model"
    elif (failed := _FAILED.fullmatch(fault)) is not None:
        needs = _NEEDED.search(failed[1])
        reason = (
            "its forward needs more than the tokens of a row" if needs else "its own forward fails on a row of text"
        )
        fault, instead = f"{reason} ({failed[1]})", "train a model that computes rows of text alone"
    elif fault.startswith(OTHER):
        fault = f"its log-probs of a single row are others in r1 than by its own forward{fault.removeprefix(OTHER)}"
    else:
        fault = f"with its own eager attention, too, it {fault}"
    return f"r1 cannot train {name}: {fault}; {instead} (docs/models.md lists all)"


def first_line(error: Exception) -> str:
    line = (str(error) or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {line}" if isinstance(error, LookupError) else line


def name_failure(error: Exception) -> str:
    """Return which part of a model failed, or the error's own line if somebody wrote it for people."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    parts = [one for frame in frames if isinstance(one := frame.f_locals.get("self"), nn.Module)]
    if not parts or isinstance(error, ValueError | torch.OutOfMemoryError):
        return first_line(error)
    log.debug("%s: %s", type(error).__name__, error)
    return f"{type(parts[-1]).__name__} fails there with {type(error).__name__}"
