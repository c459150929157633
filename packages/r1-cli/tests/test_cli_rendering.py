"""What is rendered while models load: what the run begins with, and nothing that it does not."""

from types import SimpleNamespace
from typing import Any

import pytest

from r1_cli.build.prompts import prefetch_first_prompts
from r1_cli.config import load_config

BASE = [
    "data.train_files=owner/rows@train", "data.val_files=owner/rows@test", "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
]  # fmt: skip


class Rows:
    """A set of rows that notes which of them are to be rendered ahead."""

    def __init__(self, count: int) -> None:
        self.count, self.asked = count, list[list[int]]()

    def __len__(self) -> int:
        return self.count

    def prefetch(self, rows: Any) -> None:
        self.asked.append(list(rows))


@pytest.mark.parametrize(
    ("words", "training", "validation"),
    [
        (["trainer.val_before_train=true", "data.val_batch_size=-1"], [[7, 3]], [[0, 1, 2, 3, 4]]),
        (["trainer.val_before_train=true", "data.val_batch_size=2"], [[7, 3]], [[0, 1]]),
        (["trainer.val_before_train=true", "data.val_batch_size=1000000"], [[7, 3]], [[0, 1, 2, 3, 4]]),
        (["trainer.val_before_train=false"], [[7, 3]], []),
        (["trainer.val_only=true", "trainer.val_before_train=false", "data.val_batch_size=2"], [], [[0, 1]]),
    ],
)
def test_the_first_rows_of_a_run_are_rendered_ahead(words: list[str], training: Any, validation: Any) -> None:
    config, _ = load_config([*BASE, *words])
    prompts, part = Rows(9), Rows(5)
    val_prompts = SimpleNamespace(parts=[part])
    prefetch_first_prompts(config, prompts, [7, 3], val_prompts)  # type: ignore[arg-type]
    assert prompts.asked == training
    assert part.asked == validation


def test_a_run_without_validation_renders_its_first_step() -> None:
    config, _ = load_config([*BASE[:1], *BASE[2:], "data.val_files=null"])
    prompts = Rows(9)
    prefetch_first_prompts(config, prompts, [7, 3], SimpleNamespace(parts=[]))  # type: ignore[arg-type]
    assert prompts.asked == [[7, 3]]
