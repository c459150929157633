"""`r1-rewards serve`: who may enter, what a request may hold, and a soak with faults between it and `remote`."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi", reason='needs "r1-rewards[serve]"')
pytest.importorskip("httpx", reason='needs "r1-rewards[http]"')

import httpx
from loopback import dead_url, faulty, serving

from r1_rewards import RewardInput, Score, load
from r1_rewards.main import main
from r1_rewards.services import http_limits
from r1_rewards.services import serve as serve_module
from r1_rewards.services.remote import RemoteVerifier
from r1_rewards.services.serve import RequestLimits, build_app, is_loopback, response_of
from r1_rewards.types import Failure

TOKEN = "correct-horse-battery"
REWARDS = "/get_reward"


def number(inputs):
    """Score each answer with the number it is; fail those that are none."""
    return [
        Score(float(item.response), {"overall": float(item.response), "length": float(len(item.prompt))})
        if item.response.isdigit()
        else Score(-1.0, {"overall": -1.0}, Failure("exception", f"step {item.step}: {dict(item.metadata)}"))
        for item in inputs
    ]


@pytest.fixture(scope="module")
def client():
    limits = RequestLimits(body_bytes=10_000, answers=5, characters=1_000)
    with serving(build_app(number, limits=limits)) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def query(*responses):
    return {"query": [f"Q{r}" for r in responses], "prompts": ["Q"] * len(responses), "labels": ["1"] * len(responses)}


def test_it_answers_as_openrlhfs_and_lmm_r1s_trainers_ask(client):
    answer = client.post(REWARDS, json=query("3", "4"))
    assert answer.json() == {"rewards": [3.0, 4.0], "length": [1.0, 1.0]}
    assert client.post(REWARDS, json=query()).json() == {"rewards": []}
    assert client.post(REWARDS, json={**query("3"), "extra": 1}).json()["rewards"] == [3.0]
    assert client.post(REWARDS, json=query("3", "x")).json() == {
        "rewards": [3.0, -1.0],
        "errors": [None, "exception: step 0: {}"],
    }


def test_its_own_route_loses_nothing(client):
    item = {"response": "x", "ground_truth": "1", "metadata": {"a": [1]}, "step": 7, "prompt": "p"}
    answer = client.post("/score", json={"inputs": [item, {**item, "response": "2"}]})
    assert answer.json() == {
        "scores": [{"failure": ["exception", "step 7: {'a': [1]}"]}, {"parts": {"overall": 2.0, "length": 1.0}}]
    }


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (REWARDS, {"query": ["x"], "prompts": ["p"]}, 400, "labels: Field required"),
        (REWARDS, {"query": ["x", "y"], "prompts": ["p"], "labels": ["1", "1"]}, 400, "[2, 1, 2] entries"),
        (REWARDS, {"query": ["x"], "prompts": [None], "labels": ["1"]}, 400, "prompts.0"),
        (REWARDS, {"query": ["x"], "prompts": ["p"], "labels": [1]}, 400, "labels.0"),
        (REWARDS, query(*"123456"), 400, "at most 5 items"),
        (REWARDS, query("1" * 1_001), 400, "at most 1000 characters"),
        ("/score", {"inputs": [{"response": "x", "ground_truth": "1", "extra": 1}]}, 400, "inputs.0.extra"),
        ("/score", {"inputs": [{"response": "x"}]}, 400, "inputs.0.ground_truth: Field required"),
        ("/score", {"inputs": [], "x": 1}, 400, "x: Extra inputs"),
        (REWARDS, query("1" * 20_000), 413, "more than 10000 bytes"),
        ("/score", b"{", 400, "JSON decode error"),
        ("/score", b"[" * 9_000, 400, "error"),
        ("/no", b"{}", 404, "Not Found"),
    ],
)
def test_a_request_beyond_the_limits_is_refused_with_a_reason(client, path, body, status, message):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert message in answer.text
    assert len(answer.text) < 300


def test_a_page_in_a_browser_cannot_post_without_being_asked(client):
    plain = client.post(REWARDS, content=json.dumps(query("3")), headers={"content-type": "text/plain"})
    assert plain.status_code == 400


def test_a_token_is_asked_of_everyone_but_health():
    with serving(build_app(number, token=TOKEN)) as url, httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/health").json() == {"status": "ok"}
        for given in (None, "Bearer", "Bearer wrong", f"Bearer {TOKEN}x", TOKEN, f"bearer{TOKEN}", "Bearer ä"):
            headers = {"authorization": given.encode()} if given else {}
            assert client.post(REWARDS, json=query("3"), headers=headers).status_code == 401
            assert client.get("/no", headers=headers).status_code == 401
        allowed = client.post(REWARDS, json=query("3"), headers={"authorization": f"Bearer {TOKEN}"})
        assert allowed.json()["rewards"] == [3.0]


def test_remote_shows_its_token(monkeypatch):
    with serving(build_app(number, token=TOKEN)) as url:
        item = [RewardInput("3", "1")]
        refused = RemoteVerifier(url + REWARDS, backoff=0)(item)[0]
        assert "HTTP 401" in refused.error.message
        monkeypatch.setenv("R1_REWARDS_TOKEN", TOKEN)
        assert RemoteVerifier(url + REWARDS)(item)[0].value == 3.0


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_only_this_machines_own_addresses_are_loopback(host, own):
    assert is_loopback(host) is own


def test_another_address_without_a_token_is_refused_before_anything_starts(capsys, monkeypatch):
    assert main(["serve", "gsm8k", "--host", "0.0.0.0"]) == 2
    assert "R1_REWARDS_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("R1_REWARDS_TOKEN", "short")
    assert main(["serve", "gsm8k"]) == 2
    assert "5 characters" in capsys.readouterr().err


def test_a_reward_that_does_not_exist_is_told_plainly(capsys):
    assert main(["serve", "gsmk8"]) == 2
    assert "did you mean 'gsm8k'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("query", "prompt", "marker", "response"),
    [
        ("Q: 5", "Q: ", None, "5"),
        ("Q: 5<|im_end|><|endoftext|><|endoftext|>\n", "Q: ", None, "5"),
        ("Q: ", "Q: ", None, ""),
        ("no prompt 5", "p", None, "no prompt 5"),
        ("u\n<|im_start|>assistant\n5<|im_end|>", "[]", "<|im_start|>assistant\n", "5"),
        ("u \\boxed{5}\n<|im_start|>assistant\n", "[]", "<|im_start|>assistant\n", ""),
        ("A: x A: 5", "", "A: ", "x A: 5"),
        ("cut", "", "A: ", "cut"),
        ("<|im_end|> stays inside 5", "", None, "<|im_end|> stays inside 5"),
    ],
)
def test_the_response_is_found_in_a_query(query, prompt, marker, response):
    assert response_of(query, prompt, marker) == response


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["openrlhf", "r1"])
def test_a_soak_with_faults_loses_no_sample_and_scores_none_twice(protocol):
    asked = [RewardInput(str(i), "") for i in range(10_000)]
    route = "/score" if protocol == "r1" else REWARDS
    with (
        serving(build_app(lambda inputs: [Score(s.value, {"overall": s.value}) for s in number(inputs)])) as backend,
        faulty(backend, share=0.4, slow=8.0, seed=1) as (one, seen),
        faulty(backend, share=0.4, slow=8.0, seed=2) as (two, seen_too),
        RemoteVerifier(
            [one + route, dead_url() + route, two + route],
            protocol=protocol, batch_size=50, concurrency=4, timeout=3.0, tries=60, backoff=0.01,
        ) as verifier,
    ):  # fmt: skip
        scores = verifier(asked)
    assert [score.value for score in scores] == [float(i) for i in range(10_000)]
    assert not any(score.error for score in scores)
    assert min((seen + seen_too).values()) >= 5  # every kind of fault has happened


def test_the_command_serves_a_pool_that_no_answer_hangs(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import time\nREWARD_TYPE = 'sequential'\ndef f(item, step):\n"
        "    time.sleep(60 * (item['response'] == 'hang'))\n    return {'overall': 2, 'step': step}\n"
    )
    process, url = start_command(f"{reward}:f", "--timeout", "1")
    try:
        with load("remote", {"urls": f"{url}/score", "protocol": "r1"}) as verifier:
            scores = verifier([RewardInput(text, "", step=3) for text in ("a", "hang", "b")])
        assert [dict(score.parts) for score in scores if not score.error] == [{"overall": 2.0, "step": 3.0}] * 2
        assert scores[1].error.cause == "timeout"
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()


def test_silent_connections_keep_nobody_out_and_are_ended(monkeypatch):
    monkeypatch.setattr(http_limits, "HEADER_SECONDS", 1.0)
    with serving(
        build_app(number, token=TOKEN, limits=RequestLimits(requests=4)), http=http_limits.header_timeout_protocol()
    ) as url:
        host, port = url.removeprefix("http://").split(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(70)]
        for half_open in silent[::2]:
            half_open.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\n")
        try:
            assert answered(lambda: httpx.get(f"{url}/health", timeout=60)).status_code == 200
            asked, allowed = {"inputs": [{"response": "3", "ground_truth": ""}]}, {"authorization": f"Bearer {TOKEN}"}
            found = answered(lambda: httpx.post(f"{url}/score", json=asked, headers=allowed, timeout=60))
            assert found.json() == {"scores": [{"parts": {"overall": 3.0, "length": 0.0}}]}
            for connection in silent:
                connection.settimeout(120)
                assert connection.recv(10) == b""
        finally:
            for connection in silent:
                connection.close()


def answered(ask):
    """What is answered to one who is not silent, unless the machine has made him so."""
    for _ in range(20):
        with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            return ask()
    return ask()


def test_more_clients_than_places_wait_for_one_another_and_lose_nothing():
    asked = [RewardInput(str(i), "") for i in range(512)]
    with serving(build_app(number, limits=RequestLimits(requests=2))) as url:

        def ask():
            with RemoteVerifier(url + REWARDS, batch_size=16, concurrency=8, backoff=0.01) as verifier:
                return verifier(asked)

        with ThreadPoolExecutor(8) as threads:
            results = list(threads.map(lambda _: ask(), range(8)))
    assert all([score.value for score in scores] == [float(i) for i in range(512)] for scores in results)
    assert not any(score.error for scores in results for score in scores)


@pytest.mark.slow
def test_a_busy_server_says_when_to_come_back_and_is_waited_for(monkeypatch):
    monkeypatch.setattr(serve_module, "BUSY_SECONDS", 0.05)
    started, may_end = threading.Event(), threading.Event()

    def slow(inputs):
        started.set()
        may_end.wait(120)
        return number(inputs)

    with serving(build_app(slow, limits=RequestLimits(requests=1))) as url, ThreadPoolExecutor(1) as threads:
        first = threads.submit(lambda: httpx.post(url + REWARDS, json=query("1"), timeout=120))
        started.wait(120)
        turned_away = httpx.post(url + REWARDS, json=query("2"), timeout=60)
        assert (turned_away.status_code, turned_away.headers["retry-after"]) == (503, "1")
        threading.Timer(1.0, may_end.set).start()
        with RemoteVerifier(url + REWARDS, tries=1, backoff=0.01) as verifier:
            [score] = verifier([RewardInput("3", "")])
        assert score.value == 3.0
        assert first.result().status_code == 200


def start_command(*words):
    """Start `r1-rewards serve` at a free port; return the process and its URL when it answers."""
    for _ in range(9):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "r1_rewards.main", "serve", *words, "--port", str(port)]
        process, url = subprocess.Popen(command, stderr=subprocess.PIPE, text=True), f"http://127.0.0.1:{port}"
        while process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{url}/health", timeout=60)
                return process, url
            time.sleep(0.05)
        said = process.stderr.read()
        assert "address already in use" in said, said  # another process was quicker: once more
    raise AssertionError("no port stays free")
