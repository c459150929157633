"""Connect to Ray: start a private single-node cluster, or join a running one."""

import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

from r1_cli.cluster.ray_connection import RayConnection
from r1_cli.cluster.worker_group import ClusterError
from r1_cli.config import ConfigError, Problem
from r1_cli.config.rollout import EnginesConfig
from r1_cli.config.trainer import TrainerConfig
from r1_cli.hardware import Hardware
from r1_cli.placement import ClusterNodes, Node, allocate_devices, fit_nodes, require_devices
from r1_rollout.private_folder import PrivateFolder

LOOPBACK = "127.0.0.1"
COLOCATED = EnginesConfig()  # on the learner's devices
CLEANUP_SECONDS = 5.0  # for the nodes to remove their temporary files
CONNECT_SECONDS = 10.0  # for a cluster's address to answer
JOIN_SECONDS = 120.0  # for the nodes of a cluster to be free and to describe themselves
POLL_SECONDS = 2.0
NO_CLUSTER = (
    "needs a Ray cluster, and none runs here: type on the first machine\n"
    "        ray start --head --port=6379\n"
    "    on each other one\n"
    "        ray start --address={address}:6379\n"
    "    and then the same command again on the first; or name a cluster's address in RAY_ADDRESS"
)


@contextmanager
def open_cluster(
    trainer: TrainerConfig,
    hardware: Hardware,
    apart: EnginesConfig = COLOCATED,
    connection: RayConnection[Path] | None = None,
) -> Iterator[ClusterNodes]:
    """Connect to a cluster, and reserve `nnodes` nodes with `n_gpus_per_node` devices each.

    With a `connection`, Ray stays when the block ends, and the next block uses it again.

    Engines that are `apart` get further devices, on those nodes or on others. One node is always a private cluster. At
    the end a trace of the actors is written to `ray_timeline`, for chrome://tracing.

    Raises:
        ConfigError: there is no cluster, or it has too few devices.
        ClusterError: it cannot be started or joined, or its nodes have different versions.
    """
    if not find_spec("ray"):
        raise ConfigError([Problem("trainer.n_gpus_per_node", "several devices need Ray: install r1-cli[ray]")])
    private = max(trainer.nnodes, apart.nnodes) == 1
    with ExitStack() as stack:
        connection = connection or stack.enter_context(RayConnection[Path]())
        if private:
            machines = private_cluster(trainer, hardware, apart, connection)
        else:
            machines = stack.enter_context(joined_cluster(trainer, apart, connection))
        try:
            yield machines
        finally:
            if trainer.ray_timeline:
                Path(trainer.ray_timeline).parent.mkdir(parents=True, exist_ok=True)
                _import_ray().timeline(trainer.ray_timeline)


def private_cluster(
    trainer: TrainerConfig, hardware: Hardware, apart: EnginesConfig, connection: RayConnection[Path]
) -> ClusterNodes:
    """Return this machine's devices, on a cluster of its own (`start_private`)."""
    ranks, wanted = trainer.n_gpus_per_node, trainer.n_gpus_per_node + apart.n_gpus_per_node
    devices = hardware.gpus if hardware.on_gpu else ("cpu",) * wanted
    require_devices([(LOOPBACK, len(devices))], 1, ranks, "GPUs")
    allocate_devices([(LOOPBACK, len(devices))], 1, ranks, apart, "GPUs")
    scratch = connection.get(partial(start_private, wanted))
    ray = _import_ray()
    own = ray.get_runtime_context().get_node_id()
    store = store_bytes(ray.nodes(), own, shared_bytes())
    here = Node(own, LOOPBACK, devices[:ranks], store, str(scratch))
    return ClusterNodes((here,), (replace(here, devices=devices[ranks:wanted]),) if apart.nnodes else ())


@contextmanager
def start_private(wanted: int) -> Iterator[Path]:
    """Start Ray for this run alone: on loopback, with a token, and with a folder that is removed at the end.

    The next run removes the folder of a killed one. Yields a folder for temporary files in it.
    """
    # Read when Ray is imported. With 0 a node may have a loopback address, as where Ray has no multi-node clusters.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # Otherwise Ray writes a token of its own into the home. It reads the variable once, so it stays set.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # logs that the token is set
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the default, 15, starves ranks beside other work
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ray = _import_ray()
    folder = PrivateFolder("r1-ray-")
    try:
        _start(ray, wanted, folder.path / "s")  # readable by everybody, and short: sockets are in it
        scratch = folder.path / "scratch"
        scratch.mkdir()
        yield scratch
    finally:
        ray.shutdown()
        folder.remove()


