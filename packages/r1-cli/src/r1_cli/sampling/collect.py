"""Filling a batch: groups that can teach something, first those that the last step had too many of."""

import logging
from dataclasses import dataclass, replace

from r1_cli.config import ConfigError, Problem
from r1_cli.groups.filters import by_sample, filter_values, passes
from r1_cli.groups.group import Group
from r1_cli.groups.supply import Drawn, Supply
from r1_cli.roles import Position, Run
from r1_cli.sampling.draws import Aim, draw
from r1_cli.track.stopwatch import Stopwatch
from r1_core.filtering import GroupFilter
from r1_data.types import DataError
from r1_rewards.types import RewardFailure

log = logging.getLogger("r1")


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one step, and what it leaves to the next."""

    groups: list[Group]
    supply: Supply
    sampled: int  # groups sampled in this step, kept or not
    passed: int  # of these, groups that passed the filter
    tokens: int  # of all answers sampled in this step
    discarded: int  # groups that passed, were not needed, and would be too old in the next step
    next_filter: GroupFilter  # the filter of the next step


def collect(run: Run, at: Position, watch: Stopwatch) -> Batch:
    """Sample until `rollout_batch_size` groups pass the filter (DAPO's dynamic sampling, arXiv 2503.14476, eq. 11).

    Groups that passed and were not needed are the first of the next step; `surplus_max_age` bounds how many steps may
    lie between a group's sampling and its use.

    Which groups are trained on must not depend on how long their answers are. So what has begun is never given up, and
    nothing is preferred for being finished early: a draw has about as many prompts as are needed; an engine that is
    stopped begins no further prompt, and finishes what it has; groups are taken in the order of their prompts; prompts
    that were not begun come first in the next draw. Whether a prompt is begun depends on other answers than its own.

    Fewer groups than wanted after `max_try_make_batch` batches make a smaller step, with a warning. If none passed,
    the last draw is trained on as it is: its advantages are zero, and only a KL term acts. Prompts that cannot be read
    make a step smaller, too. Prompts whose answers could not be scored are replaced by others; when so many as make a
    step have failed in either way and none has not, there is no use in going on.

    Raises:
        DataError: not one prompt could be read.
        ConfigError: in a run's first step, no score has the part that the filter is to look at.
        RewardFailure: an answer could not be scored, where that ends the run; or not one could.
    """
    wanted, last = run.schedule.rollout_batch_size, at.supply.cursor + run.schedule.max_try_make_batch
    supply, kept = at.supply, list(at.supply.surplus)
    sampled: list[Drawn] = []
    judged: list[list[float]] = []  # what the filter looks at, of each group sampled
    passed = tokens = lost = unread = latest = 0
    while len(kept) < wanted:
        aim = Aim(wanted - len(kept), len(sampled) or lost, passed, not at.filter.alone, fresh=supply.cursor != last)
        drawn = draw(run, supply, at.filter, aim, watch)
        supply, wanted = drawn.supply, max(1, wanted - drawn.unread)
        values = filter_values([one.group for one in drawn.groups], run.filter_key)
        good = [one for one, keep in zip(drawn.groups, passes(at.filter, values), strict=True) if keep]
        kept, sampled, judged = kept + good, sampled + drawn.groups, judged + values
        passed, tokens, latest = passed + len(good), tokens + drawn.tokens, len(drawn.groups) or latest
        lost, unread = lost + drawn.lost, unread + drawn.unread
        in_vain = not sampled and lost + unread >= run.schedule.rollout_batch_size
        if len(kept) < wanted and (in_vain or (supply.cursor == last and not supply.pending)):
            message = "only %d of %d groups passed the filter after trainer.max_try_make_batch=%d batches"
            log.warning(message, len(kept), wanted, run.schedule.max_try_make_batch)
            break
    if at.step == 0:
        require_part(run, sampled)
    kept = kept or sampled[len(sampled) - latest :][:wanted]
    if not kept and lost:
        raise RewardFailure(f"not one answer could be scored, to {lost} prompts in turn, and all have been dropped")
    if not kept:
        raise DataError(f"no prompt of the batches from number {at.supply.cursor} to {supply.cursor - 1} could be read")
    surplus = tuple(one for one in kept[wanted:] if at.step + 1 - one.version <= run.schedule.surplus_max_age)
    return Batch(
        [one.group for one in kept[:wanted]],
        replace(supply, surplus=surplus),
        len(sampled),
        passed,
        tokens,
        len(kept[wanted:]) - len(surplus),
        at.filter.observe(*by_sample(judged)),
    )


def require_part(run: Run, groups: list[Drawn]) -> None:
    """Raise ConfigError if scores have parts, but not the one that the filter looks at."""
    parts = {name for one in groups for score in one.group.scores for name in score.parts}
    if parts and run.filter_key not in {*parts, "overall"}:
        message = f"the reward function reports no such part, only {', '.join(sorted(parts))}"
        raise ConfigError([Problem("algorithm.filter_key", message, run.filter_key)])
