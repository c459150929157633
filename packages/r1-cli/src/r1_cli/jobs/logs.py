"""Open what a training run writes: logs, record, manifest and checkpoints."""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from shutil import disk_usage
from typing import Any

from r1_cli.checkpoint.folders import CheckpointError, CheckpointStore
from r1_cli.checkpoint.memory import KEPT, RAM_DISK, MachineCopies, MemorySaver, find_copies
from r1_cli.checkpoint.remote import Uploader
from r1_cli.checkpoint.saving import Ended, Saver
from r1_cli.checkpoint.stop import StopRequest
from r1_cli.cluster.copies import ClusterCopies
from r1_cli.config import ConfigError, Problem, RunConfig, printable
from r1_cli.hardware import free_memory
from r1_cli.jobs.context import TrainingContext
from r1_cli.jobs.data import Data
from r1_cli.jobs.resume import digest_code, record_rows, report_changes, report_code
from r1_cli.models.files import read_assets
from r1_cli.placement import Placement
from r1_cli.plan.disk import checkpoint_bytes, size_text
from r1_cli.runs.manifest import record_start
from r1_cli.runs.processes import kill_with_descendants
from r1_cli.runs.reader import RunReader
from r1_cli.runs.templates import copy_templates
from r1_cli.runs.track import RunInfo, Tracker
from r1_cli.train.recorder import Recorder
from r1_cli.train.types import Position

log = logging.getLogger("r1")


@dataclass(frozen=True, slots=True)
class Logs:
    tracker: Tracker
    recorder: Recorder
    manifest_entry: dict[str, Any]  # of this start; its `end` says how the run ended


@dataclass(frozen=True, slots=True)
class Saving:
    store: CheckpointStore
    saver: Saver
    stop: StopRequest
    assets: Callable[[], Mapping[str, bytes]]  # other files of a checkpoint, by path
    copies: MemorySaver | None


def open_logs(context: TrainingContext, data: Data, at: Position, total_steps: int) -> Logs:
    trainer, path, stack = context.config.trainer, context.folder.path, context.stack
    resumed = context.folder.start is not None
    info = RunInfo(trainer.project_name, trainer.experiment_name, path, printable(context.config), at.step)
    named = [*data.training.named(), *data.validation.named(" (validation)")]
    record_rows(path, named, resumed=resumed)
    copy_templates(path, info.config)
    starts = RunReader(path).starts()
    digests = {name: part.digest for name, part in named}
    numerics = {"threads": context.threads, "micro_batches": at.micro_batches}
    code, devices = digest_code(info.config), context.devices
    plan = {"steps": total_steps, "rows": {name: len(part) for name, part in named}}
    restart = context.folder.describe_restart()
    entry = stack.enter_context(
        record_start(path, info.config, digests, devices, at.step, numerics, code, plan, restart)
    )
    if resumed:
        threads = starts[-1].get("numerics", {}).get("threads", context.threads) if starts else context.threads
        before = {**RunReader(path).settings(), "OMP_NUM_THREADS": threads}
        report_changes(before, {**info.config, "OMP_NUM_THREADS": context.threads})
        report_code(starts[-1].get("code", {}) if starts else {}, code)
    tracker = Tracker(trainer.logger, info, context.reporter)
    stack.callback(tracker.close)
    recorder = Recorder(path, int(trainer.record_gb * 1e9), context.timeline.record)
    stack.callback(recorder.close)
    return Logs(tracker, recorder, entry)


def open_saving(context: TrainingContext) -> Saving:
    assets = cache(partial(read_assets, context.model, context.critic_config))
    if context.config.trainer.save_freq > 0:
        assets()  # now, while no step waits for it
    store, trainer = context.folder.store, context.config.trainer
    uploader = open_uploader(store, trainer.upload_path, context.stack) if trainer.upload_path else None
    published = uploader.upload if uploader else lambda: None
    saver = Saver(store, context.timeline.record, trainer.max_failed_saves, published)
    context.stack.callback(saver.close)
    stop = StopRequest(trainer.stop_seconds, store.latest, kill_with_descendants)
    folder, ended = context.folder.path, context.timeline.record
    copies = open_copies(context.config, folder, context.placement, context.copies, ended, context.stack)
    return Saving(store, saver, stop, assets, copies)


def open_uploader(store: CheckpointStore, url: str, stack: ExitStack) -> Uploader:
    """Return what uploads checkpoints. Raises ConfigError if nothing installed knows the URL."""
    try:
        uploader = Uploader(store, url)
    except CheckpointError as error:
        raise ConfigError([Problem("trainer.upload_path", str(error), url)]) from error
    stack.callback(uploader.close)
    return uploader


def open_copies(
    config: RunConfig, run: Path, placement: Placement, cluster: ClusterCopies | None, ended: Ended, stack: ExitStack
) -> MemorySaver | None:
    """Return what copies the state to memory, if that is configured and fits, or if there are copies to remove."""
    freq = config.trainer.memory_save_freq
    if freq <= 0 and find_copies(run) is None and cluster is None:
        return None
    if freq > 0 and (short := find_short(config, placement, cluster)):
        log.warning("no copies in memory (trainer.memory_save_freq=%d): %s", freq, short)
        freq = 0
    saver = MemorySaver(cluster or MachineCopies(run, free_memory), freq, ended)
    stack.callback(saver.close)
    return saver


def find_short(config: RunConfig, placement: Placement, cluster: ClusterCopies | None) -> str | None:
    """Return on which machine copies do not fit into memory, None if they fit."""
    size, count = checkpoint_bytes(config) or 0, KEPT + 2  # one is being written, and one is in the ranks
    if cluster is None:
        free = {"this machine": min(free_memory(), disk_usage(RAM_DISK).free) if RAM_DISK.is_dir() else 0}
    else:
        nodes = placement.nodes
        size //= len({rank.node.id for rank in placement.ranks})
        count += KEPT + 1 if len(nodes) > 1 else 0  # of the node before
        free = dict(zip((f"node {node.address}" for node in nodes), cluster.free_of_hosts(), strict=True))
    for where, there in free.items():
        if count * size > there:
            return f"{count} of about {size_text(size)} each need more than the {size_text(there)} free on {where}"
    return None
