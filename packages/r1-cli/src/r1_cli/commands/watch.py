"""`r1 eval --watch`: the words of the command as a configuration and options."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from r1_cli.commands.common import UserError, share_processors, user_errors, writing
from r1_cli.commands.models import own_configuration

if TYPE_CHECKING:
    from r1_cli.config import RunConfig
    from r1_cli.jobs.watch import StartModel

INTERRUPTED = 130  # exit code of a command that Ctrl-C ends


@dataclass(frozen=True, slots=True)
class WatchWords:
    """The words after `r1 eval --watch`."""

    run: Path
    settings: tuple[str, ...]  # [CONFIG.yaml] [KEY=VALUE]...
    suites: list[str]
    guards: list[str]
    prompt: str | None
    data_root: Path | None
    start: str | None
    output: Path | None
    n: int | None
    partial: bool

    @property
    def names(self) -> list[str]:
        return [*dict.fromkeys([*self.suites, *self.guards])]


def watch_run(words: WatchWords) -> None:
    """Evaluate the checkpoints of a run until it has ended. Raises UserError."""
    from r1_cli.checkpoint.folders import CheckpointError
    from r1_cli.config import ConfigError
    from r1_data.types import DataError
    from r1_rewards.types import RewardFailure, RewardSpecError

    require_run(words.run)
    share_processors()
    with user_errors(ConfigError, DataError, RewardSpecError, ValueError):
        config, start = read_words(words)
        from r1_cli.config.suites import published_figures, source_name
        from r1_cli.jobs.watch import WatchOptions, watch
        from r1_cli.models.load import ModelError
        from r1_cli.runs.evaluation.stored import EvaluationError
        from r1_cli.runs.reader import EVALUATIONS
        from r1_rollout.errors import RolloutError

        guarded = [source_name(name, words.prompt) for name in words.guards]
        answers = words.output or words.run / EVALUATIONS
        options = WatchOptions(answers, start if guarded else None, guarded, words.partial)
        for line in published_figures(words.names, words.prompt):
            click.echo(line)
    kinds = ConfigError, DataError, RewardSpecError, ModelError, EvaluationError, RewardFailure, RolloutError
    try:
        with user_errors(*kinds, CheckpointError), writing(answers):
            failed = watch(words.run, config, options)
    except KeyboardInterrupt:
        from r1_cli.jobs.next_steps import next_commands

        (line,) = next_commands([shlex.join(sys.argv[1:])])
        click.echo(f"stopped; nothing is evaluated twice. {line}", err=True)
        sys.exit(INTERRUPTED)
    if failed:
        steps = ", ".join(map(str, failed))
        raise UserError(f"the checkpoints of these steps could not be evaluated: {steps}; see above, then run it again")


def require_run(run: Path) -> None:
    """Raise UserError if the folder is not that of a run."""
    from r1_cli.checkpoint.locks import find_holder
    from r1_cli.config.files import where_or_near
    from r1_cli.runs.reader import CONFIG_FILE, run_of

    if not run.is_dir():
        raise UserError(f"{run}: no such folder{where_or_near(str(run))}")
    if not (run / CONFIG_FILE).is_file() and find_holder(run) is None:
        own = run_of(run)
        told = f"it is in the folder of the run {own}: name that" if own else f"it has no {CONFIG_FILE}"
        raise UserError(f"--watch: {run} is no run of r1 ({told})")


def read_words(words: WatchWords) -> tuple["RunConfig", "StartModel | None"]:
    """Return the configuration of an evaluation, with the newest checkpoint or the start model, and the start model.

    Raises:
        UserError: the start model is needed, and is not there.
        ConfigError: as `load_with_suites`.
    """
    from r1_cli.build.suites import load_with_suites
    from r1_cli.checkpoint.folders import CheckpointStore
    from r1_cli.config import load_config
    from r1_cli.config.files import find_model_folder

    latest = CheckpointStore(words.run).latest()
    start = find_start_model(words.run, words.start) if words.guards or latest is None else None
    model = find_model_folder(str(latest)) if latest else start.path if start else ""
    said = [*words.settings, f"worker.actor.model.model_path={model}"]
    said += [] if words.n is None else [f"worker.rollout.val_override_config.n={words.n}"]
    if words.names:
        return load_with_suites(said, words.names, words.prompt, words.data_root), start
    own = own_configuration(str(latest or words.run / "global_step_0"), words.settings)
    return load_config([*own, *said], command="eval")[0], start


def find_start_model(run: Path, named: str | None) -> "StartModel":
    """Return the model that a run began with, or the named one. Raises UserError if it is not there."""
    from r1_cli.config.files import find_model_folder, names_folder
    from r1_cli.config.section import flatten
    from r1_cli.jobs.watch import StartModel
    from r1_cli.runs.reader import RunReader

    reader, key = RunReader(run), "worker.actor.model."
    with user_errors(ValueError):
        known = dict(flatten(reader.settings())) or reader.flat_start("config")
    path = named or known.get(f"{key}model_path")
    adapter = None if named else known.get(f"{key}lora.path")
    way_out = "work in the folder in which the training was started, or name it by --start"
    if path is None:
        raise UserError(f"{run} does not say which model it began with: name it by --start")
    for one in (path, adapter):
        if one and names_folder(one) and not Path(one).is_dir():
            raise UserError(f"the model that {run} began with is not there ({one}): {way_out}")
    return StartModel(find_model_folder(path), Path(adapter) if adapter else None)
