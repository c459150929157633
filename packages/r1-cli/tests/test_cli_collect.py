"""Dynamic sampling draws what it needs, prefers no length, wastes nothing, and repeats itself after a resume."""

import json
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from cli_fakes import LONG, SHORT, DrainableEngine, Engine, Equality, Prompts, collector, prompt, start
from cli_groups import change
from safetensors.torch import load_file, save_file

from r1_cli.runs.track.timing import Stopwatch
from r1_cli.train.groups.group import Group
from r1_cli.train.groups.stream_position import StreamPosition, load_groups, save_groups
from r1_cli.train.sampling.collect import DynamicSampling, prompts_needed
from r1_cli.train.sampling.generate import with_distinct_ids
from r1_cli.train.types import Position
from r1_core.filtering import EMAStd, KeepAll, MeanRange
from r1_data.types import DataError, Prompt
from r1_rewards.types import Failure, RewardFailure, RewardInput, Score
from r1_rollout.types import SamplingParams

COUNTS = {"sampled": "groups_sampled", "tokens": "tokens_sampled", "discarded": "groups_discarded"}
ENGINES = pytest.mark.parametrize("kind", [Engine, DrainableEngine])


@dataclass(frozen=True)
class Batch:
    """What a step collected."""

    groups: list[Group]
    stream: StreamPosition
    sampled: int
    tokens: int
    discarded: int
    passed: int


def step(of: DynamicSampling, at: Position) -> tuple[Batch, Position]:
    """Collect as a step of training does, with new weights after it."""
    engine: Any = of.sampler.generator
    engine.version = at.step
    groups, after, metrics = of.collect(at, Stopwatch())
    counts = {name: int(metrics[f"rollout/{key}"]) for name, key in COUNTS.items()}
    passed = round(counts["sampled"] * (1 - metrics["filter/rate"]))
    return Batch(groups, after.stream, passed=passed, **counts), replace(after, step=at.step + 1)


def steps(of: DynamicSampling, at: Position, count: int) -> tuple[list[Batch], Position]:
    batches = []
    for _ in range(count):
        batch, at = step(of, at)
        batches.append(batch)
    return batches, at


def described(batches: Sequence[Batch]) -> list[Any]:
    """What a step trains on, and what it counts."""
    return [
        [
            [(g.prompt.id, g.responses, g.dropped) for g in batch.groups],
            replace(batch.stream, carried_over=()), batch.sampled, batch.passed, batch.tokens, batch.discarded,
        ]
        for batch in batches
    ]  # fmt: skip


@pytest.mark.parametrize(("rate", "missing"), [(0.5, 64), (0.9, 10), (0.2, 100)])
def test_a_draw_is_as_large_as_is_needed_in_most_cases(rate: float, missing: int) -> None:
    count = prompts_needed(missing, 1000, int(1000 * rate))
    noise = random.Random(0)
    passed = [sum(noise.random() < rate for _ in range(count)) for _ in range(500)]
    assert fmean(number >= missing for number in passed) > 0.93
    assert fmean(passed) < missing + 2.5 * missing**0.5


def test_before_anything_is_known_all_are_expected_to_pass_and_after_nothing_passed_a_whole_batch_is_drawn() -> None:
    assert prompts_needed(7, 0, 0) == prompts_needed(7, 9, 9) == 7
    assert prompts_needed(7, 9, 0) > 10**9
    assert prompts_needed(64, 512, 256) == 151


