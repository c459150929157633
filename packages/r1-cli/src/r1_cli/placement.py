"""Assign ranks and engines to nodes and devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from operator import le
from pathlib import Path

from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.rollout import EnginesConfig, RolloutConfig
from r1_cli.config.trainer import TrainerConfig


@dataclass(frozen=True, slots=True)
class Node:
    """A machine and the run's devices on it.

    Example: `Node("6f0c", "10.0.0.7", ("0", "1"))`, on processors `Node("6f0c", "127.0.0.1", ("cpu", "cpu"))`.
    """

    id: str  # Ray's id
    address: str
    devices: tuple[str, ...]  # GPUs as CUDA_VISIBLE_DEVICES names them; "cpu" for each rank that computes on processors
    store: int | None = None  # bytes of Ray's object store in shared memory; None: unknown
    scratch: str | None = None  # a folder for temporary files that is removed with the run


@dataclass(frozen=True, slots=True)
class ActorPlacement:
    """An actor's name, node and GPUs (`devices`, empty on processors)."""

    name: str
    node: Node
    devices: tuple[str, ...]
    log: Path
    sharing: int = 1  # devices, on processors, among which the machine's threads are divided

    @property
    def identity(self) -> tuple[str, str, tuple[str, ...]]:
        """What stays the same when the run starts again."""
        return self.name, self.node.id, self.devices

    def __str__(self) -> str:
        return f"{self.name} on {self.node.address}"


@dataclass(frozen=True, slots=True)
class ClusterNodes:
    learner: tuple[Node, ...]
    apart: tuple[Node, ...] = ()  # nodes of engines with devices of their own; none: they share the learner's


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The node and the device of a rank, which no other rank shares."""

    rank: int
    node: Node
    device: str

    @property
    def devices(self) -> tuple[str, ...]:
        return (self.device,)

    @property
    def name(self) -> str:
        return f"learner-{self.rank}"


def place_ranks(nodes: Sequence[Node]) -> tuple[RankPlacement, ...]:
    """Give every device a rank: nodes by address, then devices in order.

    Neighbouring ranks share a node, and a resumed run on the same nodes has the same placement.
    """
    places = [(node, device) for node in sorted(nodes, key=_by_address) for device in node.devices]
    return tuple(RankPlacement(rank, node, device) for rank, (node, device) in enumerate(places))


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    number: int
    node: Node
    devices: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"engine-{self.number}"


def place_engines(machines: ClusterNodes, size: int) -> tuple[EnginePlacement, ...]:
    """Give every `size` devices of a node an engine, in the order of the ranks."""
    nodes = sorted(machines.apart or machines.learner, key=_by_address)
    parts = [(node, node.devices[at : at + size]) for node in nodes for at in range(0, len(node.devices), size)]
    return tuple(EnginePlacement(number, node, devices) for number, (node, devices) in enumerate(parts))


@dataclass(frozen=True, slots=True)
class Placement:
    """The placements of ranks and engines; empty on one device."""

    ranks: tuple[RankPlacement, ...] = ()
    engines: tuple[EnginePlacement, ...] = ()  # without servers, which the run does not place

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the ranks in their order, then those of engines alone."""
        nodes = [*(rank.node for rank in self.ranks), *(engine.node for engine in self.engines)]
        return [*{node.id: node for node in nodes}.values()]


def place_all(machines: ClusterNodes, rollout: RolloutConfig) -> Placement:
    engines = () if rollout.servers.used else place_engines(machines, rollout.engine_size)
    return Placement(place_ranks(machines.learner), engines)


def plan_placement(config: RunConfig) -> Placement:
    """Return the placement on nodes as the configuration numbers them, to show it before a run.

    One node holds everything; of several, the nodes with devices for further engines are unknown.
    """
    if not config.on_cluster:
        return Placement()
    nnodes, per_node, apart = config.trainer.nnodes, config.trainer.n_gpus_per_node, config.worker.rollout.engines
    numbered = tuple(map(str, range(per_node + apart.n_gpus_per_node)))
    learner = tuple(Node(str(n), f"node {n}", numbered[:per_node]) for n in range(nnodes))
    where = "node {}" if nnodes == 1 else "node {} or a further one"
    further = tuple(Node(str(n), where.format(n), numbered[per_node:]) for n in range(apart.nnodes))
    return place_all(ClusterNodes(learner, further), config.worker.rollout)


