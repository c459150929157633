"""The Ray cluster of a run: its own, which nobody else sees, or the one that was started on its machines."""

import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

from r1_cli.cluster.errors import ClusterError
from r1_cli.cluster.placement import Node, require_room
from r1_cli.config import ConfigError, Problem
from r1_cli.config.trainer import TrainerConfig
from r1_cli.hardware import Hardware

LOOPBACK = "127.0.0.1"
REACHING = 10.0  # seconds for a cluster's address to answer
JOINING = 120.0  # seconds for the machines of a cluster to be free, and to say what they have
NO_CLUSTER = (
    "needs a Ray cluster, and none runs here: type on the first machine\n"
    "        ray start --head --port=6379\n"
    "    on each other one\n"
    "        ray start --address={address}:6379\n"
    "    and then the same command again on the first; or name a cluster's address in RAY_ADDRESS"
)


@contextmanager
def open_cluster(trainer: TrainerConfig, hardware: Hardware) -> Iterator[tuple[Node, ...]]:
    """Connect to a cluster, and keep `nnodes` machines of it with `n_gpus_per_node` devices each for the run.

    One machine is always a cluster of the run's own: whatever else runs there under Ray is another user's. When the run
    ends, what its actors did when is written to `ray_timeline`, for chrome://tracing.

    Raises:
        ConfigError: there is no cluster, or it has too few devices.
        ClusterError: it cannot be joined, or its machines do not fit one another.
    """
    if not find_spec("ray"):
        raise ConfigError([Problem("trainer.n_gpus_per_node", "several devices need Ray: install r1-cli[ray]")])
    cluster = private_cluster(trainer, hardware) if trainer.nnodes == 1 else joined_cluster(trainer)
    with cluster as nodes:
        try:
            yield nodes
        finally:
            if trainer.ray_timeline:
                Path(trainer.ray_timeline).parent.mkdir(parents=True, exist_ok=True)
                _import_ray().timeline(trainer.ray_timeline)


@contextmanager
def private_cluster(trainer: TrainerConfig, hardware: Hardware) -> Iterator[tuple[Node, ...]]:
    """Start Ray for this run alone: on loopback, with a token, and with a folder that is gone when the run is."""
    ranks = trainer.n_gpus_per_node
    devices = hardware.gpus if hardware.on_gpu else ("cpu",) * ranks
    require_room([(LOOPBACK, len(devices))], 1, ranks, "GPUs")
    # Read when Ray is imported: a node's address is loopback there where Ray thinks it cannot be one of many.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # Ray asks for a token by itself, and would write its own into the home. It reads one once, so it stays.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # which would say so
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ray = _import_ray()
    folder = tempfile.mkdtemp(prefix="r1-ray-")
    try:
        ray.init(
            address="local",
            num_cpus=ranks,  # of which Ray starts as many processes ahead
            num_gpus=0,  # the run deals them out itself
            include_dashboard=False,
            namespace=_namespace(),
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=folder,
            _node_ip_address=LOOPBACK,
        )
        own = ray.get_runtime_context().get_node_id()
        yield (Node(own, LOOPBACK, devices[:ranks], store_bytes(ray.nodes(), own, shared_bytes())),)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def joined_cluster(trainer: TrainerConfig) -> Iterator[tuple[Node, ...]]:
    """Connect to the cluster of RAY_ADDRESS, or to the one that `ray start` has begun on this machine."""
    address = find_address()
    if not address or (silent := why_silent(address)):
        message = NO_CLUSTER.format(address=own_address())
        message += f" ({silent}, as RAY_ADDRESS or the last `ray start` here has it)" if address else ""
        raise ConfigError([Problem("trainer.nnodes", message, str(trainer.nnodes))])
    ray = _import_ray()
    try:
        ray.init(address=address, namespace=_namespace(), log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:  # other versions, or another token
        raise ClusterError(f"the Ray cluster at {address} cannot be joined: {error}") from error
    try:
        with _kept_machines(ray, trainer) as nodes:
            yield nodes
    finally:
        ray.shutdown()


def find_address() -> str | None:
    """Return the cluster of RAY_ADDRESS, or that of the last `ray start` on this machine, None without either.

    Ray itself would also take a cluster that it finds among the processes: another run's own.
    """
    noted = Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    named = os.environ.get("RAY_ADDRESS", "auto") or "auto"
    if named != "auto":
        return named
    return noted.read_text().strip() if noted.is_file() else None


def own_address() -> str:
    """Return the address by which other machines reach this one, or a word that stands for it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:  # sends nothing
        try:
            asked.connect(("192.0.2.1", 9))
        except OSError:
            return "FIRST"
        found: str = asked.getsockname()[0]
        return found


def why_silent(address: str) -> str | None:
    """Say why nothing answers at a cluster's address, None if something does. Ray would try for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return f"{address} is no address like 10.0.0.1:6379"
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACHING).close()
    except (OSError, OverflowError) as error:
        return f"nothing answers at {address}: {error}"
    return None