@ENGINES
def test_which_groups_are_trained_on_does_not_depend_on_how_long_they_are(kind: type[Engine]) -> None:
    engine = kind(room=6, rate=0.6, swing=0.3)
    batches, _ = steps(collector(engine, wanted=64), start(), 60)
    assert not isinstance(engine, DrainableEngine) or engine.kept_out > 60
    lengths = [len(group.completions[0].token_ids) for batch in batches for group in batch.groups]
    assert len(lengths) == 60 * 64
    share = fmean(length == LONG for length in lengths)
    # Half of the groups are long; 0.03 is nearly four standard deviations of 3,840 draws.
    assert abs(share - 0.5) < 0.03
    # What finished first would have been another choice: the first 32 of 44 that began at once.
    first = Engine(room=44, rate=1.0)
    of = collector(first, wanted=44)
    finished = []
    for number in range(50):
        list(first.generate([prompt(row) for row in of.stream.batch(number)], of.sampling))
        finished += first.finished[-44:][:32]
    assert fmean(length == LONG for length in finished) < 0.4
    assert {*lengths} == {SHORT, LONG}


@ENGINES
def test_no_prompt_of_the_epoch_is_lost_or_sampled_twice(kind: type[Engine]) -> None:
    engine = kind(room=4, rate=0.7)
    batches, at = steps(collector(engine, wanted=24, batch=24), start(), 20)
    begun = [int(name.partition(":")[2]) for name in engine.begun]
    assert len(begun) == len({*begun}) == sum(batch.sampled for batch in batches)
    waiting = at.stream.unfinished
    assert sorted([*begun, *waiting]) == list(range(24 * at.stream.cursor))
    assert list(waiting) == sorted(waiting)
    assert all(row > max(begun) for row in waiting)


def test_an_engine_that_can_be_stopped_begins_no_more_than_it_must() -> None:
    """Half of the first 32 prompts pass, and all of the others: a draw that is sized by the first is too large."""
    begun = {}
    for kind in (Engine, DrainableEngine):
        engine = kind(room=2, rate=0.75, swing=0.25)
        batch, at = step(collector(engine, wanted=32, batch=32), start())
        begun[kind] = batch.sampled
        assert len(batch.groups) == 32
        assert len(engine.begun) + len(at.stream.unfinished) == 32 * at.stream.cursor
        kept_out = engine.kept_out if isinstance(engine, DrainableEngine) else 0
    assert begun[DrainableEngine] == begun[Engine] - kept_out < begun[Engine]


def test_what_is_not_needed_is_trained_on_next_and_says_so() -> None:
    engine = Engine(room=8, rate=0.5)
    of = collector(engine, wanted=32)
    first, at = step(of, start())
    kept = [one.prompt.id for one in at.stream.carried_over]
    assert kept
    assert first.passed == 32 + len(kept)
    second, _ = step(of, at)
    assert [group.prompt.id for group in second.groups[: len(kept)]] == kept
    versions = [group.completions[0].weight_version for group in second.groups]
    assert versions == [0] * len(kept) + [1] * (32 - len(kept))


def test_keeping_the_surplus_samples_fewer_tokens_for_as_many_groups() -> None:
    tokens = {}
    for max_age in (0, 1):
        engine = Engine(room=8, rate=0.4)
        batches, _ = steps(collector(engine, wanted=32, max_age=max_age), start(), 40)
        assert all(len(batch.groups) == 32 for batch in batches)
        assert sum(batch.tokens for batch in batches) == engine.tokens
        assert sum(batch.discarded for batch in batches) == (0 if max_age else sum(b.passed - 32 for b in batches))
        tokens[max_age] = engine.tokens
    assert tokens[1] < 0.95 * tokens[0]


def test_no_group_is_older_than_it_may_be() -> None:
    for max_age in (0, 1, 3):
        batches, _ = steps(collector(Engine(room=8, rate=0.5), wanted=16, max_age=max_age), start(), 30)
        ages = {number - group.completions[0].weight_version for number, b in enumerate(batches) for group in b.groups}
        assert max(ages) == min(max_age, 1)  # the surplus is used first, and is never enough for two steps


