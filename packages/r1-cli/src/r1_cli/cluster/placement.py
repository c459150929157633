"""Which machine and which device each rank has: arithmetic on what a cluster says of itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from operator import le

from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.rollout import EnginesConfig, RolloutConfig


@dataclass(frozen=True, slots=True)
class Node:
    """A machine, and those of its devices that the run has.

    Example: `Node("6f0c", "10.0.0.7", ("0", "1"))`, on processors `Node("6f0c", "127.0.0.1", ("cpu", "cpu"))`.
    """

    id: str  # what Ray calls it
    address: str
    devices: tuple[str, ...]  # GPUs as CUDA_VISIBLE_DEVICES names them; "cpu" for each rank that computes on processors
    store: int | None = None  # bytes of what actors share there, in Ray's object store and its memory; None: not known
    scratch: str | None = None  # a folder there for temporary files, which ends with the run


@dataclass(frozen=True, slots=True)
class ClusterNodes:
    """Where a run computes."""

    learner: tuple[Node, ...]
    apart: tuple[Node, ...] = ()  # engines' own, with other devices than the learner's; none: they share the learner's


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Where one rank computes: `device` of `node`, which it has alone."""

    rank: int
    node: Node
    device: str

    @property
    def devices(self) -> tuple[str, ...]:
        return (self.device,)

    @property
    def name(self) -> str:
        """What the rank's actor, its log and its process are called."""
        return f"learner-{self.rank}"


def place_ranks(nodes: Sequence[Node]) -> tuple[RankPlacement, ...]:
    """Give every device a rank: node by node in the order of their addresses, on each by device.

    So neighbours in rank are neighbours on a machine, and a run that is resumed on the same machines has them alike.
    """
    places = [(node, device) for node in sorted(nodes, key=_by_address) for device in node.devices]
    return tuple(RankPlacement(rank, node, device) for rank, (node, device) in enumerate(places))


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """Where one engine computes."""

    number: int
    node: Node
    devices: tuple[str, ...]

    @property
    def name(self) -> str:
        """What the engine's actor, its log and its process are called."""
        return f"engine-{self.number}"


def place_engines(machines: ClusterNodes, size: int) -> tuple[EnginePlacement, ...]:
    """Give every `size` devices of a machine an engine, in the order of ranks."""
    nodes = sorted(machines.apart or machines.learner, key=_by_address)
    parts = [(node, node.devices[at : at + size]) for node in nodes for at in range(0, len(node.devices), size)]
    return tuple(EnginePlacement(number, node, devices) for number, (node, devices) in enumerate(parts))


@dataclass(frozen=True, slots=True)
class Placement:
    """Who computes where; empty in a run on one device."""

    ranks: tuple[RankPlacement, ...] = ()
    engines: tuple[EnginePlacement, ...] = ()  # none of servers, which the run does not place


def place_all(machines: ClusterNodes, rollout: RolloutConfig) -> Placement:
    """Place ranks and engines."""
    engines = () if rollout.servers.used else place_engines(machines, rollout.engine_size)
    return Placement(place_ranks(machines.learner), engines)


def plan_placement(config: RunConfig) -> Placement:
    """Return the placement on machines as the numbers say, to show where ranks and engines would be.

    One machine holds all; of several it is not known which has further devices.
    """
    if not config.on_cluster:
        return Placement()
    nnodes, per_node, apart = config.trainer.nnodes, config.trainer.n_gpus_per_node, config.worker.rollout.engines
    numbered = tuple(map(str, range(per_node + apart.n_gpus_per_node)))
    learner = tuple(Node(str(n), f"node {n}", numbered[:per_node]) for n in range(nnodes))
    where = "node {}" if nnodes == 1 else "node {} or a further one"
    further = tuple(Node(str(n), where.format(n), numbered[per_node:]) for n in range(apart.nnodes))
    return place_all(ClusterNodes(learner, further), config.worker.rollout)


def _by_address(node: Node) -> tuple[int, int, str]:
    try:
        number = ip_address(node.address)
    except ValueError:
        return 0, 0, f"{node.address} {node.id}"
    return number.version, int(number), node.id


def threads_per_rank(processors: int, ranks: int) -> int:
    """Return how many threads each of the ranks on a machine computes with."""
    return max(1, processors // ranks)


def require_devices(offers: Sequence[tuple[str, int]], nnodes: int, per_node: int, kind: str) -> None:
    """Check that enough machines have enough devices.

    Args:
        offers: the address of each machine, and how many devices it has.
        kind: what the devices are, for people: "GPUs".

    Raises:
        ConfigError: names the key that asks for too much, and what each machine has.
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
    """Return how many devices of each machine ranks have and how many engines that are apart, both on one if they fit.

    Args:
        offers, nnodes, per_node, kind: as `require_devices` has found them to be enough for the ranks.

    Raises:
        ConfigError: there are too few devices beside the ranks'; names the key, and what each machine has.
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
