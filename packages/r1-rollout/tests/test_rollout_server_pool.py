"""A pool of servers loses nothing, doubles nothing, and says what became of whom."""

import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import END, FakeServer, serving
from faults_table import note_fault
from PIL import Image
from server_pools import PARAMS, Pools, expected, prompts, told, wait_for, weights

from r1_rollout.errors import EngineError, PromptError
from r1_rollout.types import SamplingParams
from r1_rollout.vllm.client import Endpoint, RequestRefused, ServerFault
from r1_rollout.vllm.servers.pool import ServerPool
from r1_rollout.vllm.servers.pooled_server import Deadlines
from r1_rollout.vllm.servers.supervisor import ServersLost
from r1_rollout.weights import LocalWeights


def test_thousands_of_samples_arrive_once_each_whatever_two_of_three_servers_do(pools: Pools) -> None:
    kinds = ["500", "reset", "bad_json", "wrong_ids", "nan", "short", "ends_early", "stale", "doubled", "abort"]
    fakes = [
        FakeServer(lambda number, body: kinds[number // 40 % len(kinds)] if number % 40 == 39 else None),
        FakeServer(lambda number, body: kinds[number // 60 % len(kinds)] if number % 60 == 59 else None),
        FakeServer(),
    ]
    pool, asked = pools.open(*fakes, max_sequences=32), prompts(1500)
    counts: Counter[int] = Counter()
    with pool.active(LocalWeights(weights(), 7)):
        for index, group in pool.generate(asked, PARAMS):
            counts[index] += 1
            assert told(group) == expected(asked[index])
            assert {one.weight_version for one in group} == {7}
    assert counts == dict.fromkeys(range(1500), 1)
    assert sum(len(fake.requests) for fake in fakes) > 1500  # some were asked for again


FAULTS = ["500", "reset", "bad_json", "wrong_ids", "nan", "short", "ends_early", "stale", "doubled", "abort", "goes_on"]
FAULTS += ["sample_missing", "field_missing", "error_event", "other_prompt"]


@pytest.mark.parametrize("kind", FAULTS)
def test_a_group_goes_elsewhere_when_its_server_answers_nonsense(pools: Pools, kind: str) -> None:
    bad, good = FakeServer(lambda number, body: kind), FakeServer()
    pool, asked = pools.open(bad, good), prompts(6)
    asked = [SimpleNamespace(**vars(p) | {"token_ids": [5, 6]}) for p in asked]
    with pool.active(LocalWeights(weights(), 0)):
        groups = dict(pool.generate(asked, PARAMS))
    assert {index: told(group) for index, group in groups.items()} == {i: expected(p) for i, p in enumerate(asked)}
    assert bad.requests
    assert len(good.requests) == 6
    note_fault("a vLLM server that answers nonsense", outcome="goes on")


def test_a_session_over_servers_gives_what_generate_gives_and_outlives_a_server_that_answers_nonsense(
    pools: Pools,
) -> None:
    bad, good = FakeServer(lambda number, body: "bad_json"), FakeServer()
    pool, asked = pools.open(bad, good), prompts(9)
    wanted = {f"row {index}": replace(PARAMS, n=1 + index % 3, max_tokens=2 + index % 5) for index in range(len(asked))}
    with pool.active(LocalWeights(weights(), 7)):
        session = pool.open_session(PARAMS)
        assert session.poll() == []
        for number, prompt in enumerate(asked):
            n, max_tokens = wanted[prompt.id].n, wanted[prompt.id].max_tokens
            session.submit(prompt.id, prompt, n=n, max_tokens=max_tokens, split=number % 2 == 1)
        found: dict[str, Any] = {}
        while finished := session.poll(60):
            assert not {key for key, _ in finished} & found.keys()
            found.update(finished)
        for prompt in asked[1::2]:
            found[prompt.id] = [found.pop(f"{prompt.id}/{number}")[0] for number in range(wanted[prompt.id].n)]
        with pytest.raises(ValueError, match="n=257 samples"):
            session.submit("a", asked[0], n=257, max_tokens=1)
        with pytest.raises(PromptError, match="outside the vocabulary"):
            session.submit("a", SimpleNamespace(id="p", token_ids=[64], model_inputs={}), max_tokens=1)
    assert {key: told(group) for key, group in found.items()} == {p.id: expected(p, wanted[p.id]) for p in asked}
    assert bad.requests
    with pytest.raises(RuntimeError, match="its active block ended"):
        session.poll()


@pytest.mark.parametrize(("cached", "prefilled"), [((1, 1), 6 * 2 - 6), ((0, 0), 6 * 2), ((None, 1), None)])
def test_a_session_counts_the_tokens_that_no_server_had_in_its_cache_if_all_report_it(
    pools: Pools, cached: tuple[int | None, ...], prefilled: int | None
) -> None:
    servers = [FakeServer() for _ in cached]
    for server, tokens in zip(servers, cached, strict=True):
        server.cached = tokens
    pool, asked = pools.open(*servers), prompts(6)
    with pool.active(LocalWeights(weights(), 7)):
        session = pool.open_session(PARAMS)
        assert session.prefilled == 0
        for prompt in asked:
            session.submit(prompt.id, SimpleNamespace(**vars(prompt) | {"token_ids": [5, 6]}), max_tokens=3)
        while session.poll(60):
            pass
        assert all(server.requests for server in servers)
        assert session.prefilled == prefilled


def test_a_picture_goes_to_a_server_once_and_again_if_the_server_does_not_have_it_any_more(pools: Pools) -> None:
    fake = FakeServer()
    pool, picture = pools.open(fake), Image.new("RGB", (14, 14), (1, 2, 3))

    def with_picture(turn: int) -> Any:
        tokens = [5, 6, 7][: turn + 1]
        return SimpleNamespace(id=f"row/{turn}", token_ids=tokens, engine_token_ids=tokens, images=(picture,))

    def sent() -> list[bool]:
        return ["url" in body["content_parts"][0] for body in fake.requests]

    for version in (7, 8):
        with pool.active(LocalWeights(weights(), version)):
            session = pool.open_session(PARAMS)
            for turn in range(3):
                session.submit("a", with_picture(turn), n=2, max_tokens=3, split=True)
                assert len(session.poll(60)) + len(session.poll(60)) == 2
    # The second request names the picture. The fourth is the first after new weights, which empty the server's caches.
    assert sent() == [True, False, False, True, False, False]
    fake.fault = lambda number, body: "cache_miss"
    with pool.active(LocalWeights(weights(), 9)):
        session = pool.open_session(PARAMS)
        for turn in range(2):
            session.submit("a", with_picture(turn), max_tokens=3)
            assert len(session.poll(60)) == 1
    assert sent()[6:] == [True, False, True]


def test_a_cancelled_request_to_a_server_is_broken_off_and_never_comes(pools: Pools) -> None:
    fake = FakeServer()
    pool, (first, second) = pools.open(fake), prompts(2)
    with pool.active(LocalWeights(weights(), 7)):
        session = pool.open_session(PARAMS)
        fake.gate.clear()
        session.submit("first", first, max_tokens=6)
        session.submit("second", second, max_tokens=6)
        wait_for(lambda: len(fake.requests) == 2)
        assert session.poll(0) == session.poll(0.01) == []
        session.cancel("first")
        fake.gate.set()
        assert [key for key, _ in session.poll(60)] == ["second"]
        assert session.poll() == []
        session.close()
        with pytest.raises(RuntimeError, match="it was closed"):
            session.poll()
        assert len(dict(pool.generate(prompts(3), PARAMS))) == 3


def test_a_server_that_hangs_is_left_after_its_deadline(pools: Pools) -> None:
    hung = FakeServer(lambda number, body: "hang")
    pool = pools.open(hung, FakeServer(), deadlines=Deadlines(stall=2.0, load=60, probe=0.01, recovery=120))
    with pool.active(LocalWeights(weights(), 0)):
        assert len(dict(pool.generate(prompts(8), PARAMS))) == 8
    assert hung.requests
    note_fault("a vLLM server that hangs", outcome="goes on")


def test_without_a_server_the_call_ends_after_the_stated_time_and_says_why(pools: Pools) -> None:
    fake = FakeServer()
    pool = pools.open(fake, deadlines=Deadlines(stall=60, load=60, probe=0.01, recovery=0.5))
    with pool.active(LocalWeights(weights(), 0)):
        fake.down = True
        with pytest.raises(ServersLost, match="HTTP 503"):
            list(pool.generate(prompts(3), PARAMS))


def test_a_prompt_that_fails_everywhere_ends_the_call_and_is_named(pools: Pools) -> None:
    def poison(number: int, body: dict[str, Any]) -> str | None:
        return "reset" if body["token_ids"] == [5, 5] else None

    pool = pools.open(FakeServer(poison), FakeServer(poison), max_attempts=3)
    with pool.active(LocalWeights(weights(), 0)), pytest.raises(ServerFault, match="prompt row 1 failed 3 times"):
        list(pool.generate(prompts(4), PARAMS))


@pytest.mark.parametrize("kind", ["refused", "late_refusal"])
def test_a_prompt_that_is_refused_is_named_and_not_tried_again(pools: Pools, kind: str) -> None:
    fakes = [FakeServer(lambda number, body: kind), FakeServer(lambda number, body: kind)]
    pool = pools.open(*fakes)
    with (
        pool.active(LocalWeights(weights(), 0)),
        pytest.raises(RequestRefused, match=r"row 0.*longer than max_model_len"),
    ):
        list(pool.generate(prompts(1), PARAMS))
    assert sum(len(fake.requests) for fake in fakes) == 1


def test_one_bad_prompt_takes_no_server_out_and_is_not_sent(pools: Pools) -> None:
    fakes = [FakeServer(), FakeServer()]
    fakes[1].max_model_len = 40
    pool, asked = pools.open(*fakes), prompts(3)
    with pool.active(LocalWeights(weights(), 0)):
        for token_ids, said in (([5, 64], "row 1: token 64 is outside the vocabulary of 64"),
                                ([5] * 40, "row 1 has 40 tokens, its answer up to 6, but max_model_len=40"),
                                ([], "row 1 is empty")):  # fmt: skip
            asked[1].token_ids = token_ids
            with pytest.raises(PromptError, match=said):
                pool.generate(asked, PARAMS)
        with pytest.raises(PromptError, match="row 0: response token 70 is outside"):
            pool.logprobs_of(asked[:1], [[3, 70]])
        assert not any(fake.requests for fake in fakes)
        assert len(dict(pool.generate(prompts(3), PARAMS))) == 3


def test_stop_strings_are_refused_where_a_server_has_no_tokenizer(pools: Pools) -> None:
    fakes = [FakeServer(), FakeServer()]
    pool, params = pools.open(*fakes), SamplingParams(max_tokens=6, stop=("end",))
    with pool.active(LocalWeights(weights(), 0)):
        assert len(dict(pool.generate(prompts(3), params))) == 3
        fakes[1].has_tokenizer = False
        with pytest.raises(RequestRefused, match="no tokenizer"):
            pool.generate(prompts(3), params)
        fakes[1].down = True
        assert len(dict(pool.generate(prompts(3), params))) == 3


def test_requests_go_to_the_server_that_owes_least(pools: Pools) -> None:
    fakes = [FakeServer() for _ in range(3)]
    pool = pools.open(*fakes, max_sequences=1000)
    asked = prompts(60)
    asked[0].token_ids = [5] * 500
    with pool.active(LocalWeights(weights(), 0)):
        for fake in fakes:
            fake.gate.clear()
        groups = pool.generate(asked, PARAMS)
        first = threading.Thread(target=lambda: next(groups))
        first.start()
        wait_for(lambda: sum(len(fake.requests) for fake in fakes) == 60)
        owed = sorted(sum(len(body["token_ids"]) + 12 for body in fake.requests) for fake in fakes)
        for fake in fakes:
            fake.gate.set()
        first.join(60)
        assert len(list(groups)) == 59
    assert owed[1] - owed[0] <= 7 + 12  # within one request, but for the long prompt's server
    assert min(len(fake.requests) for fake in fakes) < 15 < max(len(fake.requests) for fake in fakes)


def test_a_server_gets_no_more_samples_than_it_has_room_for(pools: Pools) -> None:
    fake = FakeServer()
    fake.gate.clear()
    pool = pools.open(fake, max_sequences=5)
    with pool.active(LocalWeights(weights(), 0)):
        groups = pool.generate(prompts(9), PARAMS)
        first = threading.Thread(target=lambda: next(groups))
        first.start()
        wait_for(lambda: len(fake.requests) == 2)
        time.sleep(0.3)
        assert len(fake.requests) == 2  # two groups of two
        fake.gate.set()
        first.join(60)
        assert len(list(groups)) == 8


def test_a_group_is_one_request_with_its_own_seed(pools: Pools) -> None:
    fake = FakeServer()
    pool = pools.open(fake)
    with pool.active(LocalWeights(weights(), 0)):
        list(pool.generate(prompts(5), PARAMS))
        list(pool.generate(prompts(5)[::-1], PARAMS))
    seeds = [body["sampling_params"]["seed"] for body in fake.requests]
    assert len(set(seeds)) == 5
    assert all(body["sampling_params"]["n"] == 2 for body in fake.requests)


def test_closing_the_iterator_breaks_off_what_is_under_way(pools: Pools) -> None:
    quick, slow = FakeServer(), FakeServer()
    slow.gate.clear()
    pool = pools.open(quick, slow, max_sequences=2)
    with pool.active(LocalWeights(weights(), 0)):
        groups = pool.generate(prompts(40), PARAMS)
        next(groups)
        wait_for(lambda: bool(slow.requests))
        groups.close()
        assert slow.broken_off.wait(60)
        assert len(quick.requests) + len(slow.requests) <= 41
        slow.gate.set()
        assert len(dict(pool.generate(prompts(4), PARAMS))) == 4


def test_a_later_call_and_the_end_of_the_block_end_an_earlier_call(pools: Pools) -> None:
    pool = pools.open(FakeServer())
    with pool.active(LocalWeights(weights(), 0)):
        first = pool.generate(prompts(4), PARAMS)
        next(first)
        second = pool.generate(prompts(4), PARAMS)
        next(second)
    for groups in (first, second):
        with pytest.raises(RuntimeError, match="is over"):
            list(groups)


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_temperatures_that_vllm_does_not_sample_at_are_refused_before_anything_is_sent(
    pools: Pools, temperature: float
) -> None:
    fake = FakeServer()
    pool = pools.open(fake)
    pool.load_weights(LocalWeights(weights(), 0))
    with pytest.raises(ValueError, match=f"from 0.01 to 2 under vLLM, got temperature={temperature}"):
        pool.generate(prompts(1), replace(PARAMS, temperature=temperature))
    with pytest.raises(ValueError, match="to 2 under vLLM"):
        pool.logprobs_of(prompts(1), [[1]], temperature)
    assert not fake.requests
    for good in (0.0, 0.01, 2.0):
        assert len(list(pool.generate(prompts(1), replace(PARAMS, temperature=good)))) == 1


def test_it_samples_only_while_awake(pools: Pools) -> None:
    pool = pools.open(FakeServer())
    with pytest.raises(RuntimeError, match="active"):
        pool.generate(prompts(1), PARAMS)
    with (
        pool.active(LocalWeights(weights(), 0)),
        pytest.raises(RuntimeError, match="active already"),
        pool.active(LocalWeights(weights(), 1)),
    ):
        pass


def test_a_server_without_a_lock_is_warned_of(pools: Pools, caplog: pytest.LogCaptureFixture) -> None:
    pool = pools.open(FakeServer(token="secret"), FakeServer())
    with pool.active(LocalWeights(weights(), 0)):
        pass
    open_doors = [record.message for record in caplog.records if "for anybody" in record.message]
    assert len(open_doors) == 1
    assert Endpoint("http://example.org:8000").exposed
    assert not Endpoint("https://example.org").exposed


def test_a_wrong_token_is_said_to_be_wrong(pools: Pools) -> None:
    fake = FakeServer(token="right")
    url = pools.stack.enter_context(serving(fake))
    short = Deadlines(stall=60, load=60, probe=0.01, recovery=0.3)
    pool = pools.stack.enter_context(ServerPool([Endpoint(url, "wrong")], end_token_ids={END}, deadlines=short))
    with pytest.raises(ServersLost, match="does not take this token"), pool.active(LocalWeights(weights(), 0)):
        pass
    assert "wrong" not in repr(Endpoint(url, "wrong"))


def test_scores_come_from_every_server_and_must_agree(pools: Pools) -> None:
    fakes = [FakeServer(), FakeServer()]
    pool = pools.open(*fakes)
    asked = prompts(2)
    with pool.active(LocalWeights(weights(), 0)):
        assert pool.logprobs_of(asked, [[7, 8], [9]]) == [[-0.07, -0.08], [-0.09]]
        assert [len(fake.requests) for fake in fakes] == [2, 2]
        fakes[1].shift = -0.5
        with pytest.raises(EngineError, match=r"differ by 0\.5 of their size .*: one of them has other"):
            pool.logprobs_of(asked, [[7, 8], [9]])


def test_an_address_that_is_none_is_refused() -> None:
    for url in ("localhost:8000", "ftp://host", "http://"):
        with pytest.raises(ValueError, match="no server's address"):
            Endpoint(url)
    with pytest.raises(ValueError, match="at least one server"):
        ServerPool([], end_token_ids={END})
