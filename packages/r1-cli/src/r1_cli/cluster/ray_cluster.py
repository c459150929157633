"""The Ray cluster of a run: its own, which nobody else sees, or the one that was started on its machines."""

import logging
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

from r1_cli.cluster.placement import ClusterNodes, Node, allocate_devices, require_devices
from r1_cli.cluster.worker_group import ClusterError
from r1_cli.config import ConfigError, Problem
from r1_cli.config.rollout import EnginesConfig
from r1_cli.config.trainer import TrainerConfig
from r1_cli.hardware import Hardware
from r1_rollout.private_folder import PrivateFolder

LOOPBACK = "127.0.0.1"
TOGETHER = EnginesConfig()  # on the learner's devices
SWEEPING = 5.0  # seconds for the machines to remove their temporary files
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
def open_cluster(trainer: TrainerConfig, hardware: Hardware, apart: EnginesConfig = TOGETHER) -> Iterator[ClusterNodes]:
    """Connect to a cluster, and keep `nnodes` machines of it with `n_gpus_per_node` devices each for the run.

    Engines that are to be `apart` get as many other devices as that says, on those machines or on others.

    One machine is always a cluster of the run's own: whatever else runs there under Ray is another user's. When the run
    ends, what its actors did when is written to `ray_timeline`, for chrome://tracing.

    Raises:
        ConfigError: there is no cluster, or it has too few devices.
        ClusterError: it cannot be started or joined, or its machines do not fit one another.
    """
    if not find_spec("ray"):
        raise ConfigError([Problem("trainer.n_gpus_per_node", "several devices need Ray: install r1-cli[ray]")])
    private = max(trainer.nnodes, apart.nnodes) == 1
    with private_cluster(trainer, hardware, apart) if private else joined_cluster(trainer, apart) as machines:
        try:
            yield machines
        finally:
            if trainer.ray_timeline:
                Path(trainer.ray_timeline).parent.mkdir(parents=True, exist_ok=True)
                _import_ray().timeline(trainer.ray_timeline)


@contextmanager
def private_cluster(trainer: TrainerConfig, hardware: Hardware, apart: EnginesConfig) -> Iterator[ClusterNodes]:
    """Start Ray for this run alone: on loopback, with a token, and with a folder that is gone when the run is.

    If the run is killed, its folder goes with the next one.
    """
    ranks, wanted = trainer.n_gpus_per_node, trainer.n_gpus_per_node + apart.n_gpus_per_node
    devices = hardware.gpus if hardware.on_gpu else ("cpu",) * wanted
    require_devices([(LOOPBACK, len(devices))], 1, ranks, "GPUs")
    allocate_devices([(LOOPBACK, len(devices))], 1, ranks, apart, "GPUs")
    # Read when Ray is imported: a node's address is loopback there where Ray thinks it cannot be one of many.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # Ray asks for a token by itself, and would write its own into the home. It reads one once, so it stays.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # which would say so
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # else 15: ranks would starve beside other work
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ray = _import_ray()
    folder = PrivateFolder("r1-ray-")
    try:
        _start(ray, wanted, folder.path / "s")  # which Ray opens to everybody; sockets in it need a short name
        scratch, own = folder.path / "scratch", ray.get_runtime_context().get_node_id()
        scratch.mkdir()
        store = store_bytes(ray.nodes(), own, shared_bytes())
        here = Node(own, LOOPBACK, devices[:ranks], store, str(scratch))
        yield ClusterNodes((here,), (replace(here, devices=devices[ranks:wanted]),) if apart.nnodes else ())
    finally:
        ray.shutdown()
        folder.remove()


def _start(ray: ModuleType, processes: int, folder: Path) -> None:
    """Start a cluster of one machine, with so many processes ahead; say so if Ray gives up, which it does too soon."""
    try:
        ray.init(
            address="local",
            num_cpus=processes,
            num_gpus=0,  # the run deals them out itself
            include_dashboard=False,
            namespace=_namespace(),
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(folder),
            _node_ip_address=LOOPBACK,
        )
    except Exception as error:  # no narrower one, after the 30 seconds that it gives itself
        raise ClusterError(
            f"Ray has not started on this machine: {error} Where other work keeps the processors busy, type the same "
            "command again when there is less"
        ) from error


