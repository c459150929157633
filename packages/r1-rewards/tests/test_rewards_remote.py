"""Rewards over HTTP: the wire, faults of every kind, several servers, deadlines."""

import asyncio
import json
import math
import re
import threading

import pytest

pytest.importorskip("httpx", reason='needs "r1-rewards[http]"')

from faults_table import note_fault
from loopback import answering, dead_url
from patience import eventually, growing

from r1_rewards import RewardInput, RewardSpecError, load
from r1_rewards.services.endpoint import Patience
from r1_rewards.services.remote import RemoteVerifier, score

QUICK = {"backoff": 0.01, "timeout": 60.0}


def inputs(*responses):
    return [RewardInput(response, "5", prompt="Q: ") for response in responses]


def echo(body, path, headers):
    """Reward each query with the number that it ends in."""
    return 200, {"rewards": [float(query.removeprefix("Q: ")) for query in json.loads(body)["query"]]}


def causes(scores):
    return [score.error.cause if score.error else None for score in scores]


def test_the_request_is_openrlhfs_and_extra_columns_become_parts():
    seen = []

    def respond(body, path, headers):
        seen.append((path, headers["content-type"], headers.get("authorization"), json.loads(body)))
        return 200, {
            "rewards": [1.5, 0.5],
            "acc_rewards": [1.0, 0.0],
            "log": ["a", "b"],
            "short": [1.0],
            "huge": [1, 10**400],
            "n": [1, math.nan],
        }

    with answering(respond) as url, load(f"{url}/get_reward", {"backoff": 0.01}) as verifier:
        scores = verifier(inputs("a", "b"))
    request = {"query": ["Q: a", "Q: b"], "prompts": ["Q: ", "Q: "], "labels": ["5", "5"]}
    assert seen == [("/get_reward", "application/json", None, request)]
    assert [dict(score.parts) for score in scores] == [
        {"overall": 1.5, "acc_rewards": 1.0},
        {"overall": 0.5, "acc_rewards": 0.0},
    ]
    assert [score.value for score in scores] == [1.5, 0.5]


def test_a_token_in_the_environment_is_sent(monkeypatch):
    seen = []

    def respond(body, path, headers):
        seen.append(headers.get("authorization"))
        return 200, {"rewards": [1.0]}

    monkeypatch.setenv("R1_REWARDS_TOKEN", "t" * 16)
    with answering(respond) as url:
        assert score("a", "5", url=url).value == 1.0
    assert seen == ["Bearer " + "t" * 16]


def test_order_is_kept_over_requests_and_servers():
    with answering(echo) as one, answering(echo) as two, RemoteVerifier([one, two], batch_size=7, **QUICK) as verifier:
        scores = verifier(inputs(*map(str, range(200))))
    assert [score.value for score in scores] == list(range(200))


def test_work_is_balanced_and_a_dead_server_is_failed_over():
    at_once, lock, all_ask = {"one": 0, "two": 0}, threading.Lock(), threading.Event()

    def holding(name):
        def respond(body, path, headers):
            if not all_ask.is_set():
                with lock:
                    at_once[name] += 1
                    if sum(at_once.values()) == 6:  # two at a time for each of three servers, of which one is dead
                        all_ask.set()
                assert all_ask.wait(120)
            return echo(body, path, headers)

        return respond

    with answering(holding("one")) as one, answering(holding("two")) as two:
        urls = f"{one},{dead_url()}, {two}"
        with RemoteVerifier(urls, batch_size=1, concurrency=2, **QUICK) as verifier:
            scores = verifier(inputs(*map(str, range(40))))
    assert causes(scores) == [None] * 40
    assert [score.value for score in scores] == list(range(40))
    assert at_once == {"one": 3, "two": 3}
    note_fault("one of several reward servers is away", outcome="goes on")