def _start(ray: ModuleType, processes: int, folder: Path) -> None:
    """Start a cluster of one node with `processes` prestarted workers. Ray gives up after 30 seconds."""
    try:
        ray.init(
            address="local",
            num_cpus=processes,
            num_gpus=0,  # the run assigns GPUs itself
            include_dashboard=False,
            namespace=_namespace(),
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(folder),
            _node_ip_address=LOOPBACK,
        )
    except Exception as error:  # Ray raises no narrower one after its 30 seconds
        raise ClusterError(
            f"Ray has not started on this machine: {error} Where other work keeps the processors busy, type the same "
            "command again when there is less"
        ) from error


@contextmanager
def joined_cluster(
    trainer: TrainerConfig, apart: EnginesConfig, connection: RayConnection[Path]
) -> Iterator[ClusterNodes]:
    """Reserve nodes of the cluster of RAY_ADDRESS, or of the one that `ray start` has begun on this machine."""
    patience = 0.0 if connection.kept is None else JOIN_SECONDS  # at a restart, for a lost node to come back
    connection.get(partial(join_running, trainer.nnodes))
    with _reserve_nodes(_import_ray(), trainer, apart, patience) as machines:
        yield machines


@contextmanager
def join_running(nnodes: int) -> Iterator[Path]:
    """Connect to a running cluster. Yields the folder for temporary files, of which each node has its own instead."""
    address = find_address()
    if not address or (silent := connection_problem(address)):
        message = NO_CLUSTER.format(address=own_address())
        message += f" ({silent}, as RAY_ADDRESS or the last `ray start` here has it)" if address else ""
        raise ConfigError([Problem("trainer.nnodes", message, str(nnodes))])
    ray = _import_ray()
    try:
        ray.init(address=address, namespace=_namespace(), log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:  # another version or token
        raise ClusterError(f"the Ray cluster at {address} cannot be joined: {error}") from error
    try:
        yield Path(tempfile.gettempdir())
    finally:
        ray.shutdown()


def find_address() -> str | None:
    """Return RAY_ADDRESS, or the address of the last `ray start` on this machine, None without either.

    Ray itself might also choose another run's cluster among the processes.
    """
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    noted = Path(folder, "ray", "ray_current_cluster")
    named = os.environ.get("RAY_ADDRESS", "auto") or "auto"
    if named != "auto":
        return named
    return noted.read_text().strip() if noted.is_file() else None


def own_address() -> str:
    """Return the address by which other machines reach this one, "FIRST" if unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:  # sends nothing
        try:
            asked.connect(("192.0.2.1", 9))
        except OSError:
            return "FIRST"
        found: str = asked.getsockname()[0]
        return found


def connection_problem(address: str) -> str | None:
    """Return why nothing answers at a cluster's address, None if something does. Ray would try for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return f"{address} is no address like 10.0.0.1:6379"
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        return f"nothing answers at {address}: {error}"
    return None


@contextmanager
def _reserve_nodes(
    ray: ModuleType, trainer: TrainerConfig, apart: EnginesConfig, patience: float = 0.0
) -> Iterator[ClusterNodes]:
    """Reserve nodes with enough free devices until the block ends, by an actor on each that holds all devices.

    With `trainer.min_nodes`, fewer than `nnodes` may be reserved. For too few it waits `patience` seconds.

    A Ray placement group is not enough: the run assigns GPUs to actors itself, so that ranks and engines can share one,
    and needs each node's GPU ids, free shared memory, scratch folder and versions before it starts an actor.
    """
    group, resource, shares = _open_group(ray, trainer, apart, patience)
    actor = ray.remote(max_restarts=0)(type("machine", (NodeReservation,), {}))
    reservations: list[Any] = []
    try:
        reservations += [
            actor.options(
                num_cpus=sum(share) if resource == "CPU" else 0,
                num_gpus=sum(share) if resource == "GPU" else 0,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index),
            ).remote()
            for index, share in enumerate(shares)
        ]
        try:
            found = ray.get([one.describe.remote() for one in reservations], timeout=JOIN_SECONDS)
        except ray.exceptions.RayError as error:
            raise ClusterError(
                f"a machine of the cluster cannot take part, which needs the same r1: {error}"
            ) from error
        require_same_versions(found)
        nodes = ray.nodes()
        stores = [store_bytes(nodes, one["id"], one["shared"]) for one in found]
        yield _assign_devices(found, stores, shares)
    finally:
        if cleanups := [one.remove_scratch.remote() for one in reservations]:
            ray.wait(cleanups, num_returns=len(cleanups), timeout=CLEANUP_SECONDS)
        ray.util.remove_placement_group(group)