@ENGINES
@pytest.mark.parametrize("per_sample", [True, False])
def test_a_run_that_is_cut_anywhere_goes_on_as_if_it_were_not(
    kind: type[Engine], per_sample: bool, tmp_path: Path
) -> None:
    def fresh() -> DynamicSampling:
        return collector(kind(room=3, rate=0.5, swing=0.4), wanted=48, per_sample=per_sample)

    whole, _ = steps(fresh(), start(), 8)
    for cut in range(1, 8):
        _, at = steps(fresh(), start(), cut)
        folder = tmp_path / str(cut)
        folder.mkdir()
        save_groups(at.stream.carried_over, folder)
        resumed = start().resume(json.loads(json.dumps(at.state())))
        carried_over = load_groups(folder, Prompts().__getitem__)
        resumed = replace(resumed, stream=replace(resumed.stream, carried_over=carried_over))
        rest, _ = steps(fresh(), resumed, 8 - cut)
        assert described(rest) == described(whole[cut:])
    assert any((tmp_path / str(cut) / "surplus.json").is_file() for cut in range(1, 8))


def test_how_fast_the_verifier_is_changes_nothing() -> None:
    found = []
    for seconds in (0.0, 0.002):
        noise = random.Random(0)

        def dawdle(inputs: Sequence[RewardInput], seconds: float = seconds, noise: random.Random = noise) -> None:
            time.sleep(seconds * noise.random())

        engine = DrainableEngine(room=3, rate=0.5, swing=0.4)
        found.append(described(steps(collector(engine, wanted=48, verifier=Equality(dawdle)), start(), 4)[0]))
        assert engine.kept_out
    assert found[0] == found[1]


def test_a_group_that_was_kept_comes_back_whole_from_a_checkpoint(tmp_path: Path) -> None:
    _, at = step(collector(Engine(room=8, rate=0.5), wanted=32), start())
    failed = Score(0.5, {}, Failure("timeout", "30 s"), keep=False)
    carried_over = tuple(
        replace(change(group, 0, text="\ud800ü"), baseline=0.1, dropped=(failed,)) for group in at.stream.carried_over
    )
    save_groups(carried_over, tmp_path)
    back = load_groups(tmp_path, Prompts().__getitem__)
    for before, after in zip(carried_over, back, strict=True):
        assert (after.row, after.version) == (before.row, before.version)
        for name in ("responses", "baseline", "dropped"):
            assert getattr(after, name) == getattr(before, name)
        assert after.prompt.id == before.prompt.id
    assert load_groups(tmp_path / "nowhere", prompt) == ()


def test_a_surplus_keeps_the_form_that_older_versions_wrote(tmp_path: Path) -> None:
    """Their keys without those that came later, and tokens as int64."""
    _, at = step(collector(Engine(room=8, rate=0.5), wanted=32), start())
    save_groups(at.stream.carried_over, tmp_path)
    (entry, *_) = entries = json.loads((tmp_path / "surplus.json").read_text())
    for kept in entries:
        del kept["truth_problem"]
        for score in kept["scores"]:
            del score["extracted"], score["reason"]
    (tmp_path / "surplus.json").write_text(json.dumps(entries))
    keys = {"row", "prompt", "completions", "responses", "scores", "rewards", "baseline", "dropped"}
    assert (entry.keys(), entry["completions"][0].keys()) == (keys, {"tokens", "finish_reason", "weight_version"})
    tensors = load_file(tmp_path / "surplus.safetensors")
    save_file({**tensors, "token_ids": tensors["token_ids"].to(torch.int64)}, tmp_path / "surplus.safetensors")
    back = load_groups(tmp_path, Prompts().__getitem__)
    assert [group.responses for group in back] == [group.responses for group in at.stream.carried_over]


def test_answers_to_a_prompt_that_has_changed_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, at = step(collector(Engine(room=8, rate=0.5), wanted=32), start())
    first = at.stream.carried_over[0].row
    save_groups(at.stream.carried_over, tmp_path)

    def changed(row: int) -> Prompt:
        return replace(prompt(row), token_ids=[1, row, 9]) if row == first else prompt(row)

    def gone(row: int) -> Prompt:
        raise DataError("no such row")

    with caplog.at_level(logging.WARNING, logger="r1"):
        left = load_groups(tmp_path, changed)
    assert [one.row for one in left] == [one.row for one in at.stream.carried_over[1:]]
    assert f"row {first} is another than before the resume" in caplog.text
    assert load_groups(tmp_path, gone) == ()


