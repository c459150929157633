"""How many devices a run has, and where it does without a cluster."""

import sys
from dataclasses import replace

import pytest

from r1_cli.cluster.errors import ClusterError
from r1_cli.config import ConfigError, load_config
from r1_cli.hardware import Hardware
from r1_cli.jobs.learning import open_seats, require_same_folders, settle_devices

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
        with open_seats(config.trainer, hardware) as seats:
            assert seats == ()
    assert ("ray" in sys.modules) == before


def test_several_gpus_are_refused_by_name():
    config, _ = load_config([*BASE, "trainer.n_gpus_per_node=2"])
    with pytest.raises(ConfigError, match=r"n_gpus_per_node=2.*set 1"), open_seats(config.trainer, GPUS):
        pass


class Elsewhere:
    """Processes of a machine that has nothing at the places of this one's folders."""

    places = ("learner-0 on 10.0.0.1", "learner-1 on 10.0.0.2")

    def run(self, function, proof):
        lost = replace(proof.token, folder="/no/such/folder")
        return [function(proof), function(replace(proof, token=lost))]


def test_a_machine_without_the_runs_folder_is_named(tmp_path):
    config, _ = load_config([*BASE, "trainer.n_gpus_per_node=2", f"trainer.save_checkpoint_path={tmp_path}"])
    with pytest.raises(ClusterError) as error:
        require_same_folders(config, Elsewhere())
    (line,) = str(error.value).splitlines()
    assert line.startswith("learner-1 on 10.0.0.2: trainer.save_checkpoint_path=/no/such/folder is no folder here")
    assert list(tmp_path.iterdir()) == []
