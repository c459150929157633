"""The GPUs of an estimate, written as `8xH100-80GB`."""

import re
from dataclasses import dataclass

from r1_cli.hardware import PEAK_FLOPS

NODE = 8  # GPUs of a machine, where none says otherwise
# By the makers' data sheets: the sizes of memory in GB that are sold, the usual first, and its bytes a second.
CARDS: dict[str, tuple[tuple[int, ...], float]] = {
    "B200": ((180,), 8e12),
    "H200": ((141,), 4.8e12),
    "H100 PCIe": ((80,), 2.0e12),
    "H100": ((80,), 3.35e12),
    "H800": ((80,), 3.35e12),
    "H20": ((96,), 4.0e12),
    "A100": ((80, 40), 2.0e12),
    "A800": ((80,), 2.0e12),
    "L40S": ((48,), 864e9),
    "L40": ((48,), 864e9),
    "RTX 4090": ((24,), 1008e9),
    "A10": ((24,), 600e9),
}
FORM = re.compile(r"(?:(\d+)x)?(\d+)x([a-z0-9 _]+?(?:-pcie)?)(?:-(\d+(?:\.\d+)?)(gb|gib)?)?", re.IGNORECASE)


class CardError(ValueError): ...


@dataclass(frozen=True, slots=True)
class Cards:
    """GPUs of one kind. Example: `Cards(1, 8, "H100", 80 * 10**9)`."""

    nodes: int
    of_node: int
    name: str
    memory: int  # bytes of one

    @property
    def flops(self) -> float:
        """Peak FLOP/s of one GPU in dense half precision."""
        return PEAK_FLOPS[self.name]

    @property
    def bandwidth(self) -> float:
        """Peak memory bandwidth of one GPU in bytes/s."""
        return CARDS[self.name][1]

    def __str__(self) -> str:
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        return f"{nodes}{self.of_node} x {self.name}"


def read_cards(text: str) -> Cards:
    """Read `[NODESx]NUMBERxNAME[-MEMORY]`; without NODES a node has up to 8 GPUs. Raises CardError."""
    match = FORM.fullmatch(text.strip())
    if match is None:
        raise CardError(f"--gpus={text!r}: write NUMBERxNAME-MEMORY, e.g. 8xH100-80GB, or 2x8xH100-80GB for two nodes")
    nodes, number, name, size, unit = match.groups()
    found = next((known for known in CARDS if _plain(known) == _plain(name)), None)
    if found is None:
        raise CardError(f"--gpus={text}: no GPU {name} is known; there are {', '.join(CARDS)}")
    count = int(number)
    if not count or nodes == "0":
        raise CardError(f"--gpus={text}: at least one GPU is needed")
    if nodes is None and count > NODE and count % NODE:
        raise CardError(f"--gpus={text}: {count} GPUs are not machines of {NODE}; write NODESxNUMBERxNAME")
    machines = int(nodes) if nodes else max(count // NODE, 1)
    memory = float(size) if size else CARDS[found][0][0]
    if not 1 <= memory <= 10_000:
        raise CardError(f"--gpus={text}: {memory:g} GB is no GPU's memory")
    bytes_of_one = memory * (2**30 if (unit or "").lower() == "gib" else 10**9)
    return Cards(machines, count if nodes else count // machines, found, int(bytes_of_one))


def _plain(name: str) -> str:
    return re.sub(r"[ _-]", "", name).lower()
