"""Finished groups are scored while the engine goes on, batch functions see their batch, and nothing is lost."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from cli_fakes import Engine, Equality, prompt, sampler, silent

from r1_cli.build.rewards.dispatch import DispatchingVerifier
from r1_cli.runs.track.timing import Stopwatch
from r1_cli.train.groups.group import Group
from r1_cli.train.sampling.generate import ScoringThread, sample_groups
from r1_rewards.load import load
from r1_rewards.types import RewardInput, Score
from r1_rollout.types import Completion, SamplingParams

PARAMS = SamplingParams(max_tokens=8, n=2)
PATIENCE = 60.0


def sample(of: Any, count: int = 6, watch: Stopwatch | None = None) -> dict[int, Group]:
    return sample_groups(of, [prompt(row) for row in range(count)], PARAMS, watch or Stopwatch(), silent)


def test_the_first_group_is_scored_before_the_last_is_finished() -> None:
    scored = threading.Event()

    class Slow(Engine):
        def generate(self, prompts: Sequence[Any], params: SamplingParams) -> Iterator[tuple[int, list[Completion]]]:
            for number, finished in enumerate(super().generate(prompts, params)):
                assert not number or scored.wait(PATIENCE), "the engine is at the second group, the first has no score"
                yield finished

    groups = sample(sampler(Slow(2, 0.5), Equality(lambda inputs: scored.set())))
    assert list(groups) == list(range(6))
    assert all(len(group.scores) == 2 for group in groups.values())


def test_what_finishes_while_the_verifier_is_busy_is_scored_in_one_call() -> None:
    finished, engine = threading.Event(), Engine(2, 0.5)

    class Notifying(Engine):
        def generate(self, prompts: Sequence[Any], params: SamplingParams) -> Iterator[tuple[int, list[Completion]]]:
            yield from super().generate(prompts, params)
            finished.set()

    verifier = Equality(lambda inputs: None if finished.wait(PATIENCE) else pytest.fail("generation waits for scores"))
    groups = sample(sampler(Notifying(2, 0.5), verifier))
    assert [len(call) for call in verifier.calls] in ([2, 10], [4, 8], [6, 6], [8, 4], [10, 2], [12])
    assert {i: g.scores for i, g in groups.items()} == {
        i: g.scores for i, g in sample(sampler(engine, per_sample=False)).items()
    }


def test_a_batch_function_gets_all_answers_at_once_in_the_order_of_the_prompts() -> None:
    verifier = Equality()
    groups = sample(sampler(Engine(3, 0.5), verifier, per_sample=False))
    assert [len(call) for call in verifier.calls] == [12]
    assert [item.response for item in verifier.calls[0]] == [one.text for g in groups.values() for one in g.responses]


def test_of_several_sources_each_is_scored_in_its_own_way() -> None:
    calls: dict[str, list[int]] = {"alone": [], "together": []}

    def count(inputs: Sequence[RewardInput]) -> list[Score]:
        for source, noted in calls.items():
            if share := sum(item.source == source for item in inputs):
                noted.append(share)
        return [Score(float(item.source == "alone")) for item in inputs]

    of = replace(sampler(Engine(2, 0.5), count), per_sample=lambda source: source == "alone")
    prompts = [replace(prompt(row), source="alone" if row % 2 else "together") for row in range(6)]
    groups = sample_groups(of, prompts, PARAMS, Stopwatch(), silent)
    assert [group.scores[0].value for group in groups.values()] == [0, 1] * 3
    assert calls["together"] == [6]
    assert sum(calls["alone"]) == 6


def test_what_the_verifier_raises_is_raised_where_scores_are_asked_for() -> None:
    def fail(inputs: Sequence[RewardInput]) -> None:
        raise RuntimeError("no verifier")

    with pytest.raises(RuntimeError, match="no verifier"):
        sample(sampler(Engine(2, 0.5), Equality(fail)))


def test_an_engine_that_loses_prompts_is_found_out() -> None:
    class Forgetful(Engine):
        def generate(self, prompts: Sequence[Any], params: SamplingParams) -> Iterator[tuple[int, list[Completion]]]:
            yield from list(super().generate(prompts, params))[1:]

    with pytest.raises(RuntimeError, match="returned 5 of 6 prompts"):
        sample(sampler(Forgetful(2, 0.5)))


def test_leaving_does_not_wait_for_a_call_that_is_running() -> None:
    begun, over = threading.Event(), threading.Event()

    def block(inputs: Sequence[RewardInput]) -> None:
        begun.set()
        over.wait(PATIENCE)

    with closing(ScoringThread(Equality(block), Stopwatch())) as thread:
        thread.put(0, [RewardInput("1", "1")])
        assert begun.wait(PATIENCE)
    assert not over.is_set()
    over.set()


def test_the_stages_are_the_engines_time_and_the_wait_beyond_it() -> None:
    watch = Stopwatch()
    sample(sampler(Engine(2, 0.5)), watch=watch)
    assert set(watch.lap()) == {"gen", "reward"}
    assert list(watch.each("x", [1, 2])) == [1, 2]
    assert set(watch.lap()) == {"x"}


def test_functions_say_whether_they_may_be_asked_about_single_answers(tmp_path: Any) -> None:
    (tmp_path / "batch.py").write_text(
        "def score(reward_inputs):\n    return [{'overall': 0.0} for _ in reward_inputs]\n"
    )
    (tmp_path / "single.py").write_text(
        "REWARD_TYPE = 'sequential'\ndef score(reward_input):\n    return {'overall': 0.0}\n"
    )
    with (
        load("math") as builtin,
        load(f"{tmp_path}/batch.py:score") as batch,
        load(f"{tmp_path}/single.py:score") as single,
    ):
        verifier = DispatchingVerifier(builtin, {"batch": batch, "single": single, "other": Equality()})
        found = {name: verifier.per_sample(name) for name in ("any", "batch", "single", "other")}
    assert found == {"any": True, "batch": False, "single": True, "other": False}


def test_services_say_so_too() -> None:
    pytest.importorskip("httpx", reason='needs "r1-rewards[http]"')
    with (
        load("http://127.0.0.1:9/score") as remote,
        load("judge", {"url": "http://127.0.0.1:9", "model": "m"}) as judge,
    ):
        assert (remote.per_sample, judge.per_sample) == (False, True)