def _open_group(
    ray: ModuleType, trainer: TrainerConfig, apart: EnginesConfig, patience: float
) -> tuple[Any, str, list[tuple[int, int]]]:
    """Return a placement group of free nodes, its resource ("GPU" or "CPU"), and the device counts of its nodes.

    Raises:
        ConfigError: there are too few nodes or devices.
        ClusterError: others use them.
    """
    begun = time.monotonic()
    while True:
        try:
            resource, offers, shares = _find_nodes(ray, trainer, apart)
        except ConfigError:
            if time.monotonic() - begun >= patience:
                raise
            time.sleep(POLL_SECONDS)
            continue
        group = ray.util.placement_group([{resource: sum(share)} for share in shares], strategy="STRICT_SPREAD")
        while not group.wait(POLL_SECONDS):
            if time.monotonic() - begun >= JOIN_SECONDS:
                ray.util.remove_placement_group(group)
                raise ClusterError(
                    f"{len(shares)} nodes with {', '.join(str(sum(share)) for share in shares)} free {resource}s were "
                    f"not there within {JOIN_SECONDS:.0f} s: the cluster has {offers} in all, and others use them "
                    "(`ray status` shows it)"
                )
            if len([node for node in ray.nodes() if node["Alive"]]) < len(offers):  # one has just been lost
                break
        else:
            return group, resource, shares
        ray.util.remove_placement_group(group)


def _find_nodes(
    ray: ModuleType, trainer: TrainerConfig, apart: EnginesConfig
) -> tuple[str, list[tuple[str, int]], list[tuple[int, int]]]:
    """Return the resource, each living node's address and count of it, and the device counts to reserve."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    resource = "GPU" if any(node["Resources"].get("GPU") for node in alive) else "CPU"
    offers = [(node["NodeManagerAddress"], int(node["Resources"].get(resource, 0))) for node in alive]
    return resource, offers, fit_nodes(offers, trainer, apart, f"{resource}s")


def _assign_devices(
    found: Sequence[Mapping[str, Any]], stores: Sequence[int | None], shares: Sequence[tuple[int, int]]
) -> ClusterNodes:
    learner, engines = [], []
    for one, store, (ranks, apart) in zip(found, stores, shares, strict=True):
        devices = one["gpus"] or ("cpu",) * (ranks + apart)
        node = Node(one["id"], one["address"], devices, store, one["scratch"])
        learner += [replace(node, devices=devices[:ranks])] if ranks else []
        engines += [replace(node, devices=devices[ranks:])] if apart else []
    return ClusterNodes(tuple(learner), tuple(engines))


def driver_node() -> Node:
    """Return this machine, inside `open_cluster`; the run need not have a device on it."""
    ray = _import_ray()
    return Node(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), ())


class NodeReservation:
    """Reserves the devices of a node for the run, and describes the node."""

    def __init__(self) -> None:
        self._scratch = PrivateFolder("r1-scratch-")

    def describe(self) -> dict[str, Any]:
        import ray

        return {
            "id": ray.get_runtime_context().get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "gpus": tuple(map(str, ray.get_gpu_ids())),
            "shared": shared_bytes(),
            "scratch": str(self._scratch.path),
            "versions": own_versions(),
        }

    def remove_scratch(self) -> None:
        self._scratch.remove()


def shared_bytes() -> float:
    """Return the free bytes of this machine's shared memory; infinite where the user allows the store on a disk."""
    shared = Path("/dev/shm")
    if os.environ.get("RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE") or not shared.is_dir():
        return inf
    return shutil.disk_usage(shared).free


def store_bytes(nodes: Iterable[Mapping[str, Any]], node_id: str, shared: float) -> int | None:
    """Return the bytes of a node's object store that are in shared memory; None if unknown.

    Args:
        nodes: what Ray reports of all nodes.
        shared: free bytes of the node's shared memory.
    """
    stores = [node["Resources"].get("object_store_memory") for node in nodes if node["NodeID"] == node_id]
    return int(min(stores[0], shared)) if stores and stores[0] and shared < inf else None


def own_versions() -> dict[str, str]:
    return {
        "Python": ".".join(map(str, sys.version_info[:3])),
        **{name: version(name) for name in ("r1-cli", "torch", "transformers")},
    }


def require_same_versions(found: list[dict[str, Any]], own: Mapping[str, str] | None = None) -> None:
    """Check that nodes have this process's versions.

    Raises:
        ClusterError: names each node and package that differs.
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
    return f"r1-{secrets.token_hex(4)}"


def _import_ray() -> ModuleType:
    # Read when Ray is imported. Under `uv run` Ray would send the working folder to every node and start each process
    # by `uv run`; and it would hide all GPUs from actors that request none, as ours do.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    import ray.util.scheduling_strategies

    return ray
