"""Check the machine: packages, GPUs, shared memory, open files, servers."""

import resource
import shutil
import socket
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from urllib.parse import urlsplit

from r1_cli.hardware import find_card, find_hardware
from r1_cli.plan.check.findings import Finding, Subject
from r1_cli.plan.disk import size_text

WHEELS = ("r1-cli", "r1-core", "r1-rollout", "r1-rewards", "r1-data")
SHARED = Path("/dev/shm")
LEAST_SHARED, LEAST_FILES = 1 << 30, 1024  # bytes for several processes; descriptors that a run may open
PATIENCE = 2.0  # seconds that a server may take to answer a call


def check_versions(_: Subject) -> Iterator[Finding]:
    from packaging.requirements import Requirement

    for wheel in WHEELS:
        try:
            lines = requires(wheel) or []
        except PackageNotFoundError:
            yield Finding(
                "environment.versions", "error", f"{wheel} is not installed", "install the five of one version"
            )
            continue
        for wanted in map(Requirement, lines):
            optional = wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})
            try:
                found = version(wanted.name)
            except PackageNotFoundError:
                found = None
            if found is None and not optional:
                yield Finding("environment.versions", "error", f"{wheel} needs {wanted}", f"install {wanted.name}")
            elif found and not optional and not wanted.specifier.contains(found, prereleases=True):
                message = f"{wanted.name} {found} is installed, {wheel} needs {wanted.specifier}"
                yield Finding(
                    "environment.versions", "error", message, f'pip install "{wanted.name}{wanted.specifier}"'
                )


def check_gpus(subject: Subject) -> Iterator[Finding]:
    trainer, there = subject.config.trainer, len(find_hardware().gpus)
    if find_card() is not None and not there:
        yield Finding(
            "environment.gpu",
            "error",
            f"the driver knows a GPU, and torch {version('torch')} sees none",
            "install torch for the driver's CUDA version, or look at CUDA_VISIBLE_DEVICES",
        )
    if there and trainer.nnodes == 1 and trainer.n_gpus_per_node > there:
        message = f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}, and {there} are here"
        yield Finding("environment.gpu", "error", message, f"set trainer.n_gpus_per_node={there}")


def check_limits(subject: Subject) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        message = f"{soft} files may be open at once"
        yield Finding("environment.files", "warning", message, f"ulimit -n {LEAST_FILES} (at most {hard} here)")
    if subject.config.on_cluster and SHARED.is_dir() and (free := shutil.disk_usage(SHARED).free) < LEAST_SHARED:
        message = f"{SHARED} has {size_text(free)} free, and ranks hand batches over in it"
        yield Finding(
            "environment.shared memory", "warning", message, "give the container more: docker run --shm-size=8g"
        )


def check_servers(subject: Subject) -> Iterator[Finding]:
    for url in subject.config.worker.rollout.servers.urls:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname or "", port), timeout=PATIENCE).close()
        except OSError as error:
            message = f"worker.rollout.servers.urls: {url} does not answer ({error})"
            yield Finding("environment.servers", "error", message, "start it, or correct its address and port")
