"""Check that checkpoints fit on the disk, and a batch in Ray's object store, before loading anything."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.placement import Node
from r1_cli.plan.memory import estimate

BYTES_PER_TOKEN = 12  # token ids, log-probs of the engine, a bit of mask; advantages
UNITS = ("B", "KB", "MB", "GB", "TB")


def checkpoint_bytes(config: RunConfig) -> int | None:
    """Return the size of a checkpoint, with the critic's states; None for a hub model."""
    memory = estimate(config)
    if memory is None:
        return None
    only_weights, devices = config.trainer.save_model_only, config.shard_ranks  # each holds a share
    saved = memory.saved + (0 if only_weights else devices * memory.optimizer)
    if memory.critic is not None:
        saved += devices * (memory.critic.weights + (0 if only_weights else memory.critic.optimizer))
    return saved


def checkpoints_kept(config: RunConfig, steps: int | None) -> int:
    """Return the most checkpoints on disk at once: the newest, the best (if validated) and a partial one."""
    trainer = config.trainer
    if trainer.save_freq <= 0:
        return 0
    written = -(-steps // trainer.save_freq) if steps else 1
    beside = 2 if trainer.val_freq > 0 else 1
    return min(written, trainer.save_limit + beside) if trainer.save_limit > 0 else written


def free_space(folder: Path) -> tuple[Path, int]:
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    _, _, free = disk_usage(there)
    return there, free


def require_disk_space(config: RunConfig) -> None:
    """Raise ConfigError if not even one checkpoint fits on the disk."""
    size, wanted = checkpoint_bytes(config), config.trainer.checkpoint_folder
    if size is None or config.trainer.save_freq <= 0:
        return
    folder, free = free_space(wanted)
    if free < size:
        message = f"a checkpoint takes about {size_text(size)}, and {folder} has {size_text(free)} free"
        raise ConfigError([Problem("trainer.save_checkpoint_path", message, str(wanted))])


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """The part of a step's batch that a machine's processes share.

    Example: `StoredBatch(prompts=512, samples=4096, longest=2048, input_bytes=6.4e6)` has 3.28 GB of pictures and 100
    MB of tokens.
    """

    prompts: int
    samples: int
    longest: int  # tokens of the longest sample
    input_bytes: float  # of a prompt's model inputs, on average
    routed_bytes: int = 0  # of a token's experts, at most; see `TextSizes.routed_bytes`

    @property
    def size(self) -> int:
        tokens = self.samples * self.longest
        return int(self.prompts * self.input_bytes + tokens * (BYTES_PER_TOKEN + self.routed_bytes))


def require_store(nodes: Sequence[Node], batch: StoredBatch) -> None:
    """Raise ConfigError if an object store is smaller than a step's batch."""
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


def size_text(size: int) -> str:
    amount, unit = float(size), 0
    while amount >= 1000 and unit < len(UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{amount:.3g} {UNITS[unit]}"
