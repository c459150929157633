"""`r1 replay`: repeat a recorded step and compare it bit by bit."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from r1_cli.commands.common import ANY_WORDS, Existing, share_processors, user_errors, visible

if TYPE_CHECKING:
    from r1_cli.config import Provenance, RunConfig


TOOLS_HELP = "What answers in an episode: the record, or tools, environments and agents again."


@click.command(short_help="Repeat a recorded step bit by bit and show its stages.", context_settings=ANY_WORDS)
@click.argument("run", type=Existing(folder=True))
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[KEY=VALUE]...")
@click.option("--step", required=True, type=click.IntRange(min=1), help="The step to repeat.")
@click.option("--debug", is_flag=True, help="Show every stage of one group, from its prompt to the gradient's norm.")
@click.option("--group", default=0, show_default=True, type=click.IntRange(min=0), help="The group that --debug shows.")
@click.option("--tools", type=click.Choice(["record", "again"]), default="record", show_default=True, help=TOOLS_HELP)
@click.option("--output", type=click.Path(path_type=Path), help="Keep the step's log and record in this new folder.")
def replay(
    run: Path, settings: tuple[str, ...], step: int, debug: bool, group: int, tools: str, output: Path | None
) -> None:
    """Repeat a step of RUN, a run's folder, from the checkpoint before it, and compare it with the record.

    RUN is only read. The steps between the checkpoint and STEP are repeated, too. Settings that you name change what is
    repeated. Run it where the run was started, as paths are relative to that folder. Exit code 1 if something differs.

    In episodes the record answers the policy, and stands for agents. With `--tools again` tools and environments are
    called and agents run, and r1 names those that answer equal turns differently.

    \b
      r1 replay checkpoints/easy_r1/demo --step 12
      r1 replay checkpoints/easy_r1/demo --step 12 --debug --group 3
      r1 replay checkpoints/easy_r1/demo --step 12 worker.actor.loss_type=gspo --output what-if
    """
    from r1_cli.config import ConfigError, load_config, require_available
    from r1_cli.jobs.replay import NoReplayError, plan_replay
    from r1_data.types import DataError
    from r1_rewards.types import RewardSpecError

    with ExitStack() as stack, user_errors(ConfigError, DataError, RewardSpecError, NoReplayError):
        if output is not None and output.exists() and any(output.iterdir()):
            raise NoReplayError(f"{output} is not empty; name a new folder")
        folder = output or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="r1-replay-")))
        folder.mkdir(parents=True, exist_ok=True)
        plan = plan_replay(run, step, folder)
        file = folder / "replay.yaml"
        file.write_text(json.dumps(plan.config, indent=1), encoding="utf-8")  # JSON is YAML
        config, provenance = load_config([f"config={file}", *settings])
        require_available(config, provenance)
        click.echo(
            f"steps {plan.start + 1} to {step}, from {f'checkpoint {plan.start}' if plan.start else 'the start'}"
        )
        share_processors()
        with _threads(plan.threads):
            _repeat_step(config, provenance, step, run if tools == "record" else None)
        tolerance = _print_answers(config, run, folder, tools)
        same = _print_comparison(run, folder, step, group if debug else None, tolerance)
    if not same:
        raise SystemExit(1)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Use as many threads as the run did: they decide the order of sums, and so the last bits."""
    import torch

    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _repeat_step(config: "RunConfig", provenance: "Provenance", step: int, answers: Path | None) -> None:
    from r1_cli.checkpoint.folders import CheckpointError
    from r1_cli.jobs.train import train
    from r1_cli.models.load import ModelError
    from r1_cli.train.groups.advantages import AdvantageError
    from r1_cli.train.loop import BrokenStepError
    from r1_core.own import OwnCodeError
    from r1_rewards.types import RewardFailure
    from r1_rollout.errors import RolloutError

    own = AdvantageError, OwnCodeError, BrokenStepError
    with user_errors(ModelError, RewardFailure, RolloutError, CheckpointError, *own):
        if code := train(config, provenance, until=step, answers=answers):
            raise SystemExit(code)


def _print_answers(config: "RunConfig", run: Path, folder: Path, tools: str) -> float:
    """Print what answered the policy in episodes; return the tolerance of the comparison."""
    settings = config.worker.rollout.multi_turn
    if not settings.enable:
        return 0.0
    from r1_cli.jobs.replay import ROUNDING
    from r1_cli.train.episodes.answers import AnswerRecord, compare_answers

    if tools == "record":
        not_run = "the agents did not run" if settings.agent else "tools and environments were not called"
        what = "requests and rewards" if settings.agent else "answers"
        click.echo(f"{not_run}: their {what} are those of the record")
    else:
        equal = f"all {'messages of agents' if settings.agent else 'answers of tools and environments'} to equal turns"
        for line in compare_answers(run, folder) or (f"{equal} are those of the record",):
            click.echo(visible(line))
    if settings.scheduling == "rounds" or (tools == "record" and AnswerRecord(run).has_steps()):
        return 0.0
    click.echo(
        f"with scheduling=arrival, turns decode beside others than then: numbers are compared up to {ROUNDING:g}"
        + ("" if tools == "again" else ", as this engine does not tell at which step a turn began")
    )
    return ROUNDING


def _print_comparison(run: Path, folder: Path, step: int, group: int | None, tolerance: float) -> bool:
    from r1_cli.jobs.replay import compare_step, show_group

    for line in show_group(folder, step, group) if group is not None else ():
        click.echo(visible(line))
    compared = compare_step(run, folder, step, tolerance)
    for line in compared.changes:
        click.echo(f"since then: {visible(line)}")
    for line in compared.differences:
        click.echo(f"not the same: {visible(line)}")
    if compared.answers is None and compared.metrics is None:
        click.echo(f"step {step} was taken; {run} has neither a log nor a record of it to compare with")
    elif compared.same:
        exact = f"up to {tolerance:g}" if tolerance else "to the bit"
        click.echo(f"step {step} is the same {exact}: {compared.answers or 'no'} answers, {compared.metrics} metrics")
    return compared.same
