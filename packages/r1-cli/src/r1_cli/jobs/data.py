"""Open the prompts of a run, show the plan that follows from them, and order them."""

import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from r1_cli.build.prompts import build_prompts, build_training_stream, prefetch_first_prompts, read_rates
from r1_cli.build.rendering import build_renderer, open_rendering
from r1_cli.build.rewards.dispatch import DispatchingVerifier, open_verifier
from r1_cli.build.rewards.ground_truths import GroundTruthReader, find_unusable_ground_truths
from r1_cli.build.rows import OpenSource, open_sources
from r1_cli.build.sampler import open_player
from r1_cli.checkpoint.folders import read_state
from r1_cli.cluster.remote_rendering import RenderPool
from r1_cli.config import RunConfig
from r1_cli.config.section import with_value
from r1_cli.config.sources import Source, training_sources, validation_sources
from r1_cli.hardware import find_card
from r1_cli.jobs.context import TrainingContext
from r1_cli.jobs.media import open_media, require_store_for_batch, start_media
from r1_cli.jobs.next_steps import typed_command
from r1_cli.plan.announce import announce, describe_player, render_sources, show_lines, show_phases, show_table
from r1_cli.plan.batches import Plan, make_plan
from r1_cli.plan.data_check.overlap import find_shared_validation
from r1_cli.train.groups.stream_position import StreamPosition, resume_stream_position
from r1_cli.train.types import PromptStream
from r1_data.curriculum import PassRates
from r1_data.dataset import Mixture, PromptDataset
from r1_data.render import Renderer

if TYPE_CHECKING:
    from r1_cli.build.teacher_prompts import TeacherRows
    from r1_cli.train.episodes.agents import Player

log = logging.getLogger("r1")


@dataclass(frozen=True, slots=True)
class DataSplit:
    sources: Sequence[Source]
    opened: Sequence[OpenSource]
    prompts: Mixture  # a part a source
    rates: PassRates | None = None  # of training rows with a curriculum by pass rate

    @property
    def sizes(self) -> list[int]:
        """The rows of each source that are read."""
        return self.rates.sizes if self.rates else [len(part) for part in self.prompts.parts]

    def named(self, suffix: str = "") -> list[tuple[str, PromptDataset]]:
        return [(f"{source.name}{suffix}", part) for source, part in zip(self.sources, self.prompts.parts, strict=True)]


@dataclass(frozen=True, slots=True)
class Data:
    training: DataSplit
    validation: DataSplit  # empty without validation rows
    renderer: Renderer

    @property
    def sources(self) -> list[Source]:
        return [*self.training.sources, *self.validation.sources]

    @property
    def opened(self) -> list[OpenSource]:
        return [*self.training.opened, *self.validation.opened]

    @property
    def parts(self) -> list[PromptDataset]:
        return [*self.training.prompts.parts, *self.validation.prompts.parts]


@dataclass(frozen=True, slots=True)
class PromptData(Data):
    """Prompts, and what scores the answers to them."""

    verifier: DispatchingVerifier
    media: RenderPool | None  # renders rows with media on the nodes of a cluster
    player: "Player | None"  # of a multi-turn run
    teachers: "Mapping[str, TeacherRows]" = field(default_factory=dict)  # by the keys of their settings


def open_data(context: TrainingContext, answers: Path | None = None) -> PromptData:
    """Open rewards, sources and teachers' servers, and check every row, also as teachers see it.

    Raises DataError or RewardSpecError if one is unusable, and what `open_teachers` does.

    `answers` is a run's folder, whose record stands for tools, environments and agents.
    """
    config, stack = context.config, context.stack
    sources, val_sources = training_sources(config.data), validation_sources(config.data)
    verifier = open_verifier(config, [*sources, *val_sources], stack)
    opened, val_opened = open_sources(sources), open_sources(val_sources)
    renderer = build_renderer(config, context.model)
    player = open_player(config, context.model, renderer, stack, answers)
    rendering = stack.enter_context(open_rendering(config, renderer, context.timeline.record))
    media = open_media(config, context.hardware, renderer, context.placement.ranks, stack, context.folder.kept)
    rendering = replace(rendering, remote=media, prepare=player.prepare if player else None)
    training, validation = (
        DataSplit(names, rows, build_prompts(config, rows, rendering, context.reporter.counter))
        for names, rows in ((sources, opened), (val_sources, val_opened))
    )
    training = replace(training, rates=read_rates(config, opened, training.prompts))
    teachers = read_teachers(context, training.prompts)
    return PromptData(training, validation, renderer, verifier, media, player, teachers)


def read_teachers(context: TrainingContext, prompts: Mixture) -> "dict[str, TeacherRows]":
    if not context.config.worker.teacher.used:
        return {}
    from r1_cli.build.teacher import open_teachers

    return open_teachers(context.config, context.model, prompts, context.reporter.counter)


def show_plan(context: TrainingContext, data: PromptData) -> Plan:
    """Print the plan. Raises ConfigError if rows do not fill a batch, or a node cannot hold one."""
    config, hardware, placement, console = context.config, context.hardware, context.placement, context.reporter.console
    training, validation = data.training.prompts, data.validation.prompts
    val_rows, rates = len(validation) if validation.parts else None, data.training.rates
    plan = make_plan(config, data.training.sizes, val_rows, rates.outside if rates else 0)
    announce(console, config, context.provenance, plan, placement)
    if data.player is not None:
        show_lines(console, describe_player(data.player))
    if hardware.on_gpu:
        show_phases(console, with_longest_prompt(config, data.teachers), plan, find_card())
    show_table(console, render_sources(data.sources, data.opened, [part.summary for part in data.parts]))
    for line in find_unusable_ground_truths(GroundTruthReader(config, data.sources), data.opened):
        log.warning("%s", line)
    warn_of_shared_rows(context, data)
    require_store_for_batch(config, hardware, placement.ranks, training)
    start_media(data.media, training, validation)
    return plan


def warn_of_shared_rows(context: TrainingContext, data: Data) -> None:
    """Warn in one line if a new run's validation rows are training rows, with the command that lists them."""
    if context.folder.start is not None:
        return
    found, line = find_shared_validation(data.training.opened, data.validation.opened)
    if line:
        words = [*([str(context.provenance.file)] if context.provenance.file else []), *context.provenance.overrides]
        command = f"{typed_command(sys.argv[0], os.environ)} data check {shlex.join(words)} --against val"
        if found:
            log.warning("%s; to see them: %s", line, command)
        else:
            log.info("%s; to compare all: %s", line, command)


def with_longest_prompt(config: RunConfig, teachers: "Mapping[str, TeacherRows]") -> RunConfig:
    """Return the configuration with the measured length of the prompts of teachers that see more than the policy."""
    longest = max((one.longest for one in teachers.values() if one.prompts), default=0)
    return with_value(config, "worker.teacher.max_prompt_length", longest) if longest else config


def open_stream(context: TrainingContext, data: Data) -> PromptStream:
    """Return the order of the prompts, and render the first ones in the background."""
    config, start, training = context.config, context.folder.start, data.training
    stream = build_training_stream(config, training.prompts, training.sources, training.rates)
    stream_position = resume_stream_position(read_state(start)) if start else StreamPosition()
    first: Sequence[int] = stream_position.unfinished
    if not first and (start is None or config.data.curriculum.by != "online"):  # which reads more than the position
        first = stream.batch(stream_position.cursor)
    prefetch_first_prompts(config, training.prompts, first, data.validation.prompts)
    return stream
