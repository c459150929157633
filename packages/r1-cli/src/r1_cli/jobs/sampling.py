"""The engine of a run: one in this process, or several in actors beside a cluster's ranks, as one."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from r1_cli.assembly.engines import build_engine, load_engine_weights, max_sequences
from r1_cli.cluster.delivery import find_way
from r1_cli.cluster.engine import EngineHost
from r1_cli.cluster.engines import EngineSet
from r1_cli.cluster.placement import EngineSeat, Seat, seat_engines
from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.engines import engine_module
from r1_cli.hardware import Hardware
from r1_cli.models.files import ModelFiles, open_model
from r1_rollout.fault import Engine
from r1_rollout.types import Generator


def open_engine(
    config: RunConfig, hardware: Hardware, model: ModelFiles, seats: Sequence[Seat], stack: ExitStack
) -> Generator:
    """Make what samples, which ends with `stack`: here, or in actors where the ranks have seats.

    Servers stay in the driver's hands: they are processes of their own anyhow.

    Raises:
        ConfigError: there is no place for the engines.
        ClusterError: one does not start.
        ModelError: an engine cannot run this kind of model.
    """
    if not seats or config.worker.rollout.servers.used:
        return build_engine(config, hardware, model, lambda: load_engine_weights(config, hardware, model), stack)
    from r1_cli.cluster.actors import Actors, Place

    rollout = config.worker.rollout
    logs = Path(config.trainer.checkpoint_folder).resolve() / "logs"
    places = seat_engines(seats, engine_size(config), rollout.engines)
    if hardware.on_gpu and places[0].devices[0] == "cpu":
        key = "worker.rollout.engines.nnodes"
        raise ConfigError([Problem(key, "engines apart have no GPUs of their own in this version; set 0, and 0 GPUs")])
    engines = Actors(
        [
            Place(
                place.name,
                place.node,
                place.devices if hardware.on_gpu else (),
                logs / f"{place.name}.log",
                sum(other.node.id == place.node.id for other in places),
            )
            for place in places
        ]
    )
    stack.callback(engines.close)
    engines.make(EngineHost, [(partial(build_hosted, config, own_hardware(hardware, place)),) for place in places])
    dtype = hardware.engine_dtype(rollout.dtype)
    names = [f"{place.name} on {place.node.address}" for place in places]
    members = list(zip(names, engines.apart(), strict=True))
    way = find_way(config, hardware, engine_size(config))
    return EngineSet(members, max_sequences=max_sequences(config), dtype=dtype, way=way)


def engine_size(config: RunConfig) -> int:
    """Return how many devices an engine has: the embedded one knows no tensor parallelism."""
    rollout = config.worker.rollout
    return 1 if engine_module(rollout.engine) is engine_module("embedded") else rollout.tensor_parallel_size


def own_hardware(hardware: Hardware, place: EngineSeat) -> Hardware:
    """Return what an engine's process sees."""
    return replace(hardware, gpus=place.devices) if hardware.on_gpu else hardware


def build_hosted(config: RunConfig, hardware: Hardware, stack: ExitStack) -> Engine:
    """Make an engine in its own process."""
    model = open_model(config)
    load = partial(load_engine_weights, config, hardware, model)
    return cast(Engine, build_engine(config, hardware, model, load, stack))
