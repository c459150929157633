"""What does not go together with sampling ahead of the learner, `trainer.max_staleness`."""

from collections.abc import Iterator

from r1_cli.config.engines import engine_module
from r1_cli.config.errors import ConfigError, Problem
from r1_cli.config.provenance import Provenance
from r1_cli.config.root import RunConfig

KEY = "trainer.max_staleness"
_ONE_DEVICE = "is for a learner on one device so far; set 0, or trainer.n_gpus_per_node=1"


def staleness_problems(config: RunConfig, provenance: Provenance) -> Iterator[tuple[str, str]]:
    """Yield the key and what is wrong with it, as far as that is known before there is a machine."""
    if not config.trainer.max_staleness:
        return
    # Where there are no GPUs, several devices are only meant if they are asked for.
    several = config.trainer.devices > 1 and provenance.is_set("trainer.n_gpus_per_node")
    if several or config.trainer.nnodes > 1 or config.worker.rollout.engines.nnodes:
        yield KEY, _ONE_DEVICE
    embedded = engine_module(config.worker.rollout.engine) is engine_module("embedded")
    if not embedded and not config.worker.rollout.servers.used:
        own = "worker.rollout.name=embedded, which gets a process of its own, or worker.rollout.servers"
        yield KEY, f"needs an engine beside the learner: {own}"


def require_one_device(config: RunConfig) -> None:
    """Raise ConfigError if several devices are to learn while engines sample ahead."""
    if config.trainer.max_staleness and config.on_cluster:
        raise ConfigError([Problem(KEY, _ONE_DEVICE, str(config.trainer.max_staleness))])
