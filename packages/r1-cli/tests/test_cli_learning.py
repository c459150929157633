"""How many devices a run has, and where it does without a cluster."""

import importlib.util
import sys
from contextlib import ExitStack, nullcontext
from typing import ClassVar

import pytest

from r1_cli.cluster import ray_cluster
from r1_cli.cluster.direct import DirectBackend
from r1_cli.cluster.engine import EngineInfo
from r1_cli.config import ConfigError, load_config
from r1_cli.hardware import Hardware
from r1_cli.jobs import learner as learner_job
from r1_cli.jobs import sft
from r1_cli.jobs.engines import open_engine, start_engines
from r1_cli.jobs.learner import open_placement, rank_hardware, resolve_devices, start_ranks
from r1_cli.models.load import ModelError
from r1_cli.placement import ClusterNodes, Node, Placement, place_engines, place_ranks

BASE = [
    "data.train_files=owner/rows@train", "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
]  # fmt: skip
GPUS = Hardware("cuda", ("0", "1"))


@pytest.mark.parametrize(
    ("words", "hardware", "ranks"),
    [
        ([], Hardware("cpu"), 1),
        (["trainer.n_gpus_per_node=8"], Hardware("cpu"), 8),
        ([], GPUS, 8),
        (["trainer.n_gpus_per_node=2"], GPUS, 2),
        (["trainer.nnodes=2"], Hardware("cpu"), 8),
    ],
)
def test_processors_have_the_ranks_that_the_user_asks_for_and_else_one(words, hardware, ranks):
    assert resolve_devices(*load_config([*BASE, *words]), hardware).trainer.n_gpus_per_node == ranks


def test_one_device_needs_no_cluster():
    config, _ = load_config([*BASE, "trainer.n_gpus_per_node=1"])
    before = "ray" in sys.modules
    for hardware in (Hardware("cpu"), GPUS):
        with open_placement(config, hardware) as placements:
            assert placements == Placement()
    assert ("ray" in sys.modules) == before


@pytest.mark.parametrize("samples", [True, False])
def test_a_run_that_samples_nothing_has_no_engines(monkeypatch, samples):
    machines = ClusterNodes((Node("a", "127.0.0.1", ("cpu", "cpu")),))
    monkeypatch.setattr(ray_cluster, "open_cluster", lambda *_: nullcontext(machines))
    config, _ = load_config([*BASE, "trainer.n_gpus_per_node=2"])
    with open_placement(config, Hardware("cpu"), samples=samples) as placement:
        assert (len(placement.ranks), len(placement.engines)) == (2, 2 if samples else 0)


@pytest.mark.parametrize("samples", [True, False])
def test_fine_tuning_starts_engines_only_to_validate_by_answers(monkeypatch, tmp_path, samples):
    def stop(*arguments, samples):
        raise InterruptedError(samples)

    monkeypatch.setattr(sft, "open_training", stop)
    words = [*BASE, f"sft.val_generations={samples}", f"trainer.save_checkpoint_path={tmp_path}"]
    with pytest.raises(InterruptedError, match=str(samples)):
        sft.fine_tune(*load_config(words))


def test_more_gpus_than_there_are_are_refused_by_node():
    config, _ = load_config([*BASE, "trainer.n_gpus_per_node=4"])
    with (
        pytest.raises(ConfigError, match=r"n_gpus_per_node=4.*127.0.0.1 2.*at most 2"),
        open_placement(config, GPUS),
    ):
        pass


@pytest.mark.parametrize(
    ("seen", "devices", "used"),
    [
        (GPUS, ("0", "1"), GPUS),
        (Hardware("cpu"), ("4", "5"), Hardware("cuda", ("4", "5"))),  # a head node without a GPU
        (Hardware("cpu"), ("cpu", "cpu"), Hardware("cpu")),
        (GPUS, (), GPUS),  # no ranks elsewhere
    ],
)
def test_a_run_computes_on_what_its_ranks_have(seen, devices, used):
    placements = place_ranks([Node("a", "10.0.0.1", devices)])
    assert rank_hardware(seen, placements) == used


class Recorded:
    """Actors that are not started."""

    made: ClassVar = []
    preloaded: ClassVar = ()

    def __init__(self, places, patience=None, kept=None):
        self.places, self.kept = places, kept

    def preload(self, *modules):
        Recorded.preloaded = modules

    def create(self, maker, each):
        Recorded.made = [(place, arguments[0].args[1]) for place, arguments in zip(self.places, each, strict=True)]

    def split(self):
        return [self for _ in self.places]

    def call(self, verb):
        return EngineInfo(("bfloat16",), keeps_layout=False)

    def put(self, value):
        raise AssertionError("nothing is sent yet")

    def close(self):
        pass


def test_engines_share_the_gpus_of_their_nodes_ranks_and_get_weights_by_ipc(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr("r1_cli.cluster.actors.ActorGroup", Recorded)
    words = ["trainer.n_gpus_per_node=4", "worker.rollout.tensor_parallel_size=2", "worker.rollout.name=vllm"]
    config, _ = load_config([*BASE, *words, "trainer.nnodes=2", "worker.actor.global_batch_size=128"])
    gpus = ("0", "1", "2", "3")
    placements = place_engines(ClusterNodes((Node("a", "10.0.0.1", gpus), Node("b", "10.0.0.2", gpus))), 2)
    with ExitStack() as stack:
        started = start_engines(config, Hardware("cuda", gpus), placements, stack)
        assert Recorded.preloaded == ("r1_cli.jobs.engines",)
        engines = open_engine(config, Hardware("cuda", gpus), None, placements, started, stack)
    found = [(place.name, place.node.id, place.devices, own.gpus) for place, own in Recorded.made]
    assert found == [
        ("engine-0", "a", ("0", "1"), ("0", "1")), ("engine-1", "a", ("2", "3"), ("2", "3")),
        ("engine-2", "b", ("0", "1"), ("0", "1")), ("engine-3", "b", ("2", "3"), ("2", "3")),
    ]  # fmt: skip
    assert engines._direct == DirectBackend("ipc", 2)


def test_processes_import_what_they_take_once_they_have_shown_that_they_see_the_folders(monkeypatch):
    pytest.importorskip("ray")
    order = []
    monkeypatch.setattr("r1_cli.cluster.actors.ActorGroup", Recorded)
    monkeypatch.setattr(Recorded, "preload", lambda self, *modules: order.append(modules))
    monkeypatch.setattr(learner_job, "require_shared_folders", lambda config, ranks, placements: order.append("seen"))
    words = ["trainer.n_gpus_per_node=2", "worker.rollout.name=embedded"]
    config, _ = load_config([*BASE, *words])
    machines = ClusterNodes((Node("a", "10.0.0.1", ("cpu", "cpu")),))
    with ExitStack() as stack:
        assert start_ranks(config, Hardware("cpu"), place_ranks(machines.learner), stack) is not None
        start_engines(config, Hardware("cpu"), place_engines(machines, 1), stack)
    assert order == ["seen", ("r1_cli.cluster.rank",), ("r1_cli.jobs.engines", "r1_rollout.embedded")]
    assert all(importlib.util.find_spec(module) for modules in order[1:] for module in modules)


def test_a_transformers_that_cannot_load_in_parts_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.18.2")
    config, _ = load_config([*BASE, "trainer.n_gpus_per_node=2"])
    placements = place_ranks([Node("a", "10.0.0.1", ("cpu", "cpu"))])
    with pytest.raises(ModelError, match=r"takes transformers 5.19 or newer, and this is 5.18.2"), ExitStack() as stack:
        start_ranks(config, Hardware("cpu"), placements, stack)
