"""What the phases of a run's start return."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from r1_cli.build.rewards.dispatch import DispatchingVerifier
from r1_cli.build.rows import OpenSource
from r1_cli.checkpoint.folders import CheckpointStore
from r1_cli.checkpoint.saving import Saver
from r1_cli.checkpoint.stop import StopRequest
from r1_cli.cluster.own_process import OwnProcess
from r1_cli.cluster.placement import Placement
from r1_cli.cluster.remote_rendering import RenderPool
from r1_cli.config import RunConfig
from r1_cli.config.sources import Source
from r1_cli.hardware import Hardware
from r1_cli.models.files import ModelFiles
from r1_cli.runs.track import Tracker
from r1_cli.runs.track.console import ConsoleReporter
from r1_cli.runs.track.timing import Timeline
from r1_cli.train.metrics.validate import Validation
from r1_cli.train.recorder import Recorder
from r1_cli.train.sampling.async_sampler import AsyncSampler
from r1_cli.train.sampling.collect import DynamicSampling
from r1_cli.train.types import Policy, Update, ValueModel
from r1_data.dataset import Mixture, PromptDataset
from r1_data.render import Renderer
from r1_rollout.types import Generator

if TYPE_CHECKING:
    from r1_cli.cluster.actors import ActorGroup
    from r1_cli.train.episodes.agents import Player


@dataclass(frozen=True, slots=True)
class RunFolder:
    store: CheckpointStore
    start: Path | None  # the checkpoint to resume from; None: a new run

    @property
    def path(self) -> Path:
        return self.store.root


@dataclass(frozen=True, slots=True)
class Devices:
    model: ModelFiles
    critic_config: PretrainedConfig | None  # None without a critic
    hardware: Hardware
    placement: Placement
    ranks: "ActorGroup | None"
    engines: "ActorGroup | None"
    engine_process: OwnProcess | None  # samples while the learner computes, on the same machine

    @property
    def names(self) -> list[str]:
        return [device for rank in self.placement.ranks for device in rank.devices] or [
            self.hardware.kind,
            *self.hardware.gpus,
        ]


@dataclass(frozen=True, slots=True)
class Reports:
    console: ConsoleReporter
    timeline: Timeline

    def begin(self, config: RunConfig, step: int, total_steps: int) -> None:
        self.console.begin(step, total_steps, f"{config.trainer.project_name} / {config.trainer.experiment_name}")


@dataclass(frozen=True, slots=True)
class DataSplit:
    sources: Sequence[Source]
    opened: Sequence[OpenSource]
    prompts: Mixture  # a part a source

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


@dataclass(frozen=True, slots=True)
class Trained:
    learner: Policy
    critic: ValueModel | None


@dataclass(frozen=True, slots=True)
class Models(Trained):
    engine: Generator


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


@dataclass(frozen=True, slots=True)
class Sampling:
    engine: Generator
    collector: DynamicSampling
    async_sampler: AsyncSampler | None  # samples later steps while the learner computes
    validation: Validation | None
    update: Update
