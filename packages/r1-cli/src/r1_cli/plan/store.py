"""Whether a machine's object store has room for a step's batch: arithmetic, before anything is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass

from r1_cli.cluster.placement import Node
from r1_cli.config import ConfigError, Problem
from r1_cli.plan.disk import size_text

BYTES_PER_TOKEN = 12  # token ids, log-probs of the engine, a bit of mask; advantages


@dataclass(frozen=True, slots=True)
class Batch:
    """What actors share of a step, at most once a machine.

    Example: `Batch(prompts=512, samples=4096, longest=2048, input_bytes=6.4e6)` takes 3.28 GB for pictures and 100 MB
    for tokens.
    """

    prompts: int
    samples: int
    longest: int  # tokens of the longest sample
    input_bytes: float  # of a prompt's model inputs, on average

    @property
    def size(self) -> int:
        """Bytes of all of it."""
        return int(self.prompts * self.input_bytes + self.samples * self.longest * BYTES_PER_TOKEN)


def require_store(nodes: Sequence[Node], batch: Batch) -> None:
    """Check that every machine's object store holds a step's batch.

    Raises:
        ConfigError: names the machines, what they have, and what to set.
    """
    stores = [(node.address, node.store) for node in nodes if node.store is not None]
    small = [f"{address} has {size_text(store)}" for address, store in stores if store < batch.size]
    if small:
        pictures = size_text(int(batch.input_bytes))
        message = (
            f"a step's batch takes about {size_text(batch.size)}, of which pictures {pictures} a prompt, and Ray's "
            f"object store has less in /dev/shm: {', '.join(small)}. Give the container a larger /dev/shm (docker run "
            "--shm-size) and the store more of it (ray start --object-store-memory; with one node "
            "RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION), or lower this or data.max_pixels; "
            "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE=1 lets it use a disk"
        )
        raise ConfigError([Problem("data.rollout_batch_size", message, str(batch.prompts))])
