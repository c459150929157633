"""An engine that fails during a run ends it with a message and a checkpoint; no step is lost."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from endtoend import QUICKSTART, R1, SMALL, read_log, without_clock
from faults_table import note_fault
from torch import Tensor

from r1_cli.jobs import inference
from r1_core.learner import Learner
from r1_rollout import embedded
from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.errors import EngineError, ServerError

# A learning rate that depends on the number of steps would tell a run from a longer one.
MORE = ["trainer.val_before_train=false", "trainer.save_freq=-1", "worker.actor.optim.lr_scheduler_type=constant"]

VALIDATED = ["trainer.val_freq=2", "worker.rollout.canary=false"]


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
    return [
        "train",
        QUICKSTART,
        *SMALL,
        *MORE,
        "trainer.max_steps=3",
        "trainer.max_restarts=0",
        f"trainer.save_checkpoint_path={folder}",
        *more,
    ]


def without_validation(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if not k.startswith("val/")} for record in without_clock(records)]


@pytest.fixture(scope="module")
def uninterrupted(r1: R1, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("whole")
    r1(*words(folder, *VALIDATED))
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
    again = words(tmp_path / "cut", *VALIDATED)
    monkeypatch.setattr(FailingEngine, "lives", lives)
    monkeypatch.setattr(FailingEngine, "error", error)
    with monkeypatch.context() as patch:
        patch.setattr(embedded, "EmbeddedEngine", FailingEngine)
        ended = r1(*again, ok=False)
    assert ended.exit_code == 2
    assert str(error) in ended.stderr
    assert [path.name for path in (tmp_path / "cut").glob("global_step_*")] == [f"global_step_{lives - 1}"]
    r1(*again)
    assert without_validation(read_log(tmp_path / "cut")) == uninterrupted
    note_fault("the last engine or server fails, with `trainer.max_restarts=0`", outcome="ends")


VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
SERVER = ["worker.rollout.name=vllm", "worker.rollout.servers.count=1", "worker.rollout.servers.start_timeout=900"]
ENGINES = [
    pytest.param(["worker.rollout.name=embedded"], id="embedded"),
    pytest.param(["worker.rollout.name=vllm"], id="vllm", marks=VLLM),
    pytest.param(SERVER, id="servers", marks=VLLM),
]
NORM = "layers.0.input_layernorm.weight"


def longer(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor])


def poisoned(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, torch.nan)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("spoil", "said"), [(longer, NORM), (poisoned, "finite|not a number")])
def test_weights_that_cannot_be_sampled_from_cost_no_step_whichever_engine_gets_them(
    r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: list[str], spoil: Any, said: str
) -> None:
    whole = Learner.weights

    def weights(self: Learner) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in whole(self):
            yield name, spoil(tensor) if self.step > 0 and name.endswith(NORM) else tensor

    monkeypatch.setattr(Learner, "weights", weights)
    ended = r1(*words(tmp_path, "trainer.val_freq=-1", *engine), ok=False)
    assert ended.exit_code == 2
    assert re.search(said, ended.stderr)
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_1"]
    note_fault("weights that became NaN", outcome="ends")


def test_an_evaluation_of_a_broken_model_ends_with_a_message(
    r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = inference.load_engine_weights

    def broken(*args: Any) -> Any:
        model = load(*args)
        next(iter(model.parameters())).data.fill_(torch.nan)
        return model

    monkeypatch.setattr(inference, "load_engine_weights", broken)
    ended = r1(
        "eval", "examples/quickstart/model", QUICKSTART, "data.val_files=examples/quickstart/val.parquet[:4]", ok=False
    )
    assert ended.exit_code == 2
    assert "logits are not finite" in ended.stderr