@pytest.mark.parametrize(
    ("answer", "cause", "message"),
    [
        ((500, {"error": "ugh"}), "remote", "HTTP 500"),
        ((401, {}), "remote", "1 try, .* HTTP 401"),
        ((302, {}), "remote", "HTTP 302"),
        ((0, None), "remote", "RemoteProtocolError|ReadError"),
        ((200, b"<html>"), "wrong_shape", "not JSON"),
        ((200, b"[" * 100_000), "wrong_shape", "not JSON"),
        ((200, {"reward": [1.0]}), "wrong_shape", "no list 'rewards'"),
        ((200, [1.0]), "wrong_shape", "no list 'rewards'"),
        ((200, {"rewards": [1.0, 2.0]}), "wrong_shape", "2 rewards for 1 responses"),
        ((200, {"rewards": ["1.0"]}), "wrong_shape", "not a number"),
        ((200, {"rewards": [math.nan]}), "non_finite", "nan"),
        ((200, b'{"rewards": [1e999]}'), "non_finite", "inf"),
        (("truncated", {"rewards": [1.0]}), "remote", "RemoteProtocolError"),
    ],
)
def test_a_failure_is_data_with_its_cause(answer, cause, message):
    with answering(lambda *_: answer) as url, RemoteVerifier(url, failure_score=-1.0, tries=2, **QUICK) as verifier:
        [score] = verifier(inputs("1"))
    assert (score.value, dict(score.parts)) == (-1.0, {"overall": -1.0})
    assert score.error.cause == cause
    assert re.search(message, score.error.message)
    note_fault("a reward server that answers nonsense", outcome="goes on")


def test_a_server_that_nobody_runs_is_a_failure():
    with RemoteVerifier(dead_url(), tries=2, **QUICK) as verifier:
        assert causes(verifier(inputs("1"))) == ["remote"]


def test_a_slow_answer_is_cut_at_the_timeout_and_tries_at_the_deadline():
    stop = threading.Event()

    def respond(body, path, headers):
        stop.wait(120)
        return 200, {"rewards": [1.0]}

    def tries(seconds):
        with RemoteVerifier(url, timeout=0.2, deadline=seconds, tries=99, backoff=0.01) as verifier:
            [score] = verifier(inputs("1"))
        assert score.error.cause == "timeout"
        return int(score.error.message.split(" tr")[0])

    with answering(respond) as url:
        assert 2 <= growing(tries, lambda found: found > 1, (2.0, 8.0)) <= 40
        stop.set()


def test_one_answer_that_the_server_refuses_fails_alone():
    def respond(body, path, headers):
        return (422, {"error": "no"}) if "Q: bad" in json.loads(body)["query"] else echo(body, path, headers)

    with answering(respond) as url, RemoteVerifier(url, batch_size=16, **QUICK) as verifier:
        scores = verifier(inputs(*map(str, range(11)), "bad", *map(str, range(20))))
    assert causes(scores) == [None] * 11 + ["remote"] + [None] * 20
    assert [score.value for score in scores if not score.error] == [*range(11), *range(20)]


def test_servers_that_are_gone_do_not_cost_every_request_its_tries():
    requests = []

    def respond(body, path, headers):
        requests.append(1)
        return 503, {}

    with answering(respond) as url, RemoteVerifier(url, batch_size=1, concurrency=2, tries=2, **QUICK) as verifier:
        scores = verifier(inputs(*map(str, range(100))))
    assert causes(scores) == ["remote"] * 100
    assert len(requests) <= 10


def test_a_server_that_restarts_is_waited_for_and_said_once(caplog):
    def respond(body, path, headers):
        return 200, {"rewards": [1.0] * len(json.loads(body)["query"])}

    with answering(respond) as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        verifier = RemoteVerifier(url, tries=1, backoff=0.01, batch_size=1)
        assert [score.value for score in verifier(inputs("1"))] == [1.0]
    scores = []
    thread = threading.Thread(target=lambda: scores.extend(verifier(inputs("1", "1", "1"))))
    thread.start()
    assert eventually(lambda: "it has answered before, so each request waits" in caplog.text)
    with answering(respond, port=port):
        thread.join(60)
    assert [(score.value, score.error) for score in scores] == [(1.0, None)] * 3, "no score is lost"
    assert caplog.text.count("it has answered before") == caplog.text.count("answers again") == 1
    with pytest.MonkeyPatch.context() as patched:  # one that stays away costs the deadline
        patched.setattr(verifier._endpoint, "patience", Patience(1.0, 0.2, 1, 0.01))
        assert verifier(inputs("1"))[0].error.cause == "remote"
    note_fault("a reward server that restarts", outcome="waits")


