"""`r1 sft`: fine-tune a model on conversations or on preferences."""

import click

from r1_cli.commands.common import ANY_WORDS, share_processors, user_errors


@click.command(short_help="Fine-tune a model on conversations or preferences.", context_settings=ANY_WORDS)
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[CONFIG.yaml] [KEY=VALUE]...")
def sft(settings: tuple[str, ...]) -> None:
    """Fine-tune a model on the answers of conversations, or on chosen and rejected ones.

    Reads the sections data, sft, worker.actor and trainer. Run the same command again to resume:

    \b
      r1 sft sft.yaml
      r1 sft sft.yaml sft.epochs=1 sft.turns=last worker.actor.optim.lr=1e-5
      r1 sft pairs.yaml sft.loss=dpo sft.beta=0.1

    Then r1 eval RUN/global_step_N scores the model, and r1 train … model_path=RUN/global_step_N goes on from it.
    """
    from r1_cli.config import ConfigError, load_config, require_available
    from r1_data.types import DataError
    from r1_data.workers import start_early
    from r1_rewards.types import RewardSpecError

    with user_errors(ConfigError, DataError, RewardSpecError):
        config, provenance = load_config(settings, command="sft")
        require_available(config, provenance)

        share_processors()
        if config.reads_media:
            start_early()  # its imports take as long as ours, on another processor
        from r1_cli.checkpoint.folders import CheckpointError
        from r1_cli.cluster.worker_group import ClusterError
        from r1_cli.jobs.sft import fine_tune
        from r1_cli.models.load import ModelError
        from r1_rewards.types import RewardFailure
        from r1_rollout.errors import RolloutError

        with user_errors(ModelError, RewardFailure, RolloutError, CheckpointError, ClusterError):
            code = fine_tune(config, provenance)
    if code:
        raise SystemExit(code)
