"""The context of a command that runs a model: what each of its phases needs."""

import logging
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from transformers import PretrainedConfig

from r1_cli.checkpoint.damage import STATE_FILE
from r1_cli.checkpoint.folders import CheckpointStore
from r1_cli.checkpoint.locks import lock_folder
from r1_cli.cluster.copies import ClusterCopies
from r1_cli.cluster.own_process import OwnProcess
from r1_cli.config import Provenance, RunConfig
from r1_cli.config.root import require_shareable
from r1_cli.faults.watchdog import Watchdog
from r1_cli.hardware import Hardware, find_hardware
from r1_cli.jobs.engines import start_engine_process, start_engines
from r1_cli.jobs.learner import (
    fit_placement,
    open_placement,
    rank_hardware,
    resolve_devices,
    start_copies,
    start_ranks,
)
from r1_cli.models.files import ModelFiles, open_critic_config, open_model
from r1_cli.placement import Placement
from r1_cli.plan.start import fetch_start, find_newer_copy, find_start, rename_damaged, require_same_shape
from r1_cli.runs.processes import record_driver
from r1_cli.runs.restarts import Restart, Restarts, began_before
from r1_cli.runs.track import libraries
from r1_cli.runs.track.console import ConsoleReporter
from r1_cli.runs.track.timing import TIMELINE_FILE, Timeline

if TYPE_CHECKING:
    from r1_cli.cluster.actors import ActorGroup
    from r1_cli.cluster.kept_actors import KeptActors
    from r1_cli.cluster.ray_connection import RayConnection

log = logging.getLogger("r1")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder, and what stays between the attempts of a run that starts again by itself (`restarts`)."""

    store: CheckpointStore
    start: Path | None  # the checkpoint to resume from; None: a new run
    restarts: Restarts | None = None  # None: the run does not start again
    restart: Restart | None = None  # after which this attempt starts
    connection: "RayConnection[Path] | None" = None
    watchdog: Watchdog = field(default_factory=Watchdog)

    @property
    def path(self) -> Path:
        return self.store.root

    def end_phase(self, name: str) -> None:
        """Record when a phase of a restart has ended, for the manifest."""
        if self.restart is not None:
            self.restart.end_phase(name)

    @property
    def kept(self) -> "KeptActors | None":
        """Processes of the starts before, once the run's cluster is open."""
        return self.connection.kept if self.connection is not None else None

    def describe_restart(self) -> dict[str, Any]:
        """Return what the manifest's entry of this start says of a restart; log how long it took. {} without one."""
        if self.restart is None:
            return {}
        entry = self.restart.describe(self.path, self.start, began_before(self.path))
        log.warning(
            "training again after %.0f s, with %d steps to take again (%.0f s were lost in all)",
            entry["seconds_to_restart"], entry["steps_again"], entry["seconds_lost"],
        )  # fmt: skip
        return entry


@dataclass(frozen=True, slots=True)
class Context:
    """`stack` closes what a phase opens."""

    config: RunConfig
    model: ModelFiles
    hardware: Hardware
    reporter: ConsoleReporter
    timeline: Timeline
    stack: ExitStack


@dataclass(frozen=True, slots=True)
class TrainingContext(Context):
    provenance: Provenance
    folder: RunFolder
    critic_config: PretrainedConfig | None  # None without a critic
    placement: Placement
    ranks: "ActorGroup | None"
    engines: "ActorGroup | None"
    engine_process: OwnProcess | None  # samples while the learner computes, on the same machine
    threads: int  # of torch, before an engine process gets half of them
    copies: ClusterCopies | None = None  # of the state in memory, on several nodes

    @property
    def devices(self) -> list[str]:
        names = [device for rank in self.placement.ranks for device in rank.devices]
        return names or [self.hardware.kind, *self.hardware.gpus]

    def begin(self, step: int, total_steps: int) -> None:
        trainer = self.config.trainer
        self.reporter.begin(step, total_steps, f"{trainer.project_name} / {trainer.experiment_name}")


