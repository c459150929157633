"""`r1 train`, from a checked configuration to a trained checkpoint."""

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from r1_cli.build import algorithm
from r1_cli.build.canary import build_canary
from r1_cli.build.open_engines import build_sampling, build_scorer
from r1_cli.build.open_reference import attach_references, in_training
from r1_cli.build.packing import settle_packing
from r1_cli.build.prompts import begin_rendering, build_prompts, build_stream, build_validation
from r1_cli.build.rehearsal import settle_micro_batches
from r1_cli.build.rendering import build_renderer, open_rendering
from r1_cli.build.rows import open_sources
from r1_cli.build.truths import TruthReader, first_problems
from r1_cli.build.verifiers import open_verifier, require_columns
from r1_cli.checkpoint.folders import CheckpointError, CheckpointStore, read_state
from r1_cli.checkpoint.rows import record_rows
from r1_cli.checkpoint.saving import Saver
from r1_cli.checkpoint.stop import StopRequest
from r1_cli.config import Provenance, RunConfig, printable
from r1_cli.config.base import shares_base
from r1_cli.config.sequences import require_shareable
from r1_cli.config.sources import training_sources, validation_sources
from r1_cli.hardware import find_card, find_hardware
from r1_cli.jobs.closing import say_what_comes_next
from r1_cli.jobs.learning import open_seats, prepare_learner, seated_hardware, settle_devices, start_ranks
from r1_cli.jobs.media import begin_media, open_media, require_batch_room
from r1_cli.jobs.sampling import (
    open_engine,
    open_engine_beside,
    open_engine_upon,
    start_engine_beside,
    start_engines,
)
from r1_cli.models.files import open_critic_config, open_model, read_assets
from r1_cli.plan.announce import announce, render_sources, show_phases, show_table
from r1_cli.plan.batches import Plan, make_plan
from r1_cli.plan.disk import require_room
from r1_cli.plan.start import find_start, hold_folder, require_same_shape, set_damaged_aside
from r1_cli.runs.record.manifest import describe as describe_start
from r1_cli.runs.record.manifest import read_manifest
from r1_cli.runs.track import RunInfo, Tracker, libraries
from r1_cli.runs.track.console import ConsoleReporter, configure_logging
from r1_cli.runs.track.files import read_settings
from r1_cli.runs.track.timeline import TIMELINE_FILE, Timeline
from r1_cli.train import loop
from r1_cli.train.groups.supply import Supply, load_surplus, resume_supply
from r1_cli.train.metrics.validate import Validation
from r1_cli.train.recorder import Recorder
from r1_cli.train.roles import Critic, Dataset, Learner, Position, Schedule
from r1_cli.train.sampling.ahead import Ahead, load_ahead
from r1_cli.train.sampling.collect import DynamicSampling
from r1_cli.train.sampling.proof import prove

log = logging.getLogger("r1")


