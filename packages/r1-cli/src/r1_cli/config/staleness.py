"""What does not go together with sampling ahead of the learner, `trainer.max_staleness`."""

from collections.abc import Iterator

from r1_cli.config.engines import engine_module
from r1_cli.config.errors import ConfigError, Problem
from r1_cli.config.provenance import Provenance
from r1_cli.config.root import RunConfig

KEY = "trainer.max_staleness"
_OWN_DEVICES = (
    "needs engines on devices of their own where several learn: set worker.rollout.engines.nnodes and "
    "worker.rollout.engines.n_gpus_per_node, or worker.rollout.servers; or set 0"
)


def staleness_problems(config: RunConfig, provenance: Provenance) -> Iterator[tuple[str, str]]:
    """Yield the key and what is wrong with it, as far as that is known before there is a machine."""
    if not config.trainer.max_staleness:
        return
    # Where there are no GPUs, several devices are only meant if they are asked for.
    several = config.trainer.devices > 1 and provenance.is_set("trainer.n_gpus_per_node")
    embedded = engine_module(config.worker.rollout.engine) is engine_module("embedded")
    if config.colocated and (several or config.trainer.nnodes > 1):
        yield KEY, _OWN_DEVICES
    elif config.colocated and not embedded:
        own = "worker.rollout.name=embedded, which gets a process of its own, worker.rollout.servers, or engines"
        yield KEY, f"needs an engine beside the learner: {own} with devices of their own (worker.rollout.engines)"


def require_own_devices(config: RunConfig) -> None:
    """Raise ConfigError if several devices are to learn while engines on the same ones sample ahead."""
    if config.trainer.max_staleness and config.on_cluster and config.colocated:
        raise ConfigError([Problem(KEY, _OWN_DEVICES, str(config.trainer.max_staleness))])
