"""Several engines behind one: what they draw is what one draws, and all get the learner's weights or none samples."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest
import ranks
import torch
from cli_engines import END, OneHost, as_set, build_engine, hosts, weights_reach_engines
from cli_ranks import LOADS, STORE, OneRank, Stored
from cli_ranks import build as build_learner
from core_models import qwen2
from patience import eventually

from r1_cli.cluster.engine import IncomingWeights
from r1_cli.cluster.rank import Rank
from r1_cli.cluster.rank_client import RankClient, RankedPolicy
from r1_cli.cluster.weights import RankedWeights
from r1_cli.train.sampling.weight_check import LearnerReference, add_weight_check
from r1_cli.train.types import Sampler, weights_of
from r1_core.learner.parallel import Parallel
from r1_rollout.errors import EngineError, PromptError, WeightsError
from r1_rollout.fault import find_fault
from r1_rollout.lora import Adapter
from r1_rollout.pool.tasks import MemberLost, Task
from r1_rollout.probes import ProbePrompt, text_probes
from r1_rollout.types import Checksummed, Drainable, Replaying, SamplingParams
from r1_rollout.weight_checks import TOLERANCE, Canary, expected_checksums, learn_tolerance
from r1_rollout.weights import LocalWeights


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    STORE.clear()
    LOADS.clear()


def prompt(number: int, length: int) -> ProbePrompt:
    return ProbePrompt(f"p{number}", [(5 * number + i) % 50 for i in range(length)], torch.arange(length)[None])


PROMPTS = [prompt(number, 2 + 3 * (number % 5)) for number in range(14)]
PARAMS = SamplingParams(max_tokens=9, n=3, seed=2)


def weights(version: int, seed: int = 1) -> LocalWeights:
    return LocalWeights(qwen2(seed).state_dict, version)


def one_engine(params: SamplingParams = PARAMS) -> list[list[tuple[list[int], str, int]]]:
    """What one engine draws."""
    with ExitStack() as stack:
        engine = build_engine(stack)
        with engine.active(weights(4)):
            return plain(dict(engine.generate(PROMPTS, params)))


def plain(groups: dict[int, Any]) -> list[list[tuple[list[int], str, int]]]:
    return [
        [(one.token_ids.tolist(), one.finish_reason, one.weight_version) for one in groups[index]]
        for index in range(len(PROMPTS))
    ]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_engines_together_draw_what_one_draws_sample_by_sample(count: int) -> None:
    members = hosts(count)
    engines = as_set(members)
    assert isinstance(engines, Replaying)
    assert isinstance(engines, Checksummed)
    assert not isinstance(engines, Drainable)
    with engines.active(weights(4)):
        assert plain(dict(engines.generate(PROMPTS, PARAMS))) == one_engine()
        assert plain(dict(engines.generate(PROMPTS, PARAMS))) == one_engine()
    assert all("work" in member.asked for member in members), "one engine had nothing to do"


@pytest.mark.parametrize("count", [1, 2])
def test_a_session_over_engines_gives_what_generate_gives(count: int) -> None:
    members = hosts(count)
    engines = as_set(members)
    with engines.active(weights(4)):
        session = engines.open_session(PARAMS)
        assert session.poll() == []
        found: dict[str, Any] = {}
        for one in PROMPTS:
            session.submit(one.id, one, n=2, max_tokens=9)
            session.submit(f"{one.id} apart", one, n=2, max_tokens=9, split=True)
            session.submit(f"{one.id} in vain", one, max_tokens=9)
            found.update(session.poll(0))
            if f"{one.id} in vain" not in found:
                session.cancel(f"{one.id} in vain")
        while finished := session.poll(60):
            found.update(finished)
        groups = {index: found[f"p{index}"] for index in range(len(PROMPTS))}
        assert (session.prefilled or 0) >= sum(2 * len(one.token_ids) for one in PROMPTS)
        assert plain(groups) == one_engine(replace(PARAMS, n=2))
        apart = {index: found[f"p{index} apart/0"] + found[f"p{index} apart/1"] for index in groups}
        assert plain(apart) == plain(groups)
        assert plain(dict(engines.generate(PROMPTS, PARAMS))) == one_engine()
        with pytest.raises(RuntimeError, match="a later generate"):
            session.submit("late", PROMPTS[0], max_tokens=2)
    assert all("work" in member.asked for member in members), "one engine had nothing to do"


def test_an_engine_that_is_closed_in_a_load_or_while_it_samples_leaves_no_thread_behind() -> None:
    loading, sampling = hosts(2)
    loading.call("begin_load", 3, True)
    as_set([sampling]).load_weights(weights(4))
    sampling.call("activate")
    sampling.call("begin_sampling", PARAMS)
    sampling.call("work", [Task(0, PROMPTS[0], PARAMS)])
    for host in (loading, sampling):
        host.close()
    assert not [one for one in threading.enumerate() if one.name == "r1-weights"]


def test_a_session_goes_on_without_a_dead_engine_and_gives_what_one_engine_gives() -> None:
    members = hosts(2)
    engines = as_set(members)
    with engines.active(weights(4)):
        members[1].dies_in = "work"
        session, found = engines.open_session(PARAMS), dict[str, Any]()
        for one in PROMPTS:
            session.submit(one.id, one, n=2, max_tokens=9)
            session.submit(f"{one.id} apart", one, n=2, max_tokens=9, split=True)
        while finished := session.poll(60):
            found.update(finished)
        groups = {index: found[f"p{index}"] for index in range(len(PROMPTS))}
        apart = {index: found[f"p{index} apart/0"] + found[f"p{index} apart/1"] for index in groups}
        assert plain(groups) == plain(apart) == one_engine(replace(PARAMS, n=2))
    assert members[1].asked.count("work"), "the engine died before it had anything to do"


@pytest.mark.parametrize("verb", ["begin_load", "load_bucket", "end_load", "begin_sampling", "work", "logprobs_of"])
def test_an_engine_that_dies_costs_no_step_and_takes_part_again_after_the_next_sync(verb: str) -> None:
    members, started = hosts(2), hosts(1)
    engines = as_set(members, start=lambda place: started[place - 1])
    members[1].dies_in = verb
    for version in (4, 5):
        if version == 5:
            assert eventually(lambda: engines._engines._pending[1].done())
        with engines.active(weights(version)):
            drawn = plain(dict(engines.generate(PROMPTS, PARAMS)))
            tokens = [torch.arange(3)]
            assert len(engines.logprobs_of(PROMPTS[:1], tokens)) == 1  # type: ignore[arg-type]
        assert [[one[:2] for one in group] for group in drawn] == [[one[:2] for one in group] for group in one_engine()]
    assert verb in members[1].asked
    assert "work" not in members[1].asked[members[1].asked.index(verb) + 2 :]
    assert "work" in started[0].asked


def test_a_sync_after_the_last_engine_has_died_says_so_and_the_run_starts_again() -> None:
    (member,) = hosts(1)
    engines = as_set([member])
    with engines.active(weights(4)):
        drawn = dict(engines.generate(PROMPTS, PARAMS))
    assert len(drawn) == len(PROMPTS)
    member.dies_in = "offload"  # noticed when nothing of the step is left to do
    with suppress(MemberLost), engines.active():
        pass
    with pytest.raises(MemberLost, match="died in offload"), engines.active(weights(5)):
        pass


def test_no_engine_has_more_than_it_has_room_for_while_another_has_less() -> None:
    members, most = hosts(2), [0, 0]

    def watched(number: int, member: OneHost) -> None:
        work, unfinished = member.host.work, set[int]()

        def counted(tasks: Any, cancelled: Any) -> Any:
            unfinished.update(task.index for task in tasks)
            most[number] = max(most[number], len(unfinished))
            finished = work(tasks)
            unfinished.difference_update(index for index, _, _ in finished)
            return finished

        member.host.work = counted  # type: ignore[method-assign]

    for number, member in enumerate(members):
        watched(number, member)
    engines = as_set(members)
    with engines.active(weights(4)):
        assert len(dict(engines.generate(PROMPTS, PARAMS))) == len(PROMPTS)
    assert most == [4, 4]  # two groups of three sequences of eight, and two in reserve


def test_of_an_adapter_the_factors_alone_cross_to_all_engines() -> None:
    members, base = hosts(2), qwen2(5)
    engines, generator = as_set(members), torch.Generator().manual_seed(3)
    factors, merged = [], qwen2(5).state_dict()
    for name, module in base.named_modules():
        if name.endswith("up_proj"):
            a, b = (torch.randn(shape, generator=generator) for shape in ((2, 16), (32, 2)))
            factors += [(f"{name}.lora_A.default.weight", a), (f"{name}.lora_B.default.weight", b)]
            merged[f"{name}.weight"] = module.weight.detach() + 2.0 * (b @ a)
    before = len(STORE)
    engines.load_weights(LocalWeights(Adapter(2, 4.0, ("up_proj",), factors), 4))
    assert sum(Stored(place).num_bytes for place in range(before, len(STORE))) < 2 * 4 * 2 * 2 * (16 + 32)
    sent = Adapter(2, 4.0, ("up_proj",), factors)
    proof = engines.compare(expected_checksums(sent, engines.precisions, keeps_layout=True))
    assert not proof.differing
    assert not proof.unread
    with ExitStack() as stack:
        engine = build_engine(stack)
        engine.load_weights(LocalWeights(merged, 4))
        own = engine.logprobs_of(PROMPTS[:2], [[1, 2], [3]])
    found = engines.logprobs_of(PROMPTS[:2], [[1, 2], [3]])
    assert found == [pytest.approx(one, abs=1e-5) for one in own]


def test_weights_are_everywhere_the_same_and_proven_everywhere() -> None:
    members = hosts(2)
    engines = as_set(members)
    source = weights(4)
    with engines.active(source):
        expected = expected_checksums(source.tensors(), engines.precisions)
        assert not engines.compare(expected).differing
        (own,) = build_and_ask([[1, 2]])
        assert engines.logprobs_of(PROMPTS[:1], [[1, 2]]) == [pytest.approx(own, abs=1e-6)]
        members[1].host._engine.load_weights(weights(4, seed=9))  # type: ignore[attr-defined]
        assert engines.compare(expected).differing
        with pytest.raises(EngineError, match="engine-0 and engine-1 give the same responses log-probs that differ"):
            engines.logprobs_of(PROMPTS[:1], [[1, 2]])


def test_engines_must_agree_to_the_tolerance_that_the_canary_has_learned() -> None:
    members = hosts(2)
    engines = as_set(members)
    engines.tolerance = TOLERANCE[torch.bfloat16]  # all that a pool knows by itself in half precision
    with engines.active(weights(4)):
        off = {name: tensor * 1.2 if "layers.1." in name else tensor for name, tensor in qwen2(1).state_dict().items()}
        members[1].host._engine.load_weights(LocalWeights(off, 4))  # type: ignore[attr-defined]
        engines.logprobs_of(PROMPTS[:1], [[1, 2]])
        probes = text_probes(range(60), longest_prompt=4, longest_response=2)
        opening = Canary(probes, probes, tolerance=learn_tolerance(1e-5, torch.bfloat16))
        add_weight_check(make_sampler(engines), None, Canary(probes, probes, 0.06, opening=opening))  # type: ignore[arg-type]
        with pytest.raises(EngineError, match=r"differ by .* \(tolerance 8e-05\): one of them has other weights"):
            engines.logprobs_of(PROMPTS[:1], [[1, 2]])


def make_sampler(engine: Any) -> Sampler:
    return Sampler(engine, None, None, None)  # type: ignore[arg-type]


def build_and_ask(responses: list[list[int]]) -> list[list[float]]:
    with ExitStack() as stack:
        engine = build_engine(stack)
        with engine.active(weights(4)):
            return engine.logprobs_of(PROMPTS[: len(responses)], responses)


def test_asleep_or_with_too_large_groups_they_refuse_as_one_engine_does() -> None:
    engines = as_set(hosts(2))
    with pytest.raises(RuntimeError, match=r"generate\(\) needs an active pool"):
        engines.generate(PROMPTS, PARAMS)
    with engines.active(weights(4)):
        with pytest.raises(ValueError, match="n=9 samples a prompt, but max_sequences=8"):
            engines.generate(PROMPTS, SamplingParams(max_tokens=2, n=9))
        with pytest.raises(RuntimeError, match="active already"), engines.active(weights(5)):
            pass
        with pytest.raises(PromptError, match="prompt p3 is empty"):
            list(engines.generate([*PROMPTS[:3], prompt(3, 0)], PARAMS))
        assert plain(dict(engines.generate(PROMPTS, PARAMS))) == one_engine()
    engines.load_weights(weights(5))
    assert len(dict(engines.generate(PROMPTS[:3], PARAMS))) == 3


def test_a_call_that_is_over_says_so_and_leaves_the_engines_well() -> None:
    engines = as_set(hosts(2))
    with engines.active(weights(4)):
        first = engines.generate(PROMPTS, PARAMS)
        next(first)
        second = engines.generate(PROMPTS, PARAMS)
        with pytest.raises(RuntimeError, match=r"a later generate\(\) began"):
            list(first)
        assert plain(dict(second)) == one_engine()
        third = engines.generate(PROMPTS, PARAMS)
        next(third)
        third.close()
        assert list(third) == []
        last = engines.generate(PROMPTS, PARAMS)
    with pytest.raises(RuntimeError, match="its active block ended"):
        list(last)
    with engines.active(weights(5)):
        assert len(dict(engines.generate(PROMPTS, PARAMS))) == len(PROMPTS)


def test_the_last_dead_engine_ends_the_call_with_its_name() -> None:
    members = hosts(2)
    engines = as_set(members)

    def sample() -> None:
        with engines.active(weights(4)):
            for member in members:
                member.dies_in = "work"
            list(engines.generate(PROMPTS, PARAMS))

    with pytest.raises(EngineError, match=r"engine-1 on 127\.0\.0\.1 died in work"):
        sample()


def stale(member: OneHost, layer: str) -> None:
    """Let an engine keep what it has of a layer, whatever comes."""
    take_up, old = member.host._load, dict(qwen2(5).state_dict())

    def taken(source: Any, *, activate: bool) -> None:
        kept = [(name, old[name] if layer in name else tensor.clone()) for name, tensor in source.tensors()]
        take_up(LocalWeights(kept, source.version), activate=activate)

    member.host._load = taken  # type: ignore[method-assign]


def test_the_search_for_a_fault_goes_through_all_engines_and_names_the_layer_that_never_arrives() -> None:
    members, (learner, _) = hosts(2), build_learner("text", "KL", Parallel())
    probes = text_probes(range(60), longest_prompt=4, longest_response=2)
    canary, reference = Canary(probes, probes, tolerance=1e-6), LearnerReference(learner)
    for member in members:
        stale(member, "layers.1.")
    fault = find_fault(canary, as_set(members), reference, 1, gap=0.5)
    assert fault.group == "layer 1"
    assert all(member.asked.count("begin_load") == member.asked.count("logprobs_of") > 4 for member in members)


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_of_two_ranks_reach_two_engines_to_the_bit(dtype: torch.dtype | None) -> None:
    assert ranks.run(weights_reach_engines, dtype) == [[], []]


def ranked(monkeypatch: pytest.MonkeyPatch) -> tuple[RankedPolicy, OneRank]:
    monkeypatch.setattr("r1_cli.cluster.rank.BUCKET", 20_000)
    rank = Rank(lambda parallel: build_learner("text", "KL", Parallel()))
    rank.join()
    one = OneRank(rank)
    return RankedPolicy(RankClient(one)), one


def test_a_learner_elsewhere_gives_its_weights_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, asked = ranked(monkeypatch)
    source = weights_of(learner, 6)
    assert isinstance(source, RankedWeights)
    own = dict(asked.rank.learner.weights())
    assert {name: tuple(tensor.shape) for name, tensor in source.names()} == {
        name: tuple(tensor.shape) for name, tensor in own.items()
    }
    assert [verb for verb, _ in asked.asked] == ["adapter", "weight_shapes"], "names alone moved weights"
    assert all(tensor.equal(own[name]) for name, tensor in source.tensors())
    assert source.run_with_weights(len_of) == len(own)
    assert not STORE, "something was put down that nobody reads"


def len_of(weights: Any) -> int:
    return len(list(weights))


def test_two_buckets_are_alive_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, asked = ranked(monkeypatch)
    references: list[Any] = []
    engines = as_set(hosts(2))
    put = Stored.put

    def counted(value: Any) -> Stored:
        assert len(set(LOADS)) >= len(STORE) - 1, "a third bucket was made before the first was read"
        references.append(put(value))
        return references[-1]

    asked.remote_put = counted
    asked.call = lambda verb, *args, label="": getattr(asked.rank, verb)(*args)  # type: ignore[method-assign]
    with engines.active(weights_of(learner, 2)):
        assert len(references) > 2
        expected = expected_checksums({n: t.float() for n, t in asked.rank.learner.weights()}.items(), ["float32"])
        assert not engines.compare(expected).differing


def test_what_an_engine_does_not_take_is_told_when_the_ranks_have_ended_their_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner, asked = ranked(monkeypatch)
    engines = as_set(hosts(2))
    engines.load_weights(weights(9))
    with pytest.raises(WeightsError, match="weights of version 2 are older than version 9"):
        engines.load_weights(weights_of(learner, 2))
    assert [verb for verb, _ in asked.asked][-1] == "end_weights"
    engines.load_weights(weights_of(learner, 10))
    assert [verb for verb, _ in asked.asked][-1] == "next_weights"
    with pytest.raises(WeightsError, match="the adapter for q_proj holds no weights"):
        engines.load_weights(LocalWeights(Adapter(1, 1.0, ("q_proj",), []), 11))
    engines.load_weights(weights_of(learner, 12))


def test_weights_that_break_off_are_an_error_of_the_engine_that_has_half_of_them() -> None:
    taken: list[str] = []

    def take_up(source: Any) -> None:
        taken.extend(name for name, _ in source.tensors())

    arrival = IncomingWeights(take_up, 1)
    arrival.add(Stored.put([]))
    with pytest.raises(ConnectionError, match="the rest of the weights did not come"):
        arrival.end(whole=False)
    assert END not in taken
