"""A learner and a critic that are offloaded while others compute give the same run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from endtoend import QUICKSTART, R1, SMALL, read_log, without_clock
from safetensors.torch import load_file

from r1_cli.build import critic
from r1_cli.build import learner as assembly
from r1_cli.jobs import learner, models
from r1_core.learner.offload import Offload, OffloadableTensors, OffloadManager, bytes_on_device
from r1_rollout.embedded import EmbeddedEngine

STEPS = [
    "trainer.max_steps=3", "trainer.save_freq=1", "trainer.val_freq=1", "algorithm.disable_kl=false",
    "algorithm.adv_estimator=gae", "worker.critic.optim.lr=1e-3",
]  # fmt: skip


@pytest.mark.slow
def test_a_run_that_offloads_learner_and_critic_is_the_same_to_the_bit(
    r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[OffloadableTensors] = []
    order: list[str] = []
    managers: list[OffloadManager] = []  # of learner and critic

    def run(name: str, *words: str) -> Path:
        folder = tmp_path / name
        managers.clear()
        result = r1("train", QUICKSTART, *SMALL, *STEPS, f"trainer.save_checkpoint_path={folder}", *words)
        assert result.exit_code == 0, result.output
        return folder

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (order.append(name), function(*args))[1]

    # vLLM claims a share of a device that is free.
    monkeypatch.setattr(learner, "build_trained", noted("learner", learner.build_trained))
    monkeypatch.setattr(models, "open_engine", noted("engine", models.open_engine))
    staying = run("staying")
    assert order == ["engine", "learner"]
    offload = OffloadableTensors.offload
    monkeypatch.setattr(OffloadableTensors, "offload", lambda movable: (left.append(movable), offload(movable)))
    # Processors have nothing to make room for; what a GPU does is done to their own memory here.
    monkeypatch.setattr(assembly, "build_offload", lambda config, hardware: Offload(True, True, True))
    monkeypatch.setattr(critic, "build_critic_offload", lambda config, hardware: Offload(True, True))
    begin, load, sample = OffloadManager.__init__, OffloadManager.load, EmbeddedEngine.generate

    def load_alone(manager: OffloadManager, *owners: Any) -> None:
        load(manager, *owners)
        assert not any(bytes_of(other) for other in managers if other is not manager)

    def sample_alone(engine: EmbeddedEngine, *args: Any) -> Any:
        assert not any(map(bytes_of, managers))
        return sample(engine, *args)

    monkeypatch.setattr(EmbeddedEngine, "generate", sample_alone)
    monkeypatch.setattr(OffloadManager, "__init__", lambda one, *args: (begin(one, *args), managers.append(one))[0])
    monkeypatch.setattr(OffloadManager, "load", load_alone)
    resting = run("resting", "trainer.max_steps=2")
    run("resting")
    assert len(left) > 20
    assert without_clock(read_log(staying)) == without_clock(read_log(resting))
    for owner in ("actor", "critic"):
        one, other = (load_file(folder / f"global_step_3/{owner}/model.safetensors") for folder in (staying, resting))
        assert all((tensor == other[name]).all() for name, tensor in one.items())


def bytes_of(manager: OffloadManager) -> int:
    """What states that may leave take of the device."""
    return sum(bytes_on_device(movable._find()) for movable in manager._movable.values())
