"""Rows that reasoning-gym makes in this process: `reasoning_gym:TASK[:argument=value…]`.

    reasoning_gym:leg_counting
    reasoning_gym:leg_counting:size=2000:seed=7:max_animals=5

`size` (500) and `seed` (0) are those of every task, the others its own. A row is a pure function of them and its
number. It has the columns `question` and `answer`, and in `reasoning_gym` what the reward of that name needs to make
the row again. Needs `r1-data[gym]`.
"""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec

from r1_data.types import DataError, Row

PREFIX = "reasoning_gym:"
ROWS = 500  # reasoning-gym's own default

# A colon within a value, as of a JSON object, is followed by no name and "=".
_SEPARATOR = re.compile(r":(?=[A-Za-z_]\w*=)")


@dataclass(frozen=True, slots=True)
class GymTask:
    """A task of reasoning-gym with its arguments, `size` and `seed` included."""

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return int(str(self.arguments["size"]))

    def __str__(self) -> str:
        return f"{PREFIX}{self.name}"


def parse_task(spec: str) -> GymTask:
    """Parse a source without importing reasoning-gym. Raises DataError, also if it is not installed."""
    name, *pairs = _SEPARATOR.split(spec.removeprefix(PREFIX))
    if not name.isidentifier():
        raise DataError(f"{spec!r}: write {PREFIX}TASK or {PREFIX}TASK:size=1000:seed=1")
    arguments: dict[str, object] = {"size": ROWS, "seed": 0}
    for key, _, value in (pair.partition("=") for pair in pairs):
        try:
            arguments[key] = json.loads(value)
        except ValueError:
            arguments[key] = value
    for key, least in (("size", 1), ("seed", 0)):
        number = arguments[key]
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise DataError(f"{spec!r}: {key} must be a whole number of at least {least}, found {number!r}")
    if find_spec("reasoning_gym") is None:
        raise DataError(f"{spec!r} needs reasoning-gym: pip install 'r1-data[gym]'")
    return GymTask(name, arguments)


class GymTable:
    """The rows of a task, made when they are read."""

    def __init__(self, task: GymTask) -> None:
        """Raises DataError: an unknown task, or arguments that it does not take."""
        self._task = task
        known = import_module("reasoning_gym.factory").DATASETS
        if task.name not in known:
            near = difflib.get_close_matches(task.name, known, n=3)
            raise DataError(f"{task}: there is no such task" + (f"; did you mean {', '.join(near)}?" if near else ""))
        try:
            self._rows = import_module("reasoning_gym").create_dataset(task.name, **task.arguments)
        except Exception as error:  # a task checks its arguments by assertions, or not at all
            raise DataError(f"{task} cannot be made with {dict(task.arguments)}: {error}") from error

    def __len__(self) -> int:
        return self._task.size

    def __getitem__(self, index: int) -> tuple[int, Row]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        try:
            made = self._rows[index]
        except Exception as error:
            raise DataError(f"{self._task}:{index + 1}: the row cannot be made ({error})") from error
        origin = {"task": self._task.name, "arguments": dict(self._task.arguments), "index": index}
        # A few tasks have no answer to show, although they can score one.
        answer = "" if made["answer"] is None else made["answer"]
        return index + 1, {"question": made["question"], "answer": answer, "reasoning_gym": origin}

    def __reduce__(self) -> tuple[object, ...]:
        return GymTable, (self._task,)