@contextmanager
def _kept_machines(ray: ModuleType, trainer: TrainerConfig) -> Iterator[tuple[Node, ...]]:
    """Take `nnodes` machines with enough free devices until the block ends, by an actor on each that has them all."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    resource = "GPU" if any(node["Resources"].get("GPU") for node in alive) else "CPU"
    offers = [(node["NodeManagerAddress"], int(node["Resources"].get(resource, 0))) for node in alive]
    wanted = trainer.n_gpus_per_node
    require_room(offers, trainer.nnodes, wanted, "GPUs" if resource == "GPU" else "CPUs")
    group = ray.util.placement_group([{resource: wanted}] * trainer.nnodes, strategy="STRICT_SPREAD")
    keeper = ray.remote(max_restarts=0)(type("machine", (Keeper,), {}))
    try:
        if not group.wait(JOINING):
            raise ClusterError(
                f"{trainer.nnodes} nodes with {wanted} free {resource}s each were not free within {JOINING:.0f} s: "
                f"the cluster has {offers} in all, and others use them (`ray status` shows it)"
            )
        keepers = [
            keeper.options(
                num_cpus=wanted if resource == "CPU" else 0,
                num_gpus=wanted if resource == "GPU" else 0,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index),
            ).remote()
            for index in range(trainer.nnodes)
        ]
        try:
            found = ray.get([one.look.remote() for one in keepers], timeout=JOINING)
        except ray.exceptions.RayError as error:
            raise ClusterError(
                f"a machine of the cluster cannot take part, which needs the same r1: {error}"
            ) from error
        require_same_versions(found)
        yield tuple(
            Node(
                one["id"],
                one["address"],
                tuple(one["gpus"]) if resource == "GPU" else ("cpu",) * wanted,
                store_bytes(alive, one["id"], one["shared"]),
            )
            for one in found
        )
    finally:
        ray.util.remove_placement_group(group)


def own_node() -> Node:
    """Return this machine, inside `open_cluster`; a run need not have any device on it."""
    ray = _import_ray()
    return Node(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), ())


class Keeper:
    """Has the devices of a machine, so that no other run gets them, and tells of the machine."""

    def look(self) -> dict[str, Any]:
        """Return the machine's id, address, GPUs and free shared memory, and the versions of what runs there."""
        import ray

        return {
            "id": ray.get_runtime_context().get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "gpus": [str(gpu) for gpu in ray.get_gpu_ids()],
            "shared": shared_bytes(),
            "versions": own_versions(),
        }


def shared_bytes() -> float:
    """Return the free bytes of this machine's shared memory; without bound where the user wants the store on a disk."""
    shared = Path("/dev/shm")
    if os.environ.get("RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE") or not shared.is_dir():
        return inf
    return shutil.disk_usage(shared).free


def store_bytes(nodes: Iterable[Mapping[str, Any]], node_id: str, shared: float) -> int | None:
    """Return the bytes of a machine's object store that lie in its shared memory; None where they are not known.

    Args:
        nodes: what Ray says of all machines.
        shared: what the machine says of its shared memory.
    """
    stores = [node["Resources"].get("object_store_memory") for node in nodes if node["NodeID"] == node_id]
    return int(min(stores[0], shared)) if stores and stores[0] and shared < inf else None


def own_versions() -> dict[str, str]:
    """Return what must be the same on all machines."""
    return {"Python": ".".join(map(str, sys.version_info[:3])), **{name: version(name) for name in ("r1-cli", "torch")}}


def require_same_versions(found: list[dict[str, Any]], own: Mapping[str, str] | None = None) -> None:
    """Check that machines have this process's versions.

    Raises:
        ClusterError: names each machine and package that differs.
    """
    own = own or own_versions()
    wrong = [
        f"{one['address']} has {name} {one['versions'][name]}, this machine {has}"
        for one in found
        for name, has in own.items()
        if one["versions"][name] != has
    ]
    if wrong:
        raise ClusterError("the machines must have the same software: " + "; ".join(wrong))


def _namespace() -> str:
    """Return a namespace of the run's own, for its actors' names."""
    return f"r1-{secrets.token_hex(4)}"


def _import_ray() -> ModuleType:
    # Read when Ray is imported. Under `uv run` Ray would send the working folder to every machine and start each
    # process of its own by `uv run`; and it would hide all GPUs from an actor that asks for none, as ours do.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    import ray.util.scheduling_strategies

    return ray
