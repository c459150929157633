"""Render media on every node of a cluster, and check that a batch fits in its object stores."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from r1_cli.build.rendering import GIGABYTE, open_workers
from r1_cli.cluster.remote_rendering import RenderPool, RenderWorker
from r1_cli.cluster.worker_group import WorkerGroup
from r1_cli.config import RunConfig
from r1_cli.hardware import Hardware
from r1_cli.placement import ActorPlacement, Node, RankPlacement
from r1_cli.plan.disk import StoredBatch, require_store
from r1_cli.plan.model_sizes import read_sizes
from r1_data.dataset import Mixture
from r1_data.render import Renderer

if TYPE_CHECKING:
    from r1_cli.cluster.kept_actors import KeptActors


def open_media(
    config: RunConfig,
    hardware: Hardware,
    renderer: Renderer,
    placements: Sequence[RankPlacement],
    stack: ExitStack,
    kept: "KeptActors | None" = None,
) -> RenderPool | None:
    if not placements:
        return None
    from r1_cli.cluster.actors import ActorGroup
    from r1_cli.cluster.ray_cluster import driver_node

    data, dtype = config.data, inputs_dtype(config, hardware)
    machines = machines_of(driver_node(), placements)
    logs = Path(config.trainer.checkpoint_folder).resolve() / "logs"
    places = [
        ActorPlacement(f"media-{number}", node, (), logs / f"media-{number}.log", config.trainer.n_gpus_per_node)
        for number, node in enumerate(machines)
    ]
    calls = data.filter_overlong_prompts_workers

    def start() -> Sequence[WorkerGroup]:
        actors = ActorGroup(places, calls, kept=kept)
        own = renderer, partial(open_workers, config), int(data.media_memory_gb * GIGABYTE), dtype, actors.remote_put
        actors.create(RenderWorker, [own] * len(places))
        return actors.split()

    media = RenderPool(start, len(places), calls)
    stack.callback(media.close)
    return media


def inputs_dtype(config: RunConfig, hardware: Hardware) -> torch.dtype:
    """Return the dtype in which model inputs are sent: the finer one of learner and engine."""
    actor = config.worker.actor
    computing = hardware.computing_dtype(actor.kept_dtype, actor.fsdp.mp_param_dtype)
    return torch.promote_types(computing, hardware.engine_dtype(config.worker.rollout.dtype))


def start_media(media: RenderPool | None, *prompts: Mixture) -> None:
    if media is not None and any(part.has_media for mixture in prompts for part in mixture.parts):
        media.begin()


def require_store_for_batch(
    config: RunConfig, hardware: Hardware, placements: Sequence[RankPlacement], prompts: Mixture
) -> None:
    """Raise ConfigError, with what to set, if a step's batch exceeds a node's object store."""
    if not placements:
        return
    data, width = config.data, inputs_dtype(config, hardware).itemsize
    values = sum(part.mean_values() * len(part) for part in prompts.parts) / len(prompts)
    longest = max(part.summary.longest for part in prompts.parts) + data.max_response_length
    count = data.rollout_batch_size
    sizes = read_sizes(config.worker.actor.model) if config.worker.actor.router_replay else None
    routed = 0 if sizes is None or sizes.text is None else sizes.text.routed_bytes
    batch = StoredBatch(count, count * config.worker.rollout.n, longest, values * width, routed)
    require_store(list({placement.node.id: placement.node for placement in placements}.values()), batch)


def machines_of(own: Node, placements: Sequence[RankPlacement]) -> list[Node]:
    return list({node.id: node for node in (own, *(placement.node for placement in placements))}.values())
