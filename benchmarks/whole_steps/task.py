"""What both trainers are given: a model folder, rows, a reward in a file, and how long each answer is to be.

It loads neither torch nor transformers, so that a trainer does so when and as it would by itself.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

QUICKSTART = Path(__file__).resolve().parents[2] / "examples/quickstart"
ANSWERS = 8  # to each prompt


@dataclass(frozen=True, slots=True)
class Task:
    """A task as its folder has it; paths are absolute, so that every process finds them from wherever it runs."""

    kind: str  # fixed, tailed or pictures
    model: str
    rows: str
    reward: str
    prompts: int  # of a step
    tokens: int  # the longest answer
    prompt_tokens: int  # the longest prompt
    rate: float  # of learning
    lengths: list[list[int]] | None  # of the answers, [prompts][samples]; None: they end by themselves

    def save(self, folder: Path) -> Path:
        """Write it down for other processes; return the file."""
        (folder / "task.json").write_text(json.dumps(asdict(self)))
        return folder / "task.json"

    @classmethod
    def read(cls, file: str) -> "Task":
        """Read what `save` has written."""
        return cls(**json.loads(Path(file).read_text()))

    @property
    def samples(self) -> int:
        """Answers of a step."""
        return self.prompts * ANSWERS


def load_reward(file: str) -> Callable[[list[dict[str, Any]]], list[dict[str, float]]]:
    """Return the function of a reward file."""
    space: dict[str, Any] = {}
    exec(compile(Path(file).read_text(), file, "exec"), space)
    return space["compute_score"]  # type: ignore[no-any-return]
