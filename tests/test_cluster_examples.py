"""The cluster scripts: r1 accepts their commands, and their Ray specifications are valid."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from endtoend import R1, ROOT
from patience import LONG

from r1_cli.config.trainer import TrainerConfig

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


STAND_INS = {
    "srun": 'echo "srun $*" >> notes\nwhile [[ $1 == -* ]]; do shift; done\nexec "$@"',
    "scontrol": 'echo "scontrol $*" >> notes\nprintf "first\\nsecond\\nthird\\n"',
    "hostname": "echo 10.0.0.1 10.1.0.1",
    "ray": 'echo "ray $* with a word of ${#RAY_AUTH_TOKEN}" >> notes',
    "r1": 'echo "r1 asks $RAY_ADDRESS" >> notes\nexec "$OWN/r1" "$@" --dry-run',
}


def test_the_job_of_lmm_r1_starts_its_reward_server_ray_on_all_machines_and_the_run(tmp_path: Path) -> None:
    """The whole script: stand-ins for Slurm and Ray, the real reward server, and the dry run of its command."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    programs, rows, own = tmp_path / "bin", tmp_path / "rows/text.jsonl", Path(sys.executable).parent
    for folder in (programs, rows.parent):
        folder.mkdir()
    for name, body in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    row = {"message": json.dumps([{"role": "user", "content": "What is 1 + 1?"}]), "answer": "2"}
    rows.write_text(f"{json.dumps(row)}\n" * 24)
    script = (ROOT / "examples/lmm_r1/slurm.sh").read_text().replace("5000", str(port))
    environment = os.environ | {
        "PATH": f"{programs}:{own}:{os.environ['PATH']}", "OWN": str(own), "COLUMNS": "200",
        "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_CPUS_PER_TASK": "32",
    }  # fmt: skip
    words = ["data.rollout_batch_size=24", "worker.actor.global_batch_size=24", "worker.rollout.n=8"]
    done = subprocess.run(
        ["bash", "-c", script, "slurm.sh", *words], cwd=tmp_path, env=environment, text=True, timeout=LONG,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert re.search(r"learner-16 … learner-23 +node 2", done.stdout)
    notes = (tmp_path / "notes").read_text()
    assert "scontrol show hostnames n[1-3]" in notes
    assert "--nodelist=first ray start --head --node-ip-address=10.0.0.1 --port=6379 --num-cpus=32 --block" in notes
    assert "--nodes=2 --ntasks=2 --exclude=first ray start --address=10.0.0.1:6379 --num-cpus=32 --block" in notes
    assert set(re.findall(r"^ray .* with a word of (\d+)$", notes, re.M)) == {"64"}
    assert "r1 asks 10.0.0.1:6379" in notes
    with pytest.raises(ConnectionRefusedError):  # the reward server has ended with the job
        socket.create_connection(("127.0.0.1", port), 5)


def test_the_manifest_has_as_many_machines_as_its_run_asks_for() -> None:
    cluster = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())["spec"]["rayClusterSpec"]
    machines = 1 + sum(group["replicas"] for group in cluster["workerGroupSpecs"])
    assert f"trainer.nnodes={machines}" in command_of("kuberay.yaml")
    ranks = cluster["headGroupSpec"]["rayStartParams"]["num-cpus"]
    assert f"trainer.n_gpus_per_node={ranks}" in command_of("kuberay.yaml")


@pytest.mark.parametrize(("code", "requeued"), [(138, True), (143, False), (2, False), (0, False)])
def test_a_job_that_saved_before_its_time_was_over_goes_back_into_the_queue(
    tmp_path: Path, code: int, requeued: bool
) -> None:
    for name, body in (("r1", f"exit {code}"), ("scontrol", "echo scontrol $*")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    script = ["bash", FOLDER / "slurm_requeue.sh"]
    done = subprocess.run(script, env=environment, text=True, stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (code, "scontrol requeue 7\n" if requeued else "")


def test_the_job_and_the_requeued_script_have_commands_that_a_dry_run_accepts(r1: R1) -> None:
    r1(*command_of("slurm_requeue.sh"), "--dry-run")
    pod = yaml.safe_load((FOLDER / "job.yaml").read_text())["spec"]["template"]["spec"]
    r1(*pod["containers"][0]["command"][1:-1], "--dry-run")
    assert pod["terminationGracePeriodSeconds"] > TrainerConfig().stop_seconds