def train(config: RunConfig, provenance: Provenance, *, until: int | None = None) -> int:
    """Train as configured: check the data, show the plan, resume if there is something to resume, run the loop.

    Args:
        until: the step to end after, where that is not the last: the steps up to it are those of the whole run.

    Returns:
        The exit code: 0, or 128 and the number of the signal that ended the run.

    Raises:
        ConfigError, DataError, ModelError, RewardSpecError: something cannot work; found before the first step.
        ClusterError: a rank is gone.
    """
    console = Console()
    configure_logging(console)
    algorithm.try_algorithm(config)
    require_room(config)
    threads = torch.get_num_threads()  # before an engine in a process of its own gets half of them
    store = CheckpointStore(config.trainer.checkpoint_folder, limit=max(config.trainer.save_limit, 0) or None)
    with ExitStack() as stack:
        stack.enter_context(hold_folder(store.root))
        start = find_start(config, store)
        for line in set_damaged_aside(store, start):
            log.warning("%s", line)
        model, hardware = open_model(config), find_hardware()
        require_same_shape(config, start, model.config.to_dict())
        config = settle_devices(config, provenance, hardware)
        require_shareable(config, model.config.get_text_config())
        critic_config = open_critic_config(config, model) if config.has_critic else None
        if critic_config is not None:
            require_shareable(config, critic_config.get_text_config(), "critic")
        stack.enter_context(libraries.quiet(store.root / libraries.LOG_FILE))
        seats = stack.enter_context(open_seats(config, hardware))
        hardware = seated_hardware(hardware, seats.ranks)
        ranks = start_ranks(config, hardware, seats.ranks, stack)
        engines = start_engines(config, hardware, seats.engines, stack)
        beside = start_engine_beside(config, stack)
        reporter = stack.enter_context(ConsoleReporter(console, step_lines="console" in config.trainer.logger))
        sources, val_sources = training_sources(config.data), validation_sources(config.data)
        verifier = open_verifier(config, [*sources, *val_sources], stack)
        opened, val_opened = open_sources(sources), open_sources(val_sources)
        timeline = Timeline(store.root / TIMELINE_FILE, config.trainer.timeline)
        stack.callback(timeline.close)
        rendering = stack.enter_context(open_rendering(config, build_renderer(config, model), timeline.record))
        media = open_media(config, hardware, rendering.renderer, seats.ranks, stack)
        rendering = replace(rendering, elsewhere=media)
        prompts = build_prompts(config, opened, rendering, reporter.counter)
        val_prompts = build_prompts(config, val_opened, rendering, reporter.counter)
        plan = make_plan(config, [len(part) for part in prompts.parts], len(val_prompts) if val_sources else None)
        announce(console, config, provenance, plan, seats)
        if hardware.on_gpu:
            show_phases(console, config, plan, find_card())
        summaries = [part.summary for part in (*prompts.parts, *val_prompts.parts)]
        show_table(console, render_sources([*sources, *val_sources], [*opened, *val_opened], summaries))
        for line in first_problems(TruthReader(config, [*sources, *val_sources]), [*opened, *val_opened]):
            log.warning("%s", line)
        require_batch_room(config, hardware, seats.ranks, prompts)
        begin_media(media, prompts, val_prompts)
        schedule = replace(build_schedule(config, plan), until=until)
        stream = build_stream(config, prompts, sources)
        supply = resume_supply(read_state(start)) if start else Supply()
        begin_rendering(config, prompts, supply.pending or stream.batch(supply.cursor), val_prompts)
        load_learner = prepare_learner(config, hardware, model, schedule, seats.ranks, ranks, stack)
        if shares_base(config, on_gpu=hardware.on_gpu):
            learner, critic = load_learner()
            engine = open_engine_upon(learner, config, hardware, model, stack)
        else:
            # Before the learner's weights are on the devices: vLLM claims a share of what is free.
            if beside is not None:
                engine = open_engine_beside(config, hardware, beside)
            else:
                engine = open_engine(config, hardware, model, seats.engines, engines, stack)
            learner, critic = load_learner()
        settle_packing(config, hardware, model, rendering.renderer, learner, critic)
        devices = [device for seat in seats.ranks for device in seat.devices] or [hardware.kind, *hardware.gpus]
        starts = read_manifest(Path(store.root))
        chosen = read_state(start).get("micro_batches", {}) if start else sizes_of(starts, config, devices)
        pictures = any(part.has_media for part in prompts.parts)
        config, chosen = settle_micro_batches(
            config, hardware, model, rendering.renderer, learner, critic, chosen, pictures=pictures
        )
        at = load_start(learner, critic, prompts, start, algorithm.build_start(config))
        at = replace(at, micro_batches=chosen)
        names = config.trainer.project_name, config.trainer.experiment_name
        reporter.begin(at.step, schedule.total_steps, " / ".join(names))
        info = RunInfo(*names, store.root, printable(config), at.step)
        named = [(one.name, part) for one, part in zip(sources, prompts.parts, strict=True)]
        named += [(f"{one.name} (validation)", part) for one, part in zip(val_sources, val_prompts.parts, strict=True)]
        record_rows(Path(store.root), named, resumed=start is not None)
        rows_known = {name: part.digest for name, part in named}
        numerics = {"threads": threads, "micro_batches": chosen}
        about = describe_start(store.root, info.config, rows_known, devices, at.step, numerics)
        this_start = stack.enter_context(about)
        if start:
            used = starts[-1].get("numerics", {}).get("threads", threads) if starts else threads
            then = {**read_settings(store.root), "OMP_NUM_THREADS": used}
            report_changes(then, {**info.config, "OMP_NUM_THREADS": threads})
        tracker = Tracker(config.trainer.logger, info, reporter)
        stack.callback(tracker.close)
        recorder = Recorder(store.root, int(config.trainer.record_gb * 1e9), timeline.record)
        stack.callback(recorder.close)
        require_columns(verifier, [*sources, *val_sources], [*prompts.parts, *val_prompts.parts])
        rows = [(one.name, part) for one, part in zip(sources, prompts.parts, strict=True)]
        rows += [(one.name, part) for one, part in zip(val_sources, val_prompts.parts, strict=True)]
        find = partial(in_training, config, hardware, model, learner)
        folders = [Path(store.root), *([start.parent] if start else [])]
        attach_references(
            config, verifier, model, rows, folders, find, engine, reporter.progress, resumed=start is not None
        )
        scorer = build_scorer(config, model, verifier, engine)
        if config.worker.rollout.canary:
            scorer = prove(scorer, learner, build_canary(config, hardware, model, rendering.renderer, learner))
        sampling, val_sampling = build_sampling(config)
        sets = build_validation(val_prompts, val_sources, val_sampling)
        update = algorithm.build_update(config, updates_per_step=schedule.updates_per_step)
        trainer, batch_size = config.trainer, config.data.val_batch_size
        validation = Validation(scorer, sets, batch_size, trainer.val_generations_to_log, reporter.progress)
        collector = DynamicSampling(
            scorer=scorer,
            dataset=prompts,
            stream=stream,
            sampling=sampling,
            baselines="baselines" in update.needs,
            shaping=algorithm.build_shaping(config),
            filter_key=config.algorithm.filter_key if config.algorithm.online_filtering else "overall",
            groups=config.data.rollout_batch_size,
            max_batches=trainer.max_try_make_batch,
            # Groups that wait are as much older than others as they have waited.
            surplus_max_age=config.algorithm.surplus_max_age + trainer.max_staleness,
            max_prompt_length=config.data.max_prompt_length,
            progress=reporter.progress,
        )
        ahead = None
        if trainer.max_staleness:
            ahead = Ahead(
                collector,
                scorer.generator,
                staleness=trainer.max_staleness,
                total_steps=schedule.total_steps,
                ahead=load_ahead(start, at, prompts.__getitem__) if start else (),
                ended=timeline.record,
            )
            stack.callback(ahead.close)
        assets = cache(partial(read_assets, model, critic_config))
        if trainer.save_freq > 0:
            assets()  # now, while no step waits for it
        saver = Saver(store, timeline.record)
        stack.callback(saver.close)
        run = loop.Run(
            learner=learner,
            engine=scorer.generator,
            collector=collector,
            ahead=ahead,
            update=update,
            schedule=schedule,
            validation=validation if sets else None,
            store=store,
            saver=saver,
            tracker=tracker,
            recorder=recorder,
            stop=stack.enter_context(StopRequest().listening()),
            assets=assets,
            critic=critic,
            timeline=timeline,
        )
        if trainer.val_only:
            if run.validation is None:
                raise ValueError("there is nothing to validate on: data.val_files is null")
            tracker.log(at.step, *loop.validate(run, run.validation, at.step))
            loop.flush(run)
            return 0
        last = loop.train(run, at)
        if run.stop.exit_code:
            this_start["end"] = f"left after step {last.step}, by a signal"
    if until is None:
        say_what_comes_next(console, store, last, schedule.total_steps)
    return run.stop.exit_code