def open_folder(config: RunConfig, stack: ExitStack) -> RunFolder:
    """Lock the run's folder and find the checkpoint to resume from. Raises ConfigError if either fails."""
    store = CheckpointStore(config.trainer.checkpoint_folder, limit=max(config.trainer.save_limit, 0) or None)
    stack.enter_context(lock_folder(store.root))
    stack.enter_context(record_driver(store.root))
    return RunFolder(store, find_folder_start(config, store))


def find_folder_start(config: RunConfig, store: CheckpointStore) -> Path | None:
    """Return the checkpoint to resume from, None for a new run; rename damaged ones. Raises ConfigError."""
    config = fetch_start(config, store)
    start = find_start(config, store)
    for line in rename_damaged(store, start):
        log.warning("%s", line)
    return find_newer_copy(config, store, start)


def find_restart(config: RunConfig, store: CheckpointStore, began: float) -> Path | None:
    """Return the checkpoint that a run resumes from after a fault: its newest.

    With `trainer.load_checkpoint_path`, checkpoints of the folder count that are newer than `began`, when the command
    was typed: others are not of this run.
    """
    if config.trainer.load_checkpoint_path:
        saved = {step: (store.path(step) / STATE_FILE).stat().st_mtime for step in store.steps()}
        own = [step for step, written in saved.items() if written >= began]
        if own:
            return store.path(own[-1])
    return find_folder_start(config, store)


def restore_copies(config: RunConfig, folder: RunFolder, copies: ClusterCopies) -> RunFolder:
    """Write the newest copy that the nodes hold together to the run's folder, if it is newer; return where to start.

    Raises CheckpointError if it cannot be written: the copies stay.
    """
    trainer = config.trainer
    if trainer.load_checkpoint_path or not trainer.find_last_checkpoint:
        return folder
    if (step := copies.restore(folder.store)) is None:
        return folder
    log.warning("step %d was in memory, in parts on several nodes: it is in %s now", step, folder.store.path(step))
    folder.end_phase("copies")
    return replace(folder, start=find_folder_start(config, folder.store))


def open_training(
    config: RunConfig,
    provenance: Provenance,
    folder: RunFolder,
    console: Console,
    stack: ExitStack,
    *,
    samples: bool = True,
) -> TrainingContext:
    """Read the model's files, place ranks and engines, and start their processes, which import in the background.

    Args:
        samples: whether the run samples; if not, it starts no engine.

    Returns:
        The context, whose configuration has the number of devices.

    Raises:
        ConfigError, ModelError: the model does not fit the checkpoint or the settings.
        ClusterError: a process does not start.
    """
    threads = torch.get_num_threads()
    model, hardware = open_model(config), find_hardware()
    require_same_shape(config, folder.start, model.config.to_dict())
    config = resolve_devices(config, provenance, hardware)
    require_shareable(config, model.config.get_text_config())
    critic_config = open_critic_config(config, model) if config.has_critic else None
    if critic_config is not None:
        require_shareable(config, critic_config.get_text_config(), "critic")
    stack.enter_context(libraries.redirect_library_logs(folder.path / libraries.LOG_FILE))
    placement = stack.enter_context(open_placement(config, hardware, samples=samples, connection=folder.connection))
    asked, config = config, fit_placement(config, placement)
    hardware = rank_hardware(hardware, placement.ranks)
    ranks = start_ranks(config, hardware, placement.ranks, stack, folder.kept)
    engines = start_engines(config, hardware, placement.engines, stack, folder.kept)
    process = start_engine_process(config, stack)
    copies = start_copies(asked, folder.path, placement, ranks, stack, folder.kept)
    reporter = stack.enter_context(ConsoleReporter(console, step_lines="console" in config.trainer.logger))
    timeline = Timeline(folder.path / TIMELINE_FILE, config.trainer.timeline)
    stack.callback(timeline.close)
    folder.end_phase("processes")
    if copies is not None:
        folder = restore_copies(config, folder, copies)
        require_same_shape(config, folder.start, model.config.to_dict())
    return TrainingContext(
        config, model, hardware, reporter, timeline, stack, provenance, folder, critic_config, placement, ranks,
        engines, process, threads, copies,
    )  # fmt: skip
