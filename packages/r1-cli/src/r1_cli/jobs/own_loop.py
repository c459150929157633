"""`r1_cli.open`: the parts of a run, assembled for a loop of your own."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from rich.console import Console

from r1_cli.build.algorithm import build_schedule, try_algorithm
from r1_cli.build.sampler import build_sampler, build_sampling
from r1_cli.checkpoint.folders import CheckpointStore
from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.load import Source, load_source
from r1_cli.jobs.context import RunFolder, open_training
from r1_cli.jobs.data import open_data, open_stream
from r1_cli.jobs.models import check_models, load_models
from r1_cli.jobs.rollout import connect_rewards
from r1_cli.models.files import ModelFiles, save_assets
from r1_cli.plan.batches import make_plan
from r1_cli.runs.track.timing import Stopwatch
from r1_cli.train.groups.group import Group
from r1_cli.train.sampling.generate import sample_groups
from r1_cli.train.types import Policy, Progress, PromptStream, Sampler, ValueModel
from r1_data.dataset import Mixture
from r1_data.types import Prompt
from r1_rewards.types import Verifier
from r1_rollout.types import Generator, SamplingParams
from r1_rollout.weights import LocalWeights


@dataclass(slots=True)
class Parts:
    """What `r1_cli.open` hands out. The learner's learning rate follows `config` as that of `r1 train` does."""

    config: RunConfig
    learner: Policy  # see `r1_core.Learner`; it has a reference model, or a teacher, if the configuration names one
    critic: ValueModel | None
    engine: Generator  # see `r1_rollout.types.Generator`
    prompts: Mixture  # of `data.train_files`, by index
    val_prompts: Mixture  # empty without `data.val_files`
    stream: PromptStream  # gives the indices of a step's prompts: `stream.batch(0)`
    verifier: Verifier  # scores a list of `r1_rewards.RewardInput`
    sampling: SamplingParams  # of training
    _model: ModelFiles
    _sampler: Sampler
    _progress: Progress
    _version: int = field(default=0)  # of the weights that the engine had last

    def sample(self, prompts: Sequence[Prompt], **changes: Any) -> list[Group]:
        """Sample answers with the learner's current weights and score them; return one group for each prompt.

        `changes` are of `sampling`, such as `n=1` or `seed=7`. `r1_cli.train.groups.group.to_samples` makes the
        learner's samples of groups. Raises RewardFailure if an answer cannot be scored.
        """
        self._version += 1
        with self.engine.active(LocalWeights(self.learner.weights(), version=self._version)):
            params = replace(self.sampling, **changes)
            groups = sample_groups(self._sampler, prompts, params, Stopwatch(), self._progress)
        return [groups[index] for index in range(len(prompts))]

    def save(self, folder: "str | PathLike[str]") -> None:
        """Write the learner's weights with configuration and tokenizer: a Hugging Face folder, without the optimizer.

        With LoRA the weights are those of the adapter. Raises OSError if a file cannot be written.
        """
        path = Path(folder)
        save_assets(self._model, path)
        self.learner.save(path, model_only=True)


@contextmanager
def open_parts(config: Source) -> Iterator[Parts]:
    """Assemble learner, engine, data and verifier on one device, and close them at the end of the block.

    Nothing is logged, saved or resumed: `trainer.save_checkpoint_path` and the like are not read.

    Args:
        config: a configuration of `r1 train`: its file, a mapping of its sections, or a `RunConfig`.

    Raises:
        ConfigError, DataError, ModelError, RewardSpecError: as `r1 train` before its first step; also for settings that
            need `r1 train`: several devices or turns, `trainer.max_staleness`, a teacher that
            the learner does not hold.
    """
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="r1-open-")))
        settings, provenance = load_source(config)
        _require_simple(settings)
        try_algorithm(settings)
        folder = RunFolder(CheckpointStore(root), None)
        context = open_training(settings, provenance, folder, Console(quiet=True), stack)
        data = open_data(context)
        plan = make_plan(context.config, data.training.sizes, None)
        schedule = build_schedule(context.config, plan.total_steps or 0)
        stream = open_stream(context, data)
        models = load_models(context, schedule)
        context, _ = check_models(context, data, models)
        connect_rewards(context, data, models)
        yield Parts(
            context.config,
            models.learner,
            models.critic,
            models.engine,
            data.training.prompts,
            data.validation.prompts,
            stream,
            data.verifier,
            build_sampling(context.config)[0],
            context.model,
            build_sampler(context.config, context.model, data.verifier, models.engine),
            context.reporter.progress,
        )


def _require_simple(config: RunConfig) -> None:
    """Raise ConfigError for settings that the parts alone do not carry out."""
    trainer, rollout, teacher = config.trainer, config.worker.rollout, config.worker.teacher
    held = bool(teacher.loaded) and not teacher.privileged and not teacher.sources
    found = {
        "trainer.n_gpus_per_node": trainer.devices > 1,
        "trainer.max_staleness": trainer.max_staleness > 0,
        "worker.rollout.multi_turn.enable": rollout.multi_turn.enable,
        "worker.teacher": teacher.used and not held,  # it needs `Teacher.teach`
    }
    message = "needs r1 train: r1_cli.open assembles one learner on one device, without what a loop does"
    if any(found.values()):
        raise ConfigError([Problem(key, message) for key, needs_train in found.items() if needs_train])
