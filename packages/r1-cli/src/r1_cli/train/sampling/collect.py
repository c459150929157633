"""Dynamic sampling: sample prompts until a step has enough groups that pass the filter (arXiv 2503.14476)."""

import hashlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, sqrt
from statistics import fmean

from r1_cli.config import ConfigError, Problem
from r1_cli.runs.track.timing import Stopwatch
from r1_cli.train.groups.advantages import Shaping
from r1_cli.train.groups.group import Group, by_sample, filter_values, passes
from r1_cli.train.groups.stream_position import StreamPosition
from r1_cli.train.sampling.curriculum import count_answers, curriculum_metrics
from r1_cli.train.sampling.generate import DrainRule, UnscoredError, render_prompts, sample_groups
from r1_cli.train.types import Collected, Dataset, Position, Progress, PromptStream, Sampler
from r1_core.filtering import GroupFilter
from r1_data.curriculum import OnlineStream
from r1_data.types import DataError
from r1_rollout.types import SamplingParams

log = logging.getLogger("r1")


@dataclass(slots=True)
class SamplingState:
    stream: StreamPosition
    kept: list[Group]  # groups that passed the filter, carried-over ones first
    groups: list[Group] = field(default_factory=list)  # sampled and scored in this step, kept or not
    latest: list[Group] = field(default_factory=list)  # of the latest round that had any
    values: list[list[float]] = field(default_factory=list)  # that the filter reads, per group of `groups`
    dropped: list[Group] = field(default_factory=list)  # of the latest round, if no response could be scored
    passed: int = 0  # of `groups`
    unscored: int = 0  # prompts with too few responses that could be scored
    unreadable: int = 0  # prompts that could not be read
    tokens: int = 0  # of all completions


