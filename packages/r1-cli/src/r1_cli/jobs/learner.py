"""Start and load the learner of a run: in this process, or as ranks on a cluster."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from r1_cli.build.critic import build_critic
from r1_cli.build.learner import single_rank
from r1_cli.build.reward_model import build_trained
from r1_cli.checkpoint.memory import POINTER
from r1_cli.checkpoint.node_copies import READERS, NodeCopies
from r1_cli.checkpoint.shared_filesystem import Proof, shown_folders
from r1_cli.cluster.copies import ClusterCopies
from r1_cli.config import ConfigError, Problem, Provenance, RunConfig, lookup
from r1_cli.hardware import Hardware
from r1_cli.models.families import describe_router
from r1_cli.models.files import ModelFiles
from r1_cli.models.load import ModelError
from r1_cli.models.sharded_loading import ShardedLoadingError, require_sharded_loading
from r1_cli.placement import ActorPlacement, Placement, RankPlacement, place_all
from r1_cli.train.types import Policy, Schedule, ValueModel
from r1_core.learner.parallel import Parallel

if TYPE_CHECKING:
    from r1_cli.cluster.actors import ActorGroup
    from r1_cli.cluster.kept_actors import KeptActors
    from r1_cli.cluster.ray_connection import RayConnection

log = logging.getLogger("r1")


def resolve_devices(config: RunConfig, provenance: Provenance, hardware: Hardware) -> RunConfig:
    """Return the configuration, with one device if there are no GPUs and no number of ranks is set.

    Raises ConfigError if a setting for one device is used with several.
    """
    if hardware.on_gpu or config.trainer.nnodes > 1 or provenance.is_set("trainer.n_gpus_per_node"):
        if config.trainer.devices > 1:
            _refuse_quantized(config)
        return config
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"n_gpus_per_node": 1})})


@contextmanager
def open_placement(
    config: RunConfig, hardware: Hardware, *, samples: bool = True, connection: "RayConnection[Path] | None" = None
) -> Iterator[Placement]:
    """Connect to the run's cluster, and place ranks, and engines if the run samples.

    With a `connection`, Ray stays when the block ends.

    Raises as `cluster.ray_cluster.open_cluster`.
    """
    trainer, rollout = config.trainer, config.worker.rollout
    if not config.on_cluster:
        yield Placement()
        return
    from r1_cli.cluster.ray_cluster import open_cluster

    with open_cluster(trainer, hardware, rollout.engines, connection) as machines:
        placement = place_all(machines, rollout)
        yield placement if samples else replace(placement, engines=())


def fit_placement(config: RunConfig, placement: Placement) -> RunConfig:
    """Return the configuration with the numbers of nodes that are there, by `trainer.min_nodes` fewer than it names."""
    if not placement.ranks or config.trainer.min_nodes is None:
        return config
    nodes = len({rank.node.id for rank in placement.ranks})
    apart = len({engine.node.id for engine in placement.engines}) if config.worker.rollout.engines.nnodes else 0
    if nodes < config.trainer.nnodes:
        log.warning(
            "%d of trainer.nnodes=%d machines are there: it goes on with the same batches (trainer.min_nodes=%d). "
            "A later restart takes the others, too, if they are back",
            nodes, config.trainer.nnodes, config.trainer.min_nodes,
        )  # fmt: skip
    return config.with_nodes(nodes, apart or None)


def rank_hardware(hardware: Hardware, placements: Sequence[RankPlacement]) -> Hardware:
    """Return the hardware of the ranks, which this process need not see. Several GPUs have NEVER RUN."""
    if not placements:
        return hardware
    devices = placements[0].node.devices
    return Hardware("cpu") if devices[0] == "cpu" else Hardware("cuda", hardware.gpus or devices)


def start_ranks(
    config: RunConfig,
    hardware: Hardware,
    placements: Sequence[RankPlacement],
    stack: ExitStack,
    kept: "KeptActors | None" = None,
) -> "ActorGroup | None":
    """Start one process per placement, which imports in the background; None without placements.

    Ranks on GPUs are never `kept`: what has ended one may have left the others' CUDA contexts unusable.

    Raises:
        ClusterError: a rank has died.
        ConfigError: a node does not see the folder of the model or of the checkpoints.
        ModelError: the installed transformers cannot load a model in parts.
    """
    if not placements:
        return None
    try:
        require_sharded_loading()
    except ShardedLoadingError as error:
        raise ModelError(str(error)) from error
    from r1_cli.cluster.actors import ActorGroup

    logs, trainer = Path(config.trainer.checkpoint_folder).resolve() / "logs", config.trainer
    ranks = ActorGroup(
        [
            ActorPlacement(
                placement.name,
                placement.node,
                (placement.device,) if hardware.on_gpu else (),
                logs / f"{placement.name}.log",
                trainer.n_gpus_per_node,
            )
            for placement in placements
        ],
        patience=trainer.collective_timeout,
        kept=None if hardware.on_gpu else kept,
    )
    stack.callback(ranks.close)
    require_shared_folders(config, ranks, placements)
    ranks.preload("r1_cli.cluster.rank")
    return ranks


def start_copies(
    config: RunConfig,
    run: Path,
    placement: Placement,
    ranks: "ActorGroup | None",
    stack: ExitStack,
    kept: "KeptActors | None",
) -> ClusterCopies | None:
    """Start a process on each node that holds copies of the state, or may hold some of an earlier start.

    None without several nodes: the copies are on this machine then . `config` has the nodes that the
    user asked for, of which some may be gone.
    """
    several = max(config.trainer.nnodes, config.worker.rollout.engines.nnodes) > 1
    wanted = config.trainer.memory_save_freq > 0 or (run / POINTER).exists()
    if not several or not wanted or ranks is None:
        return None
    from r1_cli.cluster.actors import ActorGroup

    run = run.resolve()
    nodes = placement.nodes
    hosts = ActorGroup(
        [ActorPlacement(f"copies-{n}", node, (), run / f"logs/copies-{n}.log") for n, node in enumerate(nodes)],
        calls=2 * READERS,
        kept=kept,
    )
    stack.callback(hosts.close)
    callers = [one.remote_caller for one in hosts.split()]
    sources = callers if len(nodes) > 1 else [None]
    hosts.create(NodeCopies, [(run, node.id, n, sources[n - 1]) for n, node in enumerate(nodes)])
    ids = [node.id for node in nodes]
    return ClusterCopies(run, hosts, ranks, [ids.index(rank.node.id) for rank in placement.ranks])


def prepare_learner(
    config: RunConfig,
    hardware: Hardware,
    model: ModelFiles,
    schedule: Schedule,
    placements: Sequence[RankPlacement],
    ranks: "ActorGroup | None",
    stack: ExitStack,
) -> Callable[[], tuple[Policy, ValueModel | None]]:
    """Return a function that loads learner and critic, on the ranks or in this process.

    Open engines before calling it, while the devices are empty. It raises ModelError if a model cannot be loaded, and
    ClusterError if a rank has died.
    """
    if router := describe_router(model.config):
        log.info("%s", router)
    if ranks is not None:
        return partial(load_ranked, config, hardware, schedule, placements, ranks)
    quantized = config.worker.actor.model.quantization is not None
    parallel = Parallel() if quantized else stack.enter_context(single_rank(hardware))
    return partial(load_here, config, hardware, model, schedule, parallel)


def load_here(
    config: RunConfig, hardware: Hardware, model: ModelFiles, schedule: Schedule, parallel: Parallel
) -> tuple[Policy, ValueModel | None]:
    learner = build_trained(config, hardware, model, schedule, parallel)
    if not config.has_critic:
        return learner, None
    learner.offload()
    critic = build_critic(config, hardware, model, schedule, parallel)
    critic.offload()
    return learner, critic


def load_ranked(
    config: RunConfig, hardware: Hardware, schedule: Schedule, placements: Sequence[RankPlacement], ranks: "ActorGroup"
) -> tuple[Policy, ValueModel | None]:
    from r1_cli.cluster.rank import Rank, build_critic_beside, build_policy
    from r1_cli.cluster.rank_client import RankClient, RankedCritic, RankedPolicy

    actor, critic, trainer = config.worker.actor, config.worker.critic, config.trainer
    build = partial(build_policy, config, hardware, schedule)
    build_beside = partial(build_critic_beside, config, hardware, schedule) if config.has_critic else None
    sizes = actor.fsdp.fsdp_size, actor.ulysses_size
    alike = len(placements), hardware.kind, trainer.collective_timeout, *sizes, build_beside
    ranks.create(Rank, [(build, placement.rank, *alike) for placement in placements])
    ranks.call("join", ranks.call_first("open_store", placements[0].node.address))
    neighbours = max(Counter(placement.node.id for placement in placements).values())
    computing = hardware.computing_dtype(actor.kept_dtype, actor.fsdp.mp_param_dtype)
    if config.has_critic:
        critics = hardware.computing_dtype(critic.kept_dtype, critic.fsdp.mp_param_dtype)
        computing = torch.promote_types(computing, critics)
    client = RankClient(ranks, computing, neighbours)
    # Their methods are those of the protocols, looked up when they are called.
    policy = cast(Policy, RankedPolicy(client))
    return policy, cast(ValueModel, RankedCritic(client)) if config.has_critic else None


def _refuse_quantized(config: RunConfig) -> None:
    """Raise ConfigError if ranks are to share a 4-bit base.

    FSDP2 silently drops the quantization state of bitsandbytes weights: accelerate #3983, bitsandbytes #1945.
    """
    if (quantization := config.worker.actor.model.quantization) is not None:
        message = "is for one device: ranks would share weights of 4 bits, which lose their scales when they are cut "
        message += "(accelerate #3983, bitsandbytes #1945); set null, or trainer.n_gpus_per_node=1"
        raise ConfigError([Problem("worker.actor.model.quantization", message, quantization)])


def require_shared_folders(config: RunConfig, ranks: Any, placements: Sequence[RankPlacement]) -> None:
    """Raise ConfigError if a node does not see the run's folders as this process does."""
    trainer, owners = config.trainer, ("actor", "critic") if config.has_critic else ("actor",)
    keys = [f"worker.{owner}.model.model_path" for owner in owners]
    read = {key: Path(path) for key in keys if (path := lookup(config, key))}
    if trainer.load_checkpoint_path:
        read["trainer.load_checkpoint_path"] = Path(trainer.load_checkpoint_path) / "actor"
    with shown_folders(("trainer.save_checkpoint_path", Path(trainer.checkpoint_folder)), read) as proof:
        ranks.create(Proof, [(proof.token, proof.listings)] * len(placements))
        answers = ranks.call_all("find_unseen")
    nodes = {placement.node.address: unseen for placement, unseen in zip(placements, answers, strict=True)}
    problems = [
        Problem(unseen.key, f"on node {address} it {unseen.why}", unseen.folder)
        for address, found in nodes.items()
        for unseen in found
    ]
    if problems:
        raise ConfigError(problems)
