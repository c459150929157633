"""One draw of dynamic sampling: how many prompts, which ones, and the groups that come of them."""

import hashlib
import sys
from dataclasses import dataclass, replace
from math import ceil, sqrt

from r1_cli.groups.filters import filter_values, passes
from r1_cli.groups.group import Group, drop_failures
from r1_cli.groups.supply import Drawn, Supply
from r1_cli.roles import Run
from r1_cli.sampling.ask import read_prompts, sample_groups
from r1_cli.track.stopwatch import Stopwatch
from r1_core.filtering import GroupFilter
from r1_rollout.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Aim:
    """What a draw is for."""

    missing: int  # groups that must still pass
    sampled: int  # groups of the step's earlier draws
    passed: int  # of these, the ones that passed
    whole: bool  # take whole batches, and sample them to the end
    fresh: bool  # whether the stream's next batch may be begun


@dataclass(frozen=True, slots=True)
class Draw:
    """What came of it."""

    groups: list[Drawn]  # as the filter sees them, in the order of their prompts
    lost: int  # groups without answers enough that could be scored
    supply: Supply
    unread: int  # prompts that could not be read
    tokens: int  # of all answers


class PassQuota:
    """Counts the groups that the filter keeps."""

    def __init__(self, run: Run, group_filter: GroupFilter, missing: int) -> None:
        self.missing = missing
        self._run, self._filter = run, group_filter

    def note(self, group: Group) -> None:
        """Count one less if the group will stay."""
        if settled := settle(self._run, group):
            self.missing -= passes(self._filter, filter_values([settled], self._run.filter_key))[0]


def draw(run: Run, supply: Supply, group_filter: GroupFilter, aim: Aim, watch: Stopwatch) -> Draw:
    """Sample the next prompts, as many as the aim needs; those that are not begun are pending after it.

    Raises:
        RewardFailure: an answer could not be scored, where that ends the run.
    """
    chosen, left = choose_rows(run, supply, aim)
    readable = list(read_prompts(run.dataset, chosen))
    run.dataset.prefetch(left.pending or run.stream.batch(left.cursor))
    params = replace(run.sampling, seed=derive_seed(run.sampling.seed, left.draws))
    quota = None if aim.whole else PassQuota(run, group_filter, aim.missing)
    prompts = [prompt for _, prompt in readable]
    sampled = sample_groups(run.scorer, prompts, params, watch, run.progress, quota=quota)
    settled = {index: settle(run, group) for index, group in compare_with_greedy(run, sampled, watch).items()}
    groups = [Drawn(readable[index][0], group) for index, group in settled.items() if group]
    waiting = tuple(row for index, (row, _) in enumerate(readable) if index not in sampled)
    left = replace(left, draws=left.draws + 1, pending=waiting + left.pending)
    tokens = sum(len(completion.token_ids) for group in sampled.values() for completion in group.completions)
    return Draw(groups, len(sampled) - len(groups), left, len(chosen) - len(readable), tokens)


def choose_rows(run: Run, supply: Supply, aim: Aim) -> tuple[list[int], Supply]:
    """Return the rows to sample next, at most a batch of the stream, and the supply without them."""
    rows, batch = list(supply.pending), run.stream.batch(supply.cursor)
    count = len(batch) if aim.whole else min(len(batch), prompts_needed(aim.missing, aim.sampled, aim.passed))
    if aim.fresh and len(rows) < count:
        rows, supply = rows + batch, replace(supply, cursor=supply.cursor + 1)
    return rows[:count], replace(supply, pending=tuple(rows[count:]))


def prompts_needed(missing: int, sampled: int, passed: int) -> int:
    """Return how many prompts to sample so that `missing` groups pass, as a rule, if as many pass as so far.

    Two standard deviations more than pass on average; with nothing sampled yet, all are expected to pass. If none has
    passed, as many as there are.

    Example: `prompts_needed(64, 512, 256) == 151`, of which 75.5 pass on average, and 64 or more in 97 of 100 draws.
    """
    if not sampled:
        return missing
    if not passed:
        return sys.maxsize
    rate = passed / sampled
    return ceil((missing + 2 * sqrt(missing * (1 - rate))) / rate)


def settle(run: Run, group: Group) -> Group | None:
    """Return the group as the filter sees it: without answers to be left out, punished. None if too few are left.

    An answer that has lost all others of its group has nothing to be compared with.
    """
    group = drop_failures(group)
    return run.shaping.punish(group) if len(group.scores) >= min(2, run.sampling.n) else None


def compare_with_greedy(run: Run, sampled: dict[int, Group], watch: Stopwatch) -> dict[int, Group]:
    """Give groups the reward of their prompt's greedy answer, where the estimator wants it; without one they go."""
    if "baselines" not in run.needs:
        return sampled
    greedily = SamplingParams(max_tokens=run.sampling.max_tokens, temperature=0.0)
    prompts = [group.prompt for group in sampled.values()]
    greedy = sample_groups(run.scorer, prompts, greedily, watch, run.progress)
    pairs = zip(sampled, [run.shaping.punish(one) for one in greedy.values()], strict=True)
    return {i: replace(sampled[i], baseline=one.rewards[0]) for i, one in pairs if one.scores[0].keep}


def derive_seed(seed: int, *keys: int | str) -> int:
    """Return a 63-bit seed for (seed, keys), the same on every machine."""
    digest = hashlib.blake2b(repr((seed, *keys)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