def test_too_few_groups_after_all_tries_make_a_smaller_step(caplog: pytest.LogCaptureFixture) -> None:
    of = collector(Engine(room=8, rate=0.3), wanted=16, tries=2)
    with caplog.at_level(logging.WARNING, logger="r1"):
        batch, at = step(of, start())
    assert 0 < len(batch.groups) < 16
    assert batch.sampled == 32
    assert (at.stream.cursor, at.stream.unfinished) == (2, ())
    assert f"only {len(batch.groups)} of 16 groups passed the filter after trainer.max_try_make_batch=2" in caplog.text


def test_where_none_passes_the_last_draw_is_trained_on() -> None:
    batch, _ = step(collector(Engine(room=8, rate=0.0), wanted=16, tries=3), start())
    assert (len(batch.groups), batch.sampled, batch.passed) == (16, 48, 0)
    assert [group.prompt.id for group in batch.groups] == [f"file:{row}" for row in range(32, 48)]


def test_without_a_filter_each_step_is_a_batch_of_the_stream() -> None:
    batches, at = steps(collector(DrainableEngine(room=2, rate=0.5), wanted=12, batch=4), start(KeepAll()), 5)
    trained = [group.prompt.id for batch in batches for group in batch.groups]
    assert trained == [f"file:{row}" for row in range(60)]
    assert (
        at.stream.cursor,
        at.stream.rounds,
        at.stream.unfinished,
        at.stream.carried_over,
    ) == (15, 15, (), ())


def test_a_filter_that_compares_groups_sees_whole_batches() -> None:
    averaged = EMAStd(ema_start_step=1, filter_start_step=2, beta=0.5, ratio=0.9)
    batches, at = steps(collector(DrainableEngine(room=2, rate=0.4), wanted=16), start(averaged), 4)
    assert all(batch.sampled % 16 == 0 for batch in batches)
    assert at.stream.unfinished == ()


def test_a_row_at_the_end_of_an_epoch_is_not_sampled_twice_with_the_same_noise() -> None:
    """As many rows as a batch, so that rows that are pending come again in the next one."""
    engine = Engine(room=4, rate=0.6)
    of = collector(engine, wanted=16, rows=16)
    seen: set[tuple[str, int]] = set()
    generate = engine.generate

    def watching(prompts: Sequence[Any], params: SamplingParams) -> Any:
        asked = {(one.id, params.seed) for one in prompts}
        assert len(asked) == len(prompts)
        assert not asked & seen
        seen.update(asked)
        return generate(prompts, params)

    engine.generate = watching  # type: ignore[method-assign]
    steps(of, start(), 12)
    assert len({name for name, _ in seen}) == 16


def test_a_row_that_a_batch_has_twice_gets_other_answers_each_time() -> None:
    class Small(Prompts):
        def __getitem__(self, row: int) -> Prompt:
            return prompt(row % 3)

    batch, _ = step(collector(Engine(room=8, rate=1.0), wanted=24, dataset=Small()), start(KeepAll()))
    assert [group.prompt.id for group in batch.groups] == [f"file:{row % 3}" for row in range(24)]
    asked = with_distinct_ids([prompt(row % 3) for row in range(12)])
    assert len({one.id for one in asked}) == 12
    assert [one.id for one in asked[:4]] == ["file:0", "file:1", "file:2", "copy 2 of file:0"]
    lengths = {len(group.completions[0].token_ids) for group in batch.groups if group.prompt.id == "file:0"}
    assert lengths == {SHORT, LONG}, "all copies of a row got the same noise"


