"""A learner whose states leave the device while others compute: the run is the same, whoever looks at what and when."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from endtoend import QUICKSTART, R1, SMALL, read_log, without_clock
from safetensors.torch import load_file

from r1_cli.assembly import learner as assembly
from r1_cli.jobs import learning, train
from r1_core.learner import Learner
from r1_core.learner.offload import Movable, Offload, bytes_on_device, states_of, tensors_of
from r1_rollout.embedded import EmbeddedEngine

STEPS = ["trainer.max_steps=3", "trainer.save_freq=1", "trainer.val_freq=1", "algorithm.disable_kl=false"]


@pytest.mark.slow
def test_a_run_whose_learner_rests_while_the_engine_samples_is_the_same_to_the_bit(
    r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[Movable] = []
    order: list[str] = []
    built: list[Learner] = []
    held: list[int] = []  # bytes of the learner's on the device, whenever the engine begins to sample

    def run(name: str, *words: str) -> Path:
        folder = tmp_path / name
        result = r1("train", QUICKSTART, *SMALL, *STEPS, f"trainer.save_checkpoint_path={folder}", *words)
        assert result.exit_code == 0, result.output
        return folder

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (order.append(name), built.append(made := function(*args)), made)[2]

    def generate(engine: EmbeddedEngine, *args: Any) -> Any:
        learner = built[-1]
        assert learner.reference is not None
        owners = tensors_of(learner.model), tensors_of(learner.reference), states_of(learner.optimizer)
        held.append(sum(map(bytes_on_device, owners)))
        return sample(engine, *args)

    # vLLM claims a share of a device that is free.
    monkeypatch.setattr(learning, "build_learner", noted("learner", learning.build_learner))
    monkeypatch.setattr(train, "open_engine", noted("engine", train.open_engine))
    sample = EmbeddedEngine.generate
    monkeypatch.setattr(EmbeddedEngine, "generate", generate)
    staying = run("staying")
    assert order == ["engine", "learner"]
    assert min(held) > 0
    held.clear()
    leave = Movable.leave
    monkeypatch.setattr(Movable, "leave", lambda movable: (left.append(movable), leave(movable)))
    # Processors have nothing to make room for; what a GPU does is done to their own memory here.
    monkeypatch.setattr(assembly, "build_offload", lambda config, hardware: Offload(True, True, True))
    resting = run("resting", "trainer.max_steps=2")
    run("resting")
    assert len(left) > 20
    assert set(held) == {0}
    assert without_clock(read_log(staying)) == without_clock(read_log(resting))
    weights = [load_file(folder / "global_step_3/actor/model.safetensors") for folder in (staying, resting)]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
