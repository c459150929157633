"""The phases that start a training run. Each takes what earlier phases returned.

Processes start while this one reads the data, engines reserve memory before the learner's weights are loaded, and
nothing trains before rows, rewards and layouts are checked.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from rich.console import Console

from r1_cli.build import algorithm
from r1_cli.build.canary import build_canary
from r1_cli.build.packing import choose_layout
from r1_cli.build.profiling import choose_micro_batches
from r1_cli.build.prompts import build_prompts, build_stream, build_validation, prefetch_first_prompts
from r1_cli.build.rendering import build_renderer, open_rendering
from r1_cli.build.rewards.connect import connect_references, in_training
from r1_cli.build.rewards.dispatch import open_verifier, require_columns
from r1_cli.build.rewards.ground_truths import GroundTruthReader, find_unusable_ground_truths
from r1_cli.build.rows import open_sources
from r1_cli.build.sampler import build_collector, build_sampler, build_sampling, open_player, with_record
from r1_cli.checkpoint.folders import CheckpointStore, read_state
from r1_cli.checkpoint.locks import lock_folder
from r1_cli.checkpoint.saving import Saver
from r1_cli.checkpoint.stop import StopRequest
from r1_cli.config import Provenance, RunConfig, printable
from r1_cli.config.root import require_shareable
from r1_cli.config.sources import training_sources, validation_sources
from r1_cli.hardware import find_card, find_hardware
from r1_cli.jobs.engines import (
    open_engine,
    open_engine_in_process,
    open_engine_on_base,
    start_engine_process,
    start_engines,
)
from r1_cli.jobs.learner import open_placement, prepare_learner, rank_hardware, resolve_devices, start_ranks
from r1_cli.jobs.media import open_media, require_store_for_batch, start_media
from r1_cli.jobs.resume import find_previous_sizes, load_start, record_rows, report_changes
from r1_cli.jobs.startup import (
    Data,
    DataSplit,
    Devices,
    Logs,
    Models,
    PromptData,
    Reports,
    RunFolder,
    Sampling,
    Saving,
    Trained,
)
from r1_cli.models.files import open_critic_config, open_model, read_assets
from r1_cli.plan.announce import announce, describe_player, render_sources, show_lines, show_phases, show_table
from r1_cli.plan.batches import Plan, make_plan
from r1_cli.plan.start import find_start, rename_damaged, require_same_shape
from r1_cli.runs.manifest import record_start
from r1_cli.runs.reader import RunReader
from r1_cli.runs.track import RunInfo, Tracker, libraries
from r1_cli.runs.track.console import ConsoleReporter
from r1_cli.runs.track.timing import TIMELINE_FILE, Timeline
from r1_cli.train import loop
from r1_cli.train.groups.stream_position import StreamPosition, resume_stream_position
from r1_cli.train.metrics.validate import Validation
from r1_cli.train.recorder import Recorder
from r1_cli.train.sampling.async_sampler import AsyncSampler, load_pending_steps
from r1_cli.train.sampling.weight_check import add_weight_check
from r1_cli.train.types import (
    Policy,
    Position,
    PromptStream,
    Sampler,
    Schedule,
    Teacher,
    ValueModel,
)
from r1_rollout.types import Generator

log = logging.getLogger("r1")


@dataclass(frozen=True, slots=True)
class TrainingSession:
    """One start of `r1 train`, phase by phase. `stack` closes what a phase opens."""

    console: Console
    provenance: Provenance
    stack: ExitStack
    threads: int  # of torch, before an engine process gets half of them

    def open_folder(self, config: RunConfig) -> RunFolder:
        """Lock the run's folder and find the checkpoint to resume from. Raises ConfigError if either fails."""
        store = CheckpointStore(config.trainer.checkpoint_folder, limit=max(config.trainer.save_limit, 0) or None)
        self.stack.enter_context(lock_folder(store.root))
        start = find_start(config, store)
        for line in rename_damaged(store, start):
            log.warning("%s", line)
        return RunFolder(store, start)

    def reserve_devices(self, config: RunConfig, folder: RunFolder) -> tuple[RunConfig, Devices]:
        """Read the model's files, place ranks and engines, and start their processes.

        Returns:
            The configuration with the number of devices, and what was reserved.

        Raises:
            ConfigError, ModelError: the model does not fit the checkpoint or the settings.
            ClusterError: a process does not start.
        """
        model, hardware = open_model(config), find_hardware()
        require_same_shape(config, folder.start, model.config.to_dict())
        config = resolve_devices(config, self.provenance, hardware)
        require_shareable(config, model.config.get_text_config())
        critic_config = open_critic_config(config, model) if config.has_critic else None
        if critic_config is not None:
            require_shareable(config, critic_config.get_text_config(), "critic")
        self.stack.enter_context(libraries.redirect_library_logs(folder.path / libraries.LOG_FILE))
        placement = self.stack.enter_context(open_placement(config, hardware))
        hardware = rank_hardware(hardware, placement.ranks)
        ranks = start_ranks(config, hardware, placement.ranks, self.stack)
        engines = start_engines(config, hardware, placement.engines, self.stack)
        process = start_engine_process(config, self.stack)
        return config, Devices(model, critic_config, hardware, placement, ranks, engines, process)

    def open_reports(self, config: RunConfig, folder: RunFolder) -> Reports:
        console = ConsoleReporter(self.console, step_lines="console" in config.trainer.logger)
        self.stack.enter_context(console)
        timeline = Timeline(folder.path / TIMELINE_FILE, config.trainer.timeline)
        self.stack.callback(timeline.close)
        return Reports(console, timeline)

    def open_data(
        self, config: RunConfig, devices: Devices, reports: Reports, answers: Path | None = None
    ) -> PromptData:
        """Open rewards and sources, and check every row. Raises DataError or RewardSpecError if one is unusable.

        `answers` is a run's folder, whose record stands for tools, environments and agents.
        """
        sources, val_sources = training_sources(config.data), validation_sources(config.data)
        verifier = open_verifier(config, [*sources, *val_sources], self.stack)
        opened, val_opened = open_sources(sources), open_sources(val_sources)
        renderer = build_renderer(config, devices.model)
        player = open_player(config, devices.model, renderer, self.stack, answers)
        rendering = self.stack.enter_context(open_rendering(config, renderer, reports.timeline.record))
        media = open_media(config, devices.hardware, renderer, devices.placement.ranks, self.stack)
        rendering = replace(rendering, remote=media, prepare=player.prepare if player else None)
        training, validation = (
            DataSplit(names, rows, build_prompts(config, rows, rendering, reports.console.counter))
            for names, rows in ((sources, opened), (val_sources, val_opened))
        )
        return PromptData(training, validation, renderer, verifier, media, player)

    def show_plan(self, config: RunConfig, devices: Devices, data: PromptData) -> Plan:
        """Print the plan. Raises ConfigError if rows do not fill a batch, or a node cannot hold one."""
        training, validation = data.training.prompts, data.validation.prompts
        plan = make_plan(config, [len(part) for part in training.parts], len(validation) if validation.parts else None)
        announce(self.console, config, self.provenance, plan, devices.placement)
        if data.player is not None:
            show_lines(self.console, describe_player(data.player))
        if devices.hardware.on_gpu:
            show_phases(self.console, config, plan, find_card())
        summaries = [part.summary for part in data.parts]
        show_table(self.console, render_sources(data.sources, data.opened, summaries))
        for line in find_unusable_ground_truths(GroundTruthReader(config, data.sources), data.opened):
            log.warning("%s", line)
        require_store_for_batch(config, devices.hardware, devices.placement.ranks, training)
        start_media(data.media, training, validation)
        return plan

    def open_stream(self, config: RunConfig, folder: RunFolder, data: Data) -> PromptStream:
        """Return the order of the prompts, and render the first ones in the background."""
        stream = build_stream(config, data.training.prompts, data.training.sources)
        stream_position = resume_stream_position(read_state(folder.start)) if folder.start else StreamPosition()
        first = stream_position.unfinished or stream.batch(stream_position.cursor)
        prefetch_first_prompts(config, data.training.prompts, first, data.validation.prompts)
        return stream

    def load_models(self, config: RunConfig, devices: Devices, schedule: Schedule) -> Models:
        """Load learner, critic and engine. Raises ModelError or ClusterError."""
        load_learner = self.prepare_learner(config, devices, schedule)
        if config.shares_base(on_gpu=devices.hardware.on_gpu):
            learner, critic = load_learner()
            return Models(learner, critic, self.open_engine(config, devices, learner))
        # Before the learner's weights are on the devices: vLLM claims a share of what is free.
        engine = self.open_engine(config, devices, None)
        return Models(*load_learner(), engine)

    def prepare_learner(
        self, config: RunConfig, devices: Devices, schedule: Schedule
    ) -> Callable[[], tuple[Policy, ValueModel | None]]:
        placement = devices.placement
        return prepare_learner(
            config, devices.hardware, devices.model, schedule, placement.ranks, devices.ranks, self.stack
        )

    def open_engine(self, config: RunConfig, devices: Devices, learner: Policy | None) -> Generator:
        """`learner` gives the base of an adapter if the engine shares it."""
        model, hardware = devices.model, devices.hardware
        if config.shares_base(on_gpu=hardware.on_gpu):
            return open_engine_on_base(learner, config, hardware, model, self.stack)
        if devices.engine_process is not None:
            return open_engine_in_process(config, hardware, devices.engine_process)
        return open_engine(config, hardware, model, devices.placement.engines, devices.engines, self.stack)

    def check_models(
        self,
        config: RunConfig,
        folder: RunFolder,
        devices: Devices,
        data: Data,
        models: Trained,
        recorded: RunConfig | None = None,
    ) -> tuple[RunConfig, dict[str, int]]:
        """Choose correct batch layouts and micro-batch sizes that fit; return the configuration and the sizes by key.

        Args:
            recorded: the configuration as `open_logs` records it, if it is another.

        Raises:
            ConfigError: a setting needs a wrong layout, or a size does not fit into memory.
        """
        model, hardware, start = devices.model, devices.hardware, folder.start
        choose_layout(config, hardware, model, data.renderer, models.learner, models.critic)
        if start:
            chosen = read_state(start).get("micro_batches", {})
        else:
            chosen = find_previous_sizes(RunReader(folder.path).starts(), recorded or config, devices.names)
        pictures = any(part.has_media for part in data.training.prompts.parts)
        return choose_micro_batches(
            config, hardware, model, data.renderer, models.learner, models.critic, chosen, pictures=pictures
        )

    def resume(
        self, config: RunConfig, folder: RunFolder, data: Data, models: Trained, micro_batches: Mapping[str, int]
    ) -> Position:
        """Load the checkpoint, if any, and return the position. Raises CheckpointError if it does not fit."""
        begin = algorithm.build_start(config)
        at = load_start(models.learner, models.critic, data.training.prompts, folder.start, begin)
        return replace(at, micro_batches=micro_batches)

    def open_logs(
        self, config: RunConfig, folder: RunFolder, devices: Devices, data: Data, reports: Reports, at: Position
    ) -> Logs:
        trainer, path, resumed = config.trainer, folder.path, folder.start is not None
        info = RunInfo(trainer.project_name, trainer.experiment_name, path, printable(config), at.step)
        named = [*data.training.named(), *data.validation.named(" (validation)")]
        record_rows(path, named, resumed=resumed)
        starts = RunReader(path).starts()
        digests = {name: part.digest for name, part in named}
        numerics = {"threads": self.threads, "micro_batches": at.micro_batches}
        entry = self.stack.enter_context(record_start(path, info.config, digests, devices.names, at.step, numerics))
        if resumed:
            threads = starts[-1].get("numerics", {}).get("threads", self.threads) if starts else self.threads
            before = {**RunReader(path).settings(), "OMP_NUM_THREADS": threads}
            report_changes(before, {**info.config, "OMP_NUM_THREADS": self.threads})
        tracker = Tracker(trainer.logger, info, reports.console)
        self.stack.callback(tracker.close)
        recorder = Recorder(path, int(trainer.record_gb * 1e9), reports.timeline.record)
        self.stack.callback(recorder.close)
        return Logs(tracker, recorder, entry)

    def connect_rewards(
        self,
        config: RunConfig,
        folder: RunFolder,
        devices: Devices,
        data: PromptData,
        models: Models,
        reports: Reports,
        logs: Logs,
    ) -> Sampler:
        """Connect rewards to their models, and the engine to the weight check.

        Raises:
            ConfigError, ModelError, RewardSpecError: a reward lacks a column, a model or base scores.
            EngineError: the engine's weights cannot be checked.
        """
        model, hardware, learner = devices.model, devices.hardware, models.learner
        self.connect_verifier(config, folder, devices, data, models, reports)
        player = with_record(data.player, logs.recorder)
        sampler = build_sampler(config, model, data.verifier, models.engine, player)
        if not config.worker.rollout.canary:
            return sampler
        return add_weight_check(sampler, learner, build_canary(config, hardware, model, data.renderer, learner))

    def connect_verifier(
        self,
        config: RunConfig,
        folder: RunFolder,
        devices: Devices,
        data: PromptData,
        models: Models,
        reports: Reports,
    ) -> None:
        """Connect rewards to their models. Raises ConfigError, ModelError and RewardSpecError as `connect_rewards`."""
        model, hardware, learner = devices.model, devices.hardware, models.learner
        require_columns(data.verifier, data.sources, data.parts)
        connect_references(
            config,
            data.verifier,
            model,
            [*data.training.named(), *data.validation.named()],
            [folder.path, *([folder.start.parent] if folder.start else [])],
            partial(in_training, config, hardware, model, learner),
            models.engine,
            reports.console.progress,
            resumed=folder.start is not None,
        )

    def open_sampling(
        self,
        config: RunConfig,
        folder: RunFolder,
        data: PromptData,
        reports: Reports,
        schedule: Schedule,
        stream: PromptStream,
        sampler: Sampler,
        at: Position,
    ) -> Sampling:
        training, _ = build_sampling(config)
        trainer, progress = config.trainer, reports.console.progress
        validation = self.open_validation(config, data, reports, sampler)
        update = algorithm.build_update(config, updates_per_step=schedule.updates_per_step)
        collector = build_collector(config, data.training.prompts, stream, training, sampler, update, progress)
        async_sampler = None
        if trainer.max_staleness:
            async_sampler = AsyncSampler(
                collector,
                sampler.generator,
                staleness=trainer.max_staleness,
                total_steps=schedule.total_steps,
                resumed=load_pending_steps(folder.start, at, data.training.prompts.__getitem__) if folder.start else (),
                ended=reports.timeline.record,
            )
            self.stack.callback(async_sampler.close)
        return Sampling(sampler.generator, collector, async_sampler, validation, update)

    def open_validation(
        self, config: RunConfig, data: PromptData, reports: Reports, sampler: Sampler
    ) -> Validation | None:
        _, sampling = build_sampling(config)
        sets = build_validation(data.validation.prompts, data.validation.sources, sampling)
        shown, progress = config.trainer.val_generations_to_log, reports.console.progress
        return Validation(sampler, sets, config.data.val_batch_size, shown, progress) if sets else None

    def open_saving(self, config: RunConfig, folder: RunFolder, devices: Devices, reports: Reports) -> Saving:
        assets = cache(partial(read_assets, devices.model, devices.critic_config))
        if config.trainer.save_freq > 0:
            assets()  # now, while no step waits for it
        saver = Saver(folder.store, reports.timeline.record)
        self.stack.callback(saver.close)
        return Saving(folder.store, saver, self.stack.enter_context(StopRequest().listening()), assets)

    def open_run(
        self,
        config: RunConfig,
        folder: RunFolder,
        devices: Devices,
        data: Data,
        reports: Reports,
        models: Models,
        logs: Logs,
        schedule: Schedule,
        sampling: Sampling,
    ) -> loop.Run:
        saving = self.open_saving(config, folder, devices, reports)
        return loop.Run(
            learner=models.learner,
            engine=sampling.engine,
            collector=sampling.collector,
            async_sampler=sampling.async_sampler,
            update=sampling.update,
            schedule=schedule,
            validation=sampling.validation,
            teacher=open_teacher(config, devices, models.learner, data),
            store=saving.store,
            saver=saving.saver,
            tracker=logs.tracker,
            recorder=logs.recorder,
            stop=saving.stop,
            assets=saving.assets,
            critic=models.critic,
            timeline=reports.timeline,
        )


def open_teacher(config: RunConfig, devices: Devices, learner: Policy, data: Data) -> Teacher | None:
    if not config.worker.teacher.used:
        return None
    from r1_cli.build.teacher import build_teacher

    return build_teacher(config, devices.hardware, devices.model, learner, data.training.prompts)


def build_schedule(config: RunConfig, total_steps: int, until: int | None = None) -> Schedule:
    trainer, actor, critic = config.trainer, config.worker.actor, config.worker.critic
    return Schedule(
        total_steps=total_steps,
        rollout_batch_size=config.data.rollout_batch_size,
        global_batch_size=actor.global_batch_size,
        ppo_epochs=actor.ppo_epochs,
        max_idle_steps=trainer.max_idle_steps,
        train_generations_to_log=trainer.train_generations_to_log,
        val_freq=trainer.val_freq,
        val_before_train=trainer.val_before_train,
        save_freq=trainer.save_freq,
        save_model_only=trainer.save_model_only,
        critic_global_batch_size=critic.global_batch_size,
        critic_ppo_epochs=critic.ppo_epochs,
        critic_warmup=trainer.critic_warmup if config.has_critic else 0,
        until=until,
    )
