"""How many devices a run has, and where it does without a cluster."""

import sys

import pytest

from r1_cli.cluster.placement import Seating
from r1_cli.config import ConfigError, load_config
from r1_cli.hardware import Hardware
from r1_cli.jobs.learning import open_seats, settle_devices

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
    assert settle_devices(*load_config([*BASE, *words]), hardware).trainer.n_gpus_per_node == ranks


def test_one_device_needs_no_cluster():
    config, _ = load_config([*BASE, "trainer.n_gpus_per_node=1"])
    before = "ray" in sys.modules
    for hardware in (Hardware("cpu"), GPUS):
        with open_seats(config, hardware) as seats:
            assert seats == Seating()
    assert ("ray" in sys.modules) == before


def test_several_gpus_are_refused_by_name():
    config, _ = load_config([*BASE, "trainer.n_gpus_per_node=2"])
    with pytest.raises(ConfigError, match=r"n_gpus_per_node=2.*set 1"), open_seats(config, GPUS):
        pass