def test_where_none_passes_a_last_draw_that_cannot_be_read_gives_way_to_the_one_before() -> None:
    class Torn(Prompts):
        def __getitem__(self, row: int) -> Prompt:
            if row >= 16 or row == 3:
                raise DataError(f"row {row} is torn")
            return prompt(row)

    batch, at = step(collector(Engine(room=8, rate=0.0), wanted=16, tries=2, dataset=Torn()), start())
    assert 0 < len(batch.groups) <= 15
    assert (batch.passed, at.stream.carried_over, batch.discarded) == (0, (), 0), "what did not pass is no surplus"


@pytest.mark.parametrize("tries", [-1, 2])
def test_data_that_is_gone_ends_the_step(tries: int) -> None:
    class Gone(Prompts):
        def __getitem__(self, row: int) -> Prompt:
            raise DataError("gone")

    with pytest.raises(DataError, match="no prompt of the batches from number 0"):
        step(collector(Engine(room=8, rate=1.0), wanted=8, tries=tries, dataset=Gone()), start())


def test_prompts_that_cannot_be_read_make_a_step_smaller(caplog: pytest.LogCaptureFixture) -> None:
    class Torn(Prompts):
        def __getitem__(self, row: int) -> Prompt:
            if row % 8 == 3:
                raise DataError(f"row {row} is torn")
            return prompt(row)

    batch, at = step(collector(Engine(room=8, rate=1.0), wanted=16, dataset=Torn()), start())
    assert len(batch.groups) == 14
    assert at.stream.cursor == 1

    class Gone(Prompts):
        def __getitem__(self, row: int) -> Prompt:
            raise DataError("gone")

    none = collector(Engine(room=8, rate=1.0), wanted=1, tries=1, dataset=Gone())
    with pytest.raises(DataError, match="no prompt of the batches from number 0 to 0"):
        step(none, start(MeanRange()))


def test_answers_that_could_not_be_scored_are_replaced_by_other_prompts() -> None:
    class Dropping(Equality):
        def __call__(self, inputs: Sequence[RewardInput]) -> list[Score]:
            failed = Score(0.0, {}, Failure("timeout", "30 s"), keep=False)
            scores = super().__call__(inputs)
            return [failed if item.metadata.get("bad") else score for item, score in zip(inputs, scores, strict=True)]

    class Marked(Prompts):
        def __getitem__(self, row: int) -> Prompt:
            return replace(prompt(row), metadata={"bad": row in (2, 5)})

    of = collector(Engine(room=8, rate=1.0), wanted=8, verifier=Dropping(), dataset=Marked())
    batch, at = step(of, start(KeepAll()))
    assert [group.prompt.id for group in batch.groups] == [f"file:{row}" for row in (0, 1, 3, 4, 6, 7, 8, 9)]
    assert at.stream.unfinished == tuple(range(10, 16))

    # Nor does the run end because the draw of the one group that is missing has lost all its answers.
    class Unlucky(Prompts):
        def __getitem__(self, row: int) -> Prompt:
            return replace(prompt(row), metadata={"bad": row in (7, 8, 9)})

    batch, _ = step(
        collector(Engine(room=8, rate=1.0), wanted=8, verifier=Dropping(), dataset=Unlucky()), start(KeepAll())
    )
    assert [group.prompt.id for group in batch.groups] == [f"file:{row}" for row in (*range(7), 10)]

    class Dead(Prompts):
        def __getitem__(self, row: int) -> Prompt:
            return replace(prompt(row), metadata={"bad": True})

    with pytest.raises(RewardFailure, match="not one response could be scored to 8 prompts"):
        step(collector(Engine(room=8, rate=1.0), wanted=8, verifier=Dropping(), dataset=Dead()), start(KeepAll()))

    class Failing(Equality):
        def __call__(self, inputs: Sequence[RewardInput]) -> list[Score]:
            raise RewardFailure("stop")

    with pytest.raises(RewardFailure, match="stop"):
        step(collector(Engine(room=8, rate=1.0), wanted=8, verifier=Failing()), start())
