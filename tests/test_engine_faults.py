"""An engine that fails in the middle of a run ends it with a message and a checkpoint, and nothing is lost."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from endtoend import QUICKSTART, R1, SMALL, read_log, without_clock

from r1_cli.assembly import engines
from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.errors import EngineError
from r1_rollout.vllm.client import ServerError
from r1_rollout.weights import Weights, WeightsError

# A learning rate that depends on the number of steps would tell a run from a longer one.
MORE = ["trainer.val_before_train=false", "trainer.save_freq=-1", "worker.actor.optim.lr_scheduler_type=constant"]


class FailingEngine(EmbeddedEngine):
    """Dies after the first groups of the call number `lives`."""

    lives = 2
    error: Exception = EngineError("vLLM has died: out of patience. Start the run again")

    def generate(self, *args: Any) -> Any:
        self.calls = self.__dict__.get("calls", 0) + 1
        groups = super().generate(*args)
        return groups if self.calls < self.lives else self._some(groups)

    def _some(self, groups: Any) -> Iterator[Any]:
        yield next(groups)
        raise self.error


def words(folder: Path, *more: str) -> list[Any]:
    return ["train", QUICKSTART, *SMALL, *MORE, "trainer.max_steps=3", f"trainer.save_checkpoint_path={folder}", *more]


def without_validation(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if not k.startswith("val/")} for record in without_clock(records)]


@pytest.fixture(scope="module")
def uninterrupted(r1: R1, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("whole")
    r1(*words(folder, "trainer.val_freq=2"))
    return without_validation(read_log(folder))


@pytest.mark.parametrize(
    ("lives", "error"),
    [
        (2, EngineError("vLLM has died: out of patience")),  # while step 2 samples
        (3, ServerError("no server left: out of patience")),  # while step 2 validates
    ],
)
def test_the_last_step_is_saved_and_the_same_command_goes_on_as_if_nothing_had_been(
    r1: R1,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: list[dict[str, Any]],
    lives: int,
    error: Exception,
) -> None:
    again = words(tmp_path / "cut", "trainer.val_freq=2")
    monkeypatch.setattr(FailingEngine, "lives", lives)
    monkeypatch.setattr(FailingEngine, "error", error)
    with monkeypatch.context() as patch:
        patch.setattr(engines, "EmbeddedEngine", FailingEngine)
        ended = r1(*again, ok=False)
    assert ended.exit_code == 2
    assert str(error) in ended.stderr
    assert [path.name for path in (tmp_path / "cut").glob("global_step_*")] == [f"global_step_{lives - 1}"]
    r1(*again)
    assert without_validation(read_log(tmp_path / "cut")) == uninterrupted


def test_weights_that_are_not_the_engines_are_named_without_a_traceback(
    r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(EmbeddedEngine):
        @contextmanager
        def awake(self, weights: Weights, version: int) -> Iterator[None]:
            raise WeightsError("3 weights are unknown to the engine's model: a, b, c")
            yield

    monkeypatch.setattr(engines, "EmbeddedEngine", Other)
    ended = r1(*words(tmp_path), ok=False)
    assert ended.exit_code == 2
    assert "unknown to the engine's model: a, b, c" in ended.stderr