def load_start(
    learner: Learner, critic: Critic | None, prompts: Dataset, start: Path | None, begin: Position
) -> Position:
    """Load the checkpoint, if there is one, into learner and critic; return the position to go on from.

    Raises:
        CheckpointError: it lacks a file, or is not of this model.
    """
    if start is None:
        return begin
    state = read_state(start)
    if state["model_only"]:
        log.warning("%s was saved without the optimizer (save_model_only): its moments start at zero", start)
    try:
        if critic is not None:
            learner.offload()
            load_critic(critic, start, model_only=state["model_only"])
        learner.load(start / "actor", model_only=state["model_only"])
    except (FileNotFoundError, ValueError) as error:
        raise CheckpointError(f"{start} cannot be resumed from: {error}") from error
    log.info("going on from %s", start)
    at = begin.resume(state)
    return replace(at, supply=replace(at.supply, surplus=load_surplus(start, prompts.__getitem__)))


def sizes_of(starts: Sequence[Mapping[str, Any]], config: RunConfig, devices: Sequence[str]) -> dict[str, int]:
    """Return the sizes of micro-batches that the last of the folder's starts chose, by key.

    A run that was killed before its first checkpoint and is started again is then the same run, to the bit. None if
    that start had other rows, models or devices: the sizes may be slow now, or not fit into memory.
    """
    if not starts or starts[-1]["host"]["devices"] != devices:
        return {}
    sizes: dict[str, int] = starts[-1].get("numerics", {}).get("micro_batches", {})
    before, now = (flatten(json.loads(json.dumps(one))) for one in (starts[-1]["config"], printable(config)))
    differing = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)} - sizes.keys()
    return {} if any(key.startswith(("data.", "worker.")) for key in differing) else dict(sizes)


def load_critic(critic: Critic, start: Path, *, model_only: bool) -> None:
    """Load the critic of a checkpoint, if it has one, and let it leave the device until it is needed."""
    folder = start / "critic"
    if folder.is_dir():
        critic.load(folder, model_only=model_only)
    else:
        log.warning("%s has no critic: it begins as the model of worker.critic.model.model_path", start)
    critic.offload()


def report_changes(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Say which settings differ from those that the run was started with."""
    old, new = flatten(before), flatten(now)
    for key in new:
        if key in old and old[key] != new[key]:
            log.warning("going on with another setting than before: %s=%s, was %s", key, new[key], old[key])


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under their dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def build_schedule(config: RunConfig, plan: Plan) -> Schedule:
    """Return the run's timetable. The plan must know the number of rows."""
    trainer, actor, critic = config.trainer, config.worker.actor, config.worker.critic
    return Schedule(
        total_steps=plan.total_steps or 0,
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
    )
