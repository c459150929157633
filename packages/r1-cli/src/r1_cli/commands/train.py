"""`r1 train`: train, or show with --dry-run what would be trained."""

from typing import TYPE_CHECKING

import click

from r1_cli.commands.common import ANY_WORDS, share_processors, user_errors

if TYPE_CHECKING:
    from r1_cli.config import Provenance, RunConfig


@click.command(short_help="Train a model, or show with --dry-run what would be trained.", context_settings=ANY_WORDS)
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[CONFIG.yaml] [KEY=VALUE]...")
@click.option("--dry-run", is_flag=True, help="Show on one screen what the run would do, and stop.")
@click.option("--full", is_flag=True, help="With --dry-run: show every setting and every table.")
def train(settings: tuple[str, ...], dry_run: bool, full: bool) -> None:
    """Train a model.

    Name a configuration file as CONFIG.yaml or config=CONFIG.yaml. Set any of its keys on the command line:

    \b
      r1 train examples/quickstart/config.yaml
      r1 train config=examples/config.yaml worker.actor.optim.lr=1e-6 trainer.max_steps=100
      r1 train examples/config.yaml 'worker.rollout.val_override_config={"n":16}' --dry-run

    Values are YAML. A leading + adds a key to an open mapping: +worker.reward.reward_function_kwargs.x=1.
    examples/config.yaml lists the keys with their meaning and defaults. Run the same command again to resume.
    """
    from r1_cli.config import ConfigError, load_config, require_available
    from r1_data.types import DataError
    from r1_data.workers import start_early
    from r1_rewards.types import RewardSpecError

    if full and not dry_run:
        raise click.UsageError("--full takes --dry-run")
    with user_errors(ConfigError, DataError, RewardSpecError):
        config, provenance = load_config(settings)
        if dry_run:
            _show(config, provenance, full=full)
        require_available(config, provenance)
        if dry_run:
            return

        share_processors()
        if config.reads_media:
            start_early()  # its imports take as long as ours, on another processor
        from r1_cli.checkpoint.folders import CheckpointError
        from r1_cli.cluster.worker_group import ClusterError
        from r1_cli.jobs.train import train as run_training
        from r1_cli.models.load import ModelError
        from r1_cli.train.groups.advantages import AdvantageError
        from r1_cli.train.loop import BrokenStepError
        from r1_core.own import OwnCodeError
        from r1_rewards.types import RewardFailure
        from r1_rollout.errors import RolloutError

        own = AdvantageError, OwnCodeError, BrokenStepError, ClusterError
        with user_errors(ModelError, RewardSpecError, RewardFailure, RolloutError, CheckpointError, *own):
            code = run_training(config, provenance)
    if code:
        raise SystemExit(code)


def _show(config: "RunConfig", provenance: "Provenance", *, full: bool) -> None:
    from rich.console import Console

    from r1_cli.build.rewards.ground_truths import GroundTruthReader, find_unusable_ground_truths
    from r1_cli.build.rows import open_local
    from r1_cli.checkpoint.folders import CheckpointStore
    from r1_cli.checkpoint.locks import require_free
    from r1_cli.config.sources import training_sources, validation_sources
    from r1_cli.plan import dry_run
    from r1_cli.plan.announce import render_sources
    from r1_cli.plan.batches import count, make_plan
    from r1_cli.plan.check.try_reward import try_own_rewards
    from r1_cli.plan.disk import require_disk_space
    from r1_cli.plan.start import find_start

    store = CheckpointStore(
        config.trainer.checkpoint_folder, limit=max(config.trainer.save_limit, 0) or None, verifies=False
    )
    require_free(store.root)
    start = find_start(config, store)
    plan = make_plan(config, *count(config))
    sources, val_sources = training_sources(config.data), validation_sources(config.data)
    opened = open_local(sources) + open_local(val_sources)
    require_disk_space(config)
    dry_run.require_template(config)
    warnings = try_own_rewards(config, opened)
    if ":" in config.algorithm.adv_estimator or ":" in config.worker.actor.loss_type:
        from r1_cli.build.algorithm import try_algorithm  # loads torch, as the user's own does

        try_algorithm(config)
    console, tables = Console(), render_sources([*sources, *val_sources], opened)
    if full:
        dry_run.show_all(console, config, provenance, plan, tables)
    else:
        warnings += dry_run.show_screen(console, config, provenance, plan, tables)
    warnings += [f"{path} is damaged ({told}); the run would set it aside" for path, told in store.damaged().items()]
    warnings += [
        *find_unusable_ground_truths(GroundTruthReader(config, [*sources, *val_sources]), opened),
        *dry_run.find_warnings(config),
    ]
    begins = f"resumes from {start}" if start else f"starts anew in {config.trainer.checkpoint_folder}"
    for line in (*(f"note: {warning}" for warning in warnings), dry_run.UNCHECKED, begins):
        console.print(line, **dry_run.PLAIN)