def test_pauses_grow_and_a_server_may_say_when_to_come_back(monkeypatch):
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr("r1_rewards.services.endpoint.asyncio.sleep", sleep)
    busy = [(503, {})] * 4 + [(429, {}, [("retry-after", "20")])]
    answers = iter([*busy, (200, {"rewards": [2.0]})])
    with answering(lambda *_: next(answers)) as url, RemoteVerifier(url, backoff=1.0, tries=9) as verifier:
        assert verifier(inputs("1"))[0].value == 2.0
    assert [0.5 * 2**i <= pause <= 2**i for i, pause in enumerate(pauses[:4])] == [True] * 4
    assert pauses[4] == 20.0


def test_it_works_from_a_running_event_loop_and_from_threads():
    async def in_a_loop(verifier):
        return verifier(inputs("1", "2"))

    results = []
    with answering(echo) as url, RemoteVerifier(url, **QUICK) as verifier:
        assert [score.value for score in asyncio.run(in_a_loop(verifier))] == [1.0, 2.0]
        threads = [threading.Thread(target=lambda: results.append(verifier(inputs("3"))[0].value)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [3.0] * 4


def test_closing_ends_a_call_that_waits():
    asked, stop = threading.Event(), threading.Event()

    def respond(body, path, headers):
        asked.set()
        stop.wait(120)
        return 200, {"rewards": [1.0]}

    with answering(respond) as url:
        verifier = RemoteVerifier(url)
        closer = threading.Thread(target=lambda: (asked.wait(120), verifier.close()))
        closer.start()
        with pytest.raises(RuntimeError, match="closed while it was in use"):
            verifier(inputs("1"))
        stop.set()


def test_lone_surrogates_reach_the_server_as_question_marks():
    seen = []

    def respond(body, path, headers):
        seen.append(json.loads(body)["query"])
        return 200, {"rewards": [1.0]}

    with answering(respond) as url, RemoteVerifier(url, **QUICK) as verifier:
        verifier(inputs("\ud800é😀\x00"))
    assert seen == [["Q: ?é😀\x00"]]


@pytest.mark.parametrize(
    ("spec", "kwargs", "message"),
    [
        ("remote", {}, "missing a required argument: 'urls'"),
        ("remote", {"urls": "localhost:5000"}, "not a URL; write http://"),
        ("remote", {"urls": []}, "needs a URL"),
        ("http://", {}, "not a URL"),
        ("http://me:planted@h/", {}, "ends up in logs"),
        ("http://h/", {"protocol": "openrlfh"}, "did you mean 'openrlhf'"),
        ("http://h/", {"batchsize": 3}, "has no 'batchsize'; did you mean 'batch_size'"),
        ("http://h/", {"batch_size": 0}, "batch_size must be at least 1"),
        ("http://h/", {"tries": 0}, "tries must be positive"),
    ],
)
def test_a_remote_reward_that_cannot_work_is_refused(spec, kwargs, message):
    with pytest.raises(RewardSpecError, match=message):
        load(spec, kwargs)


@pytest.mark.parametrize(
    ("spec", "kwargs", "variable"),
    [
        ("remote", {"urls": "https://a/, http://10.0.0.7/"}, "R1_REWARDS_TOKEN"),
        ("judge", {"url": "https://a/v1,http://10.0.0.7:8000/v1", "model": "m"}, "OPENAI_API_KEY"),
    ],
)
def test_no_key_is_sent_over_the_network_unencrypted(spec, kwargs, variable, monkeypatch):
    monkeypatch.delenv(variable, raising=False)
    load(spec, kwargs).close()
    monkeypatch.setenv(variable, "secret" * 3)
    with pytest.raises(RewardSpecError, match=rf"http://10\.0\.0\.7.*{variable}.*unencrypted") as refused:
        load(spec, kwargs)
    assert "secret" not in str(refused.value)
