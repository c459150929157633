"""Start and open the engine of a run: in this process, in its own, or as a pool of actors."""

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, cast

import torch

from r1_cli.build.sampler import build_engine, load_engine_weights, max_sequences
from r1_cli.cluster.direct import find_backend
from r1_cli.cluster.engine import EngineHost
from r1_cli.cluster.engines import RemoteEnginePool
from r1_cli.cluster.own_process import OwnProcess
from r1_cli.cluster.worker_group import ClusterError
from r1_cli.config import RunConfig
from r1_cli.config.rollout import engine_module
from r1_cli.config.root import require_own_devices
from r1_cli.hardware import Hardware
from r1_cli.models.files import ModelFiles, open_model
from r1_cli.models.shared_weights import share_weights
from r1_cli.placement import ActorPlacement, EnginePlacement, threads_per_rank
from r1_rollout.fault import Engine
from r1_rollout.types import Generator

if TYPE_CHECKING:
    from r1_cli.cluster.actors import ActorGroup
    from r1_cli.cluster.kept_actors import KeptActors

log = logging.getLogger("r1")


def start_engines(
    config: RunConfig,
    hardware: Hardware,
    places: Sequence[EnginePlacement],
    stack: ExitStack,
    kept: "KeptActors | None" = None,
) -> "ActorGroup | None":
    """Start the processes of engines with placements, importing in the background. Raises ClusterError."""
    if not places:
        return None
    engines = start_actors(config, hardware, places, places, kept)
    stack.callback(engines.close)
    return engines


def start_actors(
    config: RunConfig,
    hardware: Hardware,
    places: Sequence[EnginePlacement],
    all_places: Sequence[EnginePlacement],
    kept: "KeptActors | None" = None,
) -> "ActorGroup":
    """Start the processes of engines, which import in the background. Raises ClusterError.

    Args:
        all_places: of all engines, among which a node's threads are divided.
        kept: as of `ActorGroup`. Other engines than the embedded one cannot be built twice in a process.
    """
    from r1_cli.cluster.actors import ActorGroup

    logs = Path(config.trainer.checkpoint_folder).resolve() / "logs"
    embedded = engine_module(config.worker.rollout.engine) is engine_module("embedded")
    engines = ActorGroup(
        [
            ActorPlacement(
                place.name,
                place.node,
                place.devices if hardware.on_gpu else (),
                logs / f"{place.name}.log",
                sum(len(other.devices) for other in all_places if other.node.id == place.node.id),
            )
            for place in places
        ],
        kept=kept if embedded and not hardware.on_gpu else None,
    )
    engines.preload(__name__, *(["r1_rollout.embedded"] if embedded else []))
    return engines


def start_engine_process(config: RunConfig, stack: ExitStack) -> OwnProcess | None:
    """Start the process of an engine that samples while the learner computes; None if not needed.

    On CPUs, learner and engine each get half the threads.

    Raises:
        ConfigError: engines would sample on several devices that train.
    """
    require_own_devices(config)
    if not config.trainer.max_staleness or not config.colocated:
        return None
    threads = torch.get_num_threads()
    stack.callback(torch.set_num_threads, threads)
    torch.set_num_threads(threads_per_rank(threads, 2))
    log_file = Path(config.trainer.checkpoint_folder).resolve() / "logs" / "engine-0.log"
    process = OwnProcess("engine-0", log_file, threads_per_rank(threads, 2))
    stack.callback(process.close)
    process.preload(__name__, "r1_rollout.embedded")
    return process


def open_engine_in_process(config: RunConfig, hardware: Hardware, process: OwnProcess) -> Generator:
    process.create(EngineHost, partial(build_hosted, config, hardware))
    dtype = hardware.engine_dtype(config.worker.rollout.dtype)
    # All prompts go to the one engine at once, which bounds by itself what decodes together: so nothing that it
    # computes depends on when it is asked.
    return RemoteEnginePool([(process.name, process)], max_sequences=sys.maxsize, dtype=dtype)


def open_engine(
    config: RunConfig,
    hardware: Hardware,
    model: ModelFiles,
    places: Sequence[EnginePlacement],
    engines: "ActorGroup | None",
    stack: ExitStack,
) -> Generator:
    """Open the engine in this process, or in the actors of `start_engines`. Servers belong to the driver.

    Raises:
        ClusterError: an engine has died.
        ModelError: an engine cannot run this kind of model.
    """
    if config.worker.actor.model.lora.used:
        log.info("the engine has its own copy of the base: %s", config.why_copied(on_gpu=hardware.on_gpu))
    if engines is None:
        return build_engine(config, hardware, model, lambda: load_engine_weights(config, hardware, model), stack)
    rollout = config.worker.rollout
    engines.create(EngineHost, [(partial(build_hosted, config, own_hardware(hardware, place)),) for place in places])
    dtype = hardware.engine_dtype(rollout.dtype)
    names = [f"{place.name} on {place.node.address}" for place in places]
    members = list(zip(names, engines.split(), strict=True))
    direct = find_backend(config, hardware, rollout.engine_size)

    closed = Event()
    stack.callback(closed.set)

    def start(place: int) -> "ActorGroup":
        if closed.is_set():
            raise ClusterError(f"{places[place].name} is not started again: the run has ended or started again")
        again = start_actors(config, hardware, [places[place]], places, engines.kept)
        stack.callback(again.close)
        if closed.is_set():  # the stack closes nothing any more
            again.close()
        again.create(EngineHost, [(partial(build_hosted, config, own_hardware(hardware, places[place])),)])
        return again

    return RemoteEnginePool(members, max_sequences=max_sequences(config), dtype=dtype, direct=direct, start=start)


def open_engine_on_base(
    learner: Any, config: RunConfig, hardware: Hardware, model: ModelFiles, stack: ExitStack
) -> Generator:
    """Open an engine that shares the base under the learner's adapter. Raises as `open_engine`."""
    log.info("the engine shares the learner's base: one copy of it is in memory")
    trusted = config.worker.actor.model.trust_remote_code
    share = partial(share_weights, learner.model, model.config, trust_remote_code=trusted)
    return build_engine(config, hardware, model, share, stack, read_only=True)


def own_hardware(hardware: Hardware, place: EnginePlacement) -> Hardware:
    return replace(hardware, gpus=place.devices) if hardware.on_gpu else hardware


def build_hosted(config: RunConfig, hardware: Hardware, stack: ExitStack) -> Engine:
    if not hardware.on_gpu:  # vLLM would bind each engine to the same processors, all that there are
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    model = open_model(config)
    load = partial(load_engine_weights, config, hardware, model)
    return cast(Engine, build_engine(config, hardware, model, load, stack))