def fit_nodes(
    offers: Sequence[tuple[str, int]], trainer: TrainerConfig, apart: EnginesConfig, kind: str
) -> list[tuple[int, int]]:
    """Return `allocate_devices` of as many nodes as there are: all, or with `trainer.min_nodes` at least so many.

    Raises:
        ConfigError: as for all nodes.
    """
    least, fewest = (trainer.min_nodes, min(1, apart.nnodes)) if trainer.min_nodes else (trainer.nnodes, apart.nnodes)
    errors: list[ConfigError] = []
    for nnodes in range(trainer.nnodes, least - 1, -1):
        for engines in range(apart.nnodes, fewest - 1, -1):
            try:
                require_devices(offers, nnodes, trainer.n_gpus_per_node, kind)
                fewer = apart.model_copy(update={"nnodes": engines})
                return allocate_devices(offers, nnodes, trainer.n_gpus_per_node, fewer, kind)
            except ConfigError as error:
                errors.append(error)
    raise errors[0]


def _by_address(node: Node) -> tuple[int, int, str]:
    try:
        number = ip_address(node.address)
    except ValueError:
        return 0, 0, f"{node.address} {node.id}"
    return number.version, int(number), node.id


def threads_per_rank(processors: int, ranks: int) -> int:
    return max(1, processors // ranks)


def require_devices(offers: Sequence[tuple[str, int]], nnodes: int, per_node: int, kind: str) -> None:
    """Check that enough nodes have enough devices. Raises ConfigError.

    Args:
        offers: (address, device count) of each node.
        kind: the devices' name in messages: "GPUs".
    """
    short = [address for address, devices in sorted(offers) if devices < per_node]
    if len(offers) - len(short) >= nnodes:
        return
    counts = sorted((devices for _, devices in offers), reverse=True)
    there = ", ".join(f"{address} {devices}" for address, devices in sorted(offers)) or "none"
    asked = f"trainer.nnodes={nnodes} × trainer.n_gpus_per_node={per_node} = {nnodes * per_node} {kind}"
    found = f"{asked} are asked for, and the cluster has {sum(counts)} (by node: {there})"
    if len(offers) < nnodes:
        advice = f"there are {len(offers)} nodes; start Ray on more of them, or set at most {len(offers)}"
        raise ConfigError([Problem("trainer.nnodes", f"{found}; {advice}", str(nnodes))])
    advice = f"{', '.join(short)} {'has' if len(short) == 1 else 'have'} fewer {kind} than that; "
    advice += f"set at most {counts[nnodes - 1]}" if counts[nnodes - 1] else f"there are no {kind} to train on"
    raise ConfigError([Problem("trainer.n_gpus_per_node", f"{found}; {advice}", str(per_node))])


def allocate_devices(
    offers: Sequence[tuple[str, int]], nnodes: int, per_node: int, apart: EnginesConfig, kind: str
) -> list[tuple[int, int]]:
    """Return each node's device counts for ranks and for separate engines, both on one node if they fit.

    Raises:
        ConfigError: there are too few devices for the engines.
    """
    have, own = sorted((devices for _, devices in offers), reverse=True), apart.n_gpus_per_node
    for both in range(min(nnodes, apart.nnodes), -1, -1):
        shares = [(per_node, own)] * both + [(per_node, 0)] * (nnodes - both) + [(0, own)] * (apart.nnodes - both)
        needs = sorted(map(sum, shares), reverse=True)
        if len(needs) <= len(have) and all(map(le, needs, have)):
            return shares
    there = ", ".join(f"{address} {devices}" for address, devices in sorted(offers))
    message = (
        f"engines apart need {apart.nnodes} × {own} {kind} beside the learner's {nnodes} × {per_node}, and by node "
    )
    message += f"there are {there}; lower it, or set nnodes and n_gpus_per_node to 0: engines are on the learner's "
    message += "devices then"
    raise ConfigError([Problem("worker.rollout.engines.n_gpus_per_node", message, str(own))])