@dataclass(frozen=True, slots=True)
class DynamicSampling:
    """Collects a step's groups. With a filter that keeps everything, a step is one batch of prompts.

    Which groups are trained on must not depend on the length of responses. Therefore

    - a drained engine finishes the prompts that it has started,
    - groups are used in the order of their prompts,
    - prompts that were not started come first in the next round; other prompts' responses decide which these are.
    """

    sampler: Sampler
    dataset: Dataset
    stream: PromptStream
    sampling: SamplingParams
    baselines: bool  # whether the estimator needs the rewards of greedy responses
    shaping: Shaping
    filter_key: str  # that the filter reads: `overall`, the reward, or a part of the scores
    groups: int  # per step
    max_batches: int  # batches that a step may start; -1: no limit
    surplus_max_age: int  # steps between a group's sampling and its use
    max_prompt_length: int  # tokens
    progress: Progress
    rates: Sequence[float] | None = None  # pass rates that a curriculum read, by row

    def collect(self, at: Position, watch: Stopwatch) -> Collected:
        """Sample and score until `groups` groups pass the filter; further groups are carried over to the next step.

        Unreadable prompts make a step smaller; unscored ones are replaced. After `max_batches` batches the step keeps
        what passed, with a warning, or trains on the last round if nothing did: only a KL term acts then.

        Raises:
            DataError: no prompt could be read.
            ConfigError: in the first step, no score has the part that the filter reads.
            UnscoredError: a response could not be scored and the policy is to stop, or none could be scored.
        """
        state = SamplingState(at.stream, list(at.stream.carried_over))
        self.sampler.engine_use()  # that of a validation is not counted
        while len(state.kept) < self._groups_needed(state):
            self._sample_round(state, at, watch)
            if len(state.kept) < self._groups_needed(state) and self._is_exhausted(state, at):
                message = "only %d of %d groups passed the filter after trainer.max_try_make_batch=%d batches"
                log.warning(message, len(state.kept), self._groups_needed(state), self.max_batches)
                break
        if at.step == 0:
            self._require_part(state.groups)
        return self._choose_groups(state, at)

    def rows_of(self, at: Position) -> list[int]:
        """Return the rows that the first round of a step samples, where no earlier answers choose them."""
        if isinstance(self.stream, OnlineStream):
            return list(at.stream.unfinished)
        return [*at.stream.unfinished, *self.stream.batch(at.stream.cursor)]

    def _next_batch(self, state: SamplingState) -> list[int]:
        position = state.stream
        if not isinstance(self.stream, OnlineStream):
            return self.stream.batch(position.cursor)
        of_step = {*position.unfinished, *(group.row for group in (*state.kept, *state.groups))}
        return self.stream.batch(position.cursor, position.counts, without=of_step)

    def _groups_needed(self, state: SamplingState) -> int:
        return max(1, self.groups - state.unreadable)

    def _may_begin_batch(self, state: SamplingState, at: Position) -> bool:
        return state.stream.cursor != at.stream.cursor + self.max_batches

    def _is_exhausted(self, state: SamplingState, at: Position) -> bool:
        in_vain = not state.groups and state.unscored + state.unreadable >= self.groups
        return in_vain or not (state.stream.unfinished or self._may_begin_batch(state, at))

    def _sample_round(self, state: SamplingState, at: Position, watch: Stopwatch) -> None:
        rows, position = self._choose_rows(state, at)
        with watch("render"):
            readable = list(render_prompts(self.dataset, rows))
            # An online curriculum draws the next batch when it has these answers.
            if position.unfinished or not isinstance(self.stream, OnlineStream):
                self.dataset.prefetch(position.unfinished or self.stream.batch(position.cursor))
        drain_rule = None
        if at.filter.per_group:
            drain_rule = DrainRule(
                self._groups_needed(state) - len(state.kept), lambda group: self._will_pass(group, at.filter)
            )
        params = replace(self.sampling, seed=derive_seed(self.sampling.seed, position.rounds))
        prompts = [prompt for _, prompt in readable]
        sampled = sample_groups(self.sampler, prompts, params, watch, self.progress, drain_rule=drain_rule)
        compared = self._compare_with_greedy(sampled, params.seed, watch) if self.baselines else sampled
        groups: list[Group] = []
        for index, group in compared.items():
            if judged := self._prepare_for_filter(group):
                groups.append(replace(judged, row=readable[index][0]))
        values = filter_values(groups, self.filter_key)
        kept = [group for group, keep in zip(groups, passes(at.filter, values), strict=True) if keep]
        not_begun = [row for index, (row, _) in enumerate(readable) if index not in sampled]
        unfinished, counts = (*not_begun, *position.unfinished), count_answers(self.stream, position.counts, groups)
        state.stream = replace(position, rounds=position.rounds + 1, unfinished=unfinished, counts=counts)
        state.kept += kept
        state.groups += groups
        state.latest = groups or state.latest
        state.dropped = [] if groups else list(sampled.values())
        state.values += values
        state.passed += len(kept)
        state.unscored += len(sampled) - len(groups)
        state.unreadable += len(rows) - len(readable)
        for group in sampled.values():
            state.tokens += sum([completion.sampled_length for completion in group.completions])

    def _choose_rows(self, state: SamplingState, at: Position) -> tuple[list[int], StreamPosition]:
        """Return the rows to sample next and the position after them; group filters get whole batches."""
        position = state.stream
        rows = list(position.unfinished)
        batch = self._next_batch(state)
        count = len(batch)
        if at.filter.per_group:
            missing = self._groups_needed(state) - len(state.kept)
            # If every prompt so far failed, none has passed: sample the whole batch.
            count = min(count, prompts_needed(missing, len(state.groups) or state.unscored, state.passed))
        if len(rows) < count and self._may_begin_batch(state, at):
            rows += batch
            position = replace(position, cursor=position.cursor + 1)
        return rows[:count], replace(position, unfinished=tuple(rows[count:]))

    def _prepare_for_filter(self, group: Group) -> Group | None:
        """Return the group with penalties, without dropped responses; None if nothing is left to compare."""
        group = group.without_failures()
        return self.shaping.penalize(group) if len(group.responses) >= min(2, self.sampling.n) else None

    def _will_pass(self, group: Group, group_filter: GroupFilter) -> bool:
        judged = self._prepare_for_filter(group)
        return judged is not None and passes(group_filter, filter_values([judged], self.filter_key))[0]

    def _compare_with_greedy(self, sampled: dict[int, Group], seed: int, watch: Stopwatch) -> dict[int, Group]:
        """Add the greedy response's reward as a baseline (ReMax, arXiv 2310.10505).

        Groups whose greedy response could not be scored are left out.
        """
        # The seed names the call in the record; greedy sampling has no noise.
        seed = derive_seed(seed, "greedy")
        greedily = SamplingParams(max_tokens=self.sampling.max_tokens, temperature=0.0, seed=seed)
        prompts = [group.prompt for group in sampled.values()]
        greedy = sample_groups(self.sampler, prompts, greedily, watch, self.progress)
        compared = {}
        for (index, group), alone in zip(sampled.items(), greedy.values(), strict=True):
            if alone.scores[0].keep:
                compared[index] = replace(group, baseline=self.shaping.penalize(alone).rewards[0])
        return compared

    def _require_part(self, groups: Sequence[Group]) -> None:
        parts = {name for group in groups for score in group.scores for name in score.parts}
        if parts and self.filter_key not in {*parts, "overall"}:
            message = f"the reward function reports no such part, only {', '.join(sorted(parts))}"
            raise ConfigError([Problem("algorithm.filter_key", message, self.filter_key)])

    def _choose_groups(self, state: SamplingState, at: Position) -> Collected:
        wanted = self._groups_needed(state)
        chosen = (state.kept or state.latest)[:wanted]
        if not chosen and state.unscored:
            message = f"not one response could be scored to {state.unscored} prompts in a row; all were dropped"
            raise UnscoredError(message, state.dropped)
        if not chosen:
            first, last = at.stream.cursor, state.stream.cursor - 1
            raise DataError(f"no prompt of the batches from number {first} to {last} could be read")
        unused = state.kept[wanted:]
        carried_over = tuple(group for group in unused if at.step + 1 - group.version <= self.surplus_max_age)
        groups, normalizer = self.shaping.apply(chosen, at.normalizer)
        after = replace(
            at,
            stream=replace(state.stream, carried_over=carried_over),
            filter=at.filter.observe(*by_sample(state.values)),
            normalizer=normalizer,
        )
        metrics = {
            "rollout/groups_sampled": float(len(state.groups)),
            "rollout/groups_trained": float(len(groups)),
            "rollout/groups_kept": float(len(carried_over)),
            "rollout/groups_discarded": float(len(unused) - len(carried_over)),
            "rollout/tokens_sampled": float(state.tokens),
            "filter/rate": 1 - state.passed / max(len(state.groups), 1),
            **{f"filter/{name}": value for name, value in at.filter.metrics.items()},
            "prompt_length/clip_ratio": fmean(len(one.prompt.token_ids) >= self.max_prompt_length for one in groups),
            **self.shaping.metrics(groups),
            **curriculum_metrics(self.stream, self.rates, at.stream, state.stream, state.groups),
            **self.sampler.engine_use(),
        }
        return groups, after, metrics


def prompts_needed(missing: int, sampled: int, passed: int) -> int:
    """Return how many prompts to sample so that `missing` groups pass at the pass rate so far.

    Adds two standard deviations; `missing` before any sampling, and `sys.maxsize` if none has passed. Example:
    `prompts_needed(64, 512, 256) == 151`: 75.5 pass on average, 64 or more in 97 of 100 rounds.
    """
    if not sampled:
        return missing
    if not passed:
        return sys.maxsize
    rate = passed / sampled
    return ceil((missing + 2 * sqrt(missing * (1 - rate))) / rate)


def derive_seed(seed: int, *keys: int | str) -> int:
    """Return a 63-bit seed for (seed, keys), the same on every machine."""
    digest = hashlib.blake2b(repr((seed, *keys)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
