"""Which machine and which device each rank has: arithmetic on what a cluster says of itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from r1_cli.config import ConfigError, Problem
from r1_cli.config.worker import EnginesConfig


@dataclass(frozen=True, slots=True)
class Node:
    """A machine, and those of its devices that the run has.

    Example: `Node("6f0c", "10.0.0.7", ("0", "1"))`, on processors `Node("6f0c", "127.0.0.1", ("cpu", "cpu"))`.
    """

    id: str  # what Ray calls it
    address: str
    devices: tuple[str, ...]  # GPUs as CUDA_VISIBLE_DEVICES names them; "cpu" for each rank that computes on processors
    store: int | None = None  # bytes of what actors share there, in Ray's object store and its memory; None: not known


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one rank computes: `device` of `node`, which it has alone."""

    rank: int
    node: Node
    device: str

    @property
    def name(self) -> str:
        """What the rank's actor, its log and its process are called."""
        return f"learner-{self.rank}"


def seat_ranks(nodes: Sequence[Node]) -> tuple[Seat, ...]:
    """Give every device a rank: node by node in the order of their addresses, on each by device.

    So neighbours in rank are neighbours on a machine, and a run that is resumed on the same machines has them alike.
    """
    places = [(node, device) for node in sorted(nodes, key=_by_address) for device in node.devices]
    return tuple(Seat(rank, node, device) for rank, (node, device) in enumerate(places))


@dataclass(frozen=True, slots=True)
class EngineSeat:
    """Where one engine computes."""

    number: int
    node: Node
    devices: tuple[str, ...]

    @property
    def name(self) -> str:
        """What the engine's actor, its log and its process are called."""
        return f"engine-{self.number}"


def seat_engines(seats: Sequence[Seat], size: int, apart: EnginesConfig) -> tuple[EngineSeat, ...]:
    """Give every `size` devices of a machine an engine: those that ranks have there, or others if they are `apart`."""
    nodes = list({seat.node.id: seat.node for seat in seats}.values())
    if apart.nnodes:
        own = [(node, ("cpu",) * apart.n_gpus_per_node) for node in nodes[: apart.nnodes]]
    else:
        own = [(node, node.devices) for node in nodes]
    parts = [(node, devices[at : at + size]) for node, devices in own for at in range(0, len(devices), size)]
    return tuple(EngineSeat(number, node, devices) for number, (node, devices) in enumerate(parts))


def imagine_nodes(nnodes: int, per_node: int) -> list[Node]:
    """Return machines as the numbers say, to show where ranks would be."""
    return [Node(str(n), f"node {n}", tuple(map(str, range(per_node)))) for n in range(nnodes)]


def _by_address(node: Node) -> tuple[int, int, str]:
    try:
        number = ip_address(node.address)
    except ValueError:
        return 0, 0, f"{node.address} {node.id}"
    return number.version, int(number), node.id


def share_threads(processors: int, ranks: int) -> int:
    """Return how many threads each of the ranks on a machine computes with."""
    return max(1, processors // ranks)


def require_room(offers: Sequence[tuple[str, int]], nnodes: int, per_node: int, kind: str) -> None:
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