@contextmanager
def joined_cluster(trainer: TrainerConfig, apart: EnginesConfig) -> Iterator[ClusterNodes]:
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
        with _kept_machines(ray, trainer, apart) as machines:
            yield machines
    finally:
        ray.shutdown()


def find_address() -> str | None:
    """Return the cluster of RAY_ADDRESS, or that of the last `ray start` on this machine, None without either.

    Ray itself would also take a cluster that it finds among the processes: another run's own.
    """
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    noted = Path(folder, "ray", "ray_current_cluster")
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
def _kept_machines(ray: ModuleType, trainer: TrainerConfig, apart: EnginesConfig) -> Iterator[ClusterNodes]:
    """Take machines with enough free devices until the block ends, by an actor on each that has them all."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    resource = "GPU" if any(node["Resources"].get("GPU") for node in alive) else "CPU"
    offers = [(node["NodeManagerAddress"], int(node["Resources"].get(resource, 0))) for node in alive]
    wanted = trainer.nnodes, trainer.n_gpus_per_node
    require_devices(offers, *wanted, f"{resource}s")
    shares = allocate_devices(offers, *wanted, apart, f"{resource}s")
    group = ray.util.placement_group([{resource: sum(share)} for share in shares], strategy="STRICT_SPREAD")
    keeper = ray.remote(max_restarts=0)(type("machine", (NodeReservation,), {}))
    keepers: list[Any] = []
    try:
        if not group.wait(JOINING):
            raise ClusterError(
                f"{len(shares)} nodes with {', '.join(str(sum(share)) for share in shares)} free {resource}s were not "
                f"there within {JOINING:.0f} s: the cluster has {offers} in all, and others use them (`ray status` "
                "shows it)"
            )
        keepers += [
            keeper.options(
                num_cpus=sum(share) if resource == "CPU" else 0,
                num_gpus=sum(share) if resource == "GPU" else 0,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index),
            ).remote()
            for index, share in enumerate(shares)
        ]
        try:
            found = ray.get([one.look.remote() for one in keepers], timeout=JOINING)
        except ray.exceptions.RayError as error:
            raise ClusterError(
                f"a machine of the cluster cannot take part, which needs the same r1: {error}"
            ) from error
        require_same_versions(found)
        stores = [store_bytes(alive, one["id"], one["shared"]) for one in found]
        yield _deal_out(found, stores, shares)
    finally:
        if sweeping := [one.sweep.remote() for one in keepers]:
            ray.wait(sweeping, num_returns=len(sweeping), timeout=SWEEPING)
        ray.util.remove_placement_group(group)


def _deal_out(
    found: Sequence[Mapping[str, Any]], stores: Sequence[int | None], shares: Sequence[tuple[int, int]]
) -> ClusterNodes:
    """Return which devices of the machines ranks have, and which engines apart."""
    learner, engines = [], []
    for one, store, (ranks, apart) in zip(found, stores, shares, strict=True):
        devices = one["gpus"] or ("cpu",) * (ranks + apart)
        node = Node(one["id"], one["address"], devices, store, one["scratch"])
        learner += [replace(node, devices=devices[:ranks])] if ranks else []
        engines += [replace(node, devices=devices[ranks:])] if apart else []
    return ClusterNodes(tuple(learner), tuple(engines))


def own_node() -> Node:
    """Return this machine, inside `open_cluster`; a run need not have any device on it."""
    ray = _import_ray()
    return Node(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), ())


class NodeReservation:
    """Has the devices of a machine, so that no other run gets them, and tells of the machine."""

    def __init__(self) -> None:
        self._scratch = PrivateFolder("r1-scratch-")

    def look(self) -> dict[str, Any]:
        """Return the machine's id, address, GPUs, free shared memory, folder for temporary files, and versions."""
        import ray

        return {
            "id": ray.get_runtime_context().get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "gpus": tuple(map(str, ray.get_gpu_ids())),
            "shared": shared_bytes(),
            "scratch": str(self._scratch.path),
            "versions": own_versions(),
        }

    def sweep(self) -> None:
        """Remove what the run's actors have left in the folder."""
        self._scratch.remove()


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
    return {
        "Python": ".".join(map(str, sys.version_info[:3])),
        **{name: version(name) for name in ("r1-cli", "torch", "transformers")},
    }


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
