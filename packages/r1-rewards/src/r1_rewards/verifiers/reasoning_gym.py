"""The verdict of a reasoning-gym task's own scorer, for rows that name their task.

Some scorers evaluate the answer as Python. They get only answers in which nothing can be evaluated but numbers, lists
of literals and formulas.
"""

import ast
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any

from r1_rewards.reading import extract
from r1_rewards.reading.guards import refusal
from r1_rewards.types import Score

TAKES = ("reasoning_gym",)
TRUTH_IS_ANSWER = False  # a few tasks have no answer to show
MISSING = "the reward reasoning_gym needs reasoning-gym: install it with `pip install 'r1-rewards[gym]'`"
MAX_CHARACTERS = 100_000  # of an answer; scorers are not linear

# Tasks whose scorer calls `eval` of Python, or SymPy's parser, which does.
_EVALUATED = frozenset(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"))
_PARSED = frozenset(
    ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
)
_NAMES_AND_NUMBERS = re.compile(r"[\w\s,]*")
_FORMULA = re.compile(r"(?:[\w\s+\-*/^(),=]|(?<=[0-9])\.|\.(?=[0-9]))*")
_WORD = re.compile(r"[^\W\d]\w*")
# Beside variables of one letter. Not `Integral`: that of the integrand would be a right answer to every integral.
_FUNCTIONS = {
    "Abs", "acos", "asin", "atan", "cos", "cosh", "cot", "csc", "exp", "ln", "log", "pi", "sec", "sin", "sinh", "sqrt",
    "tan", "tanh",
}  # fmt: skip


def prepare() -> Any:
    """Import reasoning-gym, which takes seconds. Raises ImportError that says how to install it."""
    try:
        return import_module("reasoning_gym")
    except ImportError as error:
        raise ImportError(MISSING) from error


def score(response: str, ground_truth: str, *, reasoning_gym: Mapping[str, Any] | None = None) -> Score:
    r"""Return the task's `score_answer` of the last `<answer>…</answer>` or `\boxed{…}`, else of the whole response.

    Text in a thought is no answer. `reasoning_gym` is the column of that name, which the source `reasoning_gym:TASK`
    writes: the task, its arguments and the number of the row. Raises ValueError without it, and what the task's scorer
    raises.
    """
    if reasoning_gym is None:
        raise ValueError(
            "the row has no column 'reasoning_gym'; this reward is for rows of a source reasoning_gym:TASK"
        )
    text = extract.after_thought(response)
    marked = (find(text) for find in (extract.tagged, extract.boxed))
    found = next((answer for answer in marked if answer is not None), text.strip())
    task = str(reasoning_gym["task"])
    refused = f"{len(found)} characters, more than {MAX_CHARACTERS}" if len(found) > MAX_CHARACTERS else None
    refused = refused or unsafe_reason(task, found)
    if refused:
        return Score(0.0, {"overall": 0.0, "accuracy": 0.0}, extracted=found, reason=f"not scored: {refused}")
    rows = _open_task(task, json.dumps(dict(reasoning_gym["arguments"])))
    value = float(rows.score_answer(answer=found, entry=rows[int(reasoning_gym["index"])]))
    parts = {"overall": value, "accuracy": float(value >= 1.0)}
    return Score(value, parts, extracted=found, reason=f"scored by {task}")


def unsafe_reason(task: str, answer: str) -> str | None:
    """Return why an answer must not reach a scorer that evaluates it, or None."""
    if task in _EVALUATED and not (_NAMES_AND_NUMBERS.fullmatch(answer) or _is_literal(answer)):
        return "it is neither plain text nor a list of literals, and this task evaluates answers"
    if task in _PARSED:
        words = {word for word in _WORD.findall(answer) if len(word) > 1}
        if not _FORMULA.fullmatch(answer) or not words <= _FUNCTIONS:
            return "it is no plain formula, and this task evaluates answers"
        return refusal(answer)
    return None


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


@lru_cache(maxsize=32)
def _open_task(task: str, arguments: str) -> Any:
    return prepare().create_dataset(task, **json.loads(arguments))
