"""The scripts for clusters: their commands are ones that r1 accepts, and what they say of Ray is in order."""

import re
import shlex
import subprocess

import pytest
import yaml
from endtoend import R1, ROOT

FOLDER = ROOT / "examples/cluster"


def command_of(name: str) -> list[str]:
    """The words of the `r1 train` in a file."""
    text = (FOLDER / name).read_text()
    if name.endswith(".yaml"):
        text = yaml.safe_load(text)["spec"]["entrypoint"]
    (found,) = re.findall(r"^r1 (train .+?)(?: &)?$", text.replace("\\\n", " "), re.M)
    return shlex.split(found)


@pytest.mark.parametrize("name", ["slurm.sh", "kuberay.yaml"])
def test_a_dry_run_accepts_the_command_of_each_script(name: str, r1: R1) -> None:
    shown = r1(*command_of(name), "--dry-run").output
    assert re.search(r"learner-2 … learner-3 +node 1", shown)


def test_the_slurm_script_is_one_that_bash_reads() -> None:
    subprocess.run(["bash", "-n", FOLDER / "slurm.sh"], check=True)


def test_the_manifest_has_as_many_machines_as_its_run_asks_for() -> None:
    cluster = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())["spec"]["rayClusterSpec"]
    machines = 1 + sum(group["replicas"] for group in cluster["workerGroupSpecs"])
    assert f"trainer.nnodes={machines}" in command_of("kuberay.yaml")
    ranks = cluster["headGroupSpec"]["rayStartParams"]["num-cpus"]
    assert f"trainer.n_gpus_per_node={ranks}" in command_of("kuberay.yaml")
