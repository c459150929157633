"""The gateway's server over HTTP: who may ask, what is refused, what becomes of turns whose client hangs up."""

import socket
import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest

pytest.importorskip("uvicorn", reason="r1-cli[gateway] is not installed")

import httpx
from patience import eventually

from r1_cli.gateway.messages import ChatReply, GatewayError
from r1_cli.gateway.server import GatewayServer

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
ROUTES = {
    "/chat/completions": HELLO,
    "/messages": {**HELLO, "max_tokens": 5},
    "/responses": {"input": "Hello"},
}


def reply(text, number=0):
    return ChatReply(str(number), text, (), "stop", 3, 1, (5,), (-0.5,))


class Policy:
    """Answers at once, unless `hold`: then with what `finish` is called with."""

    def __init__(self):
        self.asked, self.held, self.hold, self.error, self.rewards = [], [], False, None, []

    def reward(self, *given):
        self.rewards.append(given)

    def __call__(self, session, request):
        if self.error:
            raise self.error
        future = Future()
        self.asked.append((session, request))
        if self.hold:
            self.held.append(future)
        else:
            future.set_result(reply(f"{session} {len(self.asked)}", len(self.asked)))
        return future


@pytest.fixture(scope="module")
def running():
    policy = Policy()
    server = GatewayServer(policy, reward=lambda *given: policy.reward(*given), max_body_bytes=100_000)
    yield server, policy
    server.close()


@pytest.fixture
def policy(running):
    running[1].__init__()
    return running[1]


@pytest.fixture
def server(running, policy):
    yield running[0]
    for session in list(running[0]._sessions.values()):
        running[0].close_session(session.id)


@pytest.fixture(scope="module")
def client():
    with httpx.Client(timeout=30) as client:
        yield client


def post(client, address, path="/chat/completions", body=HELLO, *, key=None, url=None, **headers):
    headers = {"authorization": f"Bearer {address.api_key if key is None else key}", **headers}
    return client.post((url or address.base_url) + path, json=body, headers=headers)


@pytest.mark.parametrize("path", ROUTES)
def test_a_session_answers_only_to_its_own_key(client, server, policy, path):
    first, second = server.open("a"), server.open("b")
    assert first.api_key != second.api_key
    assert len(first.api_key) >= 43  # 32 bytes
    for key in ("x", "wrong", first.api_key[:-1], first.api_key + "x", second.api_key):
        refused = post(client, first, path, ROUTES[path], key=key)
        assert refused.status_code == 401
        assert "the API key is not this session's" in refused.json()["error"]["message"]
    assert post(client, first, path, ROUTES[path]).status_code == 200
    assert post(client, first, path, ROUTES[path], key="none", **{"x-api-key": first.api_key}).status_code == 200
    assert [session for session, _ in policy.asked] == ["a", "a"]


def test_an_unknown_session_and_a_closed_one_are_not_found(client, server, policy):
    address = server.open("a")
    assert post(client, address, url=address.base_url.replace("/a/", "/b/")).status_code == 404
    server.close_session("a")
    refused = post(client, address)
    assert (refused.status_code, refused.headers["x-should-retry"]) == (404, "false")
    assert not policy.asked
    again = server.open("a")
    assert again.api_key != address.api_key
    assert post(client, again, key=address.api_key).status_code == 401


def test_ids_that_are_no_part_of_a_url_have_sessions_of_their_own(client, server, policy):
    addresses = [server.open(name) for name in ("train/5/0", "train/5-0", "../x", "é")]
    assert len({address.base_url for address in addresses}) == 4
    for address in addresses:
        assert post(client, address).status_code == 200
    assert [session for session, _ in policy.asked] == ["train/5/0", "train/5-0", "../x", "é"]
    with pytest.raises(ValueError, match="'é' is open"):
        server.open("é")


@pytest.mark.parametrize("path", ROUTES)
def test_a_body_that_is_too_large_or_no_json_is_refused(client, server, path):
    address = server.open("a")
    headers = {"authorization": f"Bearer {address.api_key}"}
    large = client.post(address.base_url + path, content=b" " * 100_001, headers=headers)
    assert (large.status_code, large.json()["error"]["message"]) == (413, "the request has more than 100000 bytes")
    broken = client.post(address.base_url + path, content=b"{", headers=headers)
    assert (broken.status_code, broken.headers["x-should-retry"]) == (400, "false")
    assert ("type" in broken.json()) is (path == "/messages")  # of the protocol


def test_errors_of_the_policy_have_their_status_and_unknown_ones_tell_nothing(client, server, policy, caplog):
    address = server.open("a")
    policy.error = GatewayError(409, "the conversation is too long", "messages")
    refused = post(client, address)
    assert (refused.status_code, refused.headers["x-should-retry"]) == (409, "false")
    assert refused.json()["error"]["param"] == "messages"
    policy.error = GatewayError(503, "wait")
    assert post(client, address).headers["x-should-retry"] == "true"
    policy.error = RuntimeError("/home/secret")
    failed = post(client, address)
    assert (failed.status_code, failed.json()["error"]["message"]) == (500, "the gateway failed: RuntimeError")
    assert "/home/secret" in caplog.text


def test_a_cancelled_turn_says_that_the_session_has_ended(client, server, policy):
    policy.hold, address = True, server.open("a")
    threading.Thread(target=lambda: (eventually(lambda: policy.held), policy.held[0].cancel()), daemon=True).start()
    refused = post(client, address)
    assert (refused.status_code, refused.json()["error"]["message"]) == (404, "the session is closed")


def test_sampling_keys_are_replaced_and_said_once(client, server, caplog):
    address = server.open("a")
    body = {**HELLO, "temperature": 0.1, "seed": 5}
    for _ in range(2):
        assert post(client, address, body=body).headers["x-r1-ignored"] == "temperature, seed"
    assert "x-r1-ignored" not in post(client, address).headers
    assert post(client, address, body={**HELLO, "seed": 5, "top_p": 0.5}).headers["x-r1-ignored"] == "top_p, seed"
    said = [record.getMessage() for record in caplog.records if record.name == "r1"]
    assert len(said) == 2
    assert "temperature, seed" in said[0]
    assert "sets top_p;" in said[1]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_is_sampled_to_its_end_when_its_client_hangs_up(client, server, policy, path, stream):
    policy.hold, address = True, server.open("a")
    with pytest.raises(httpx.ReadTimeout):
        client.post(
            address.base_url + path,
            json={**ROUTES[path], "stream": stream},
            headers={"authorization": f"Bearer {address.api_key}"},
            timeout=httpx.Timeout(10, read=0.2),
        )
    assert eventually(lambda: policy.held)
    (turn,) = policy.held
    policy.hold = False
    assert post(client, address, path, ROUTES[path]).status_code == 200  # the server has seen that the other is gone
    assert not turn.cancelled()
    turn.set_result(reply("kept"))
    assert post(client, address, path, ROUTES[path]).status_code == 200


def test_streams_are_events(client, server):
    address = server.open("a")
    answer = post(client, address, body={**HELLO, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")


def test_many_sessions_are_answered_while_one_waits(client, server, policy):
    addresses = [server.open(str(index)) for index in range(8)]
    policy.hold = True
    slow = threading.Thread(target=post, args=(client, addresses[0]), daemon=True)
    slow.start()
    assert eventually(lambda: policy.held)
    policy.hold = False
    answers = [post(client, address).json()["choices"][0]["message"]["content"] for address in addresses[1:]]
    assert [answer.split()[0] for answer in answers] == [str(index) for index in range(1, 8)]
    policy.held[0].set_result(reply("late"))
    slow.join(30)
    assert not slow.is_alive()


def test_models_are_listed_for_clients_that_ask(client, server):
    address = server.open("a")
    headers = {"authorization": f"Bearer {address.api_key}"}
    assert client.get(f"{address.base_url}/models", headers=headers).json()["data"][0]["id"] == "policy"
    assert client.get(f"{address.base_url}/models").status_code == 401


def test_what_is_not_served_is_named_with_what_is(client, server):
    address = server.open("a")
    missing = post(client, address, "/embeddings", {})
    assert missing.status_code == 404
    assert (
        "/v1/chat/completions, /v1/responses, /v1/messages, /v1/models, /reward" in missing.json()["error"]["message"]
    )


def test_rewards_reach_the_run(client, server, policy):
    address = server.open("train/5")
    assert post(client, address, "", {"reward": 0.5}, url=address.reward_url).status_code == 200
    assert post(client, address, "", {"reward": 1}, url=address.reward_url).status_code == 200
    assert policy.rewards == [("train/5", 0.5), ("train/5", 1.0)]
    for wrong in ({"reward": "1"}, {"reward": True}, {}, {"reward": None}):
        refused = post(client, address, "", wrong, url=address.reward_url)
        assert refused.status_code == 400
        assert "reward must be a finite number" in refused.json()["error"]["message"]
    assert post(client, address, "", {"reward": 1}, url=address.reward_url, key="no").status_code == 401
    assert len(policy.rewards) == 2


def test_replies_are_sent_without_waiting_for_acknowledgements(server):
    assert server._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_server_listens_on_loopback_and_ends_with_waiting_requests(client, policy):
    server = GatewayServer(policy)
    policy.hold, address = True, server.open("a")
    host, port = server.url.removeprefix("http://").split(":")
    assert host == "127.0.0.1"
    answers = []

    def ask():
        try:
            answers.append(post(client, address).status_code)
        except httpx.HTTPError as error:
            answers.append(type(error).__name__)

    waiting = threading.Thread(target=ask, daemon=True)
    waiting.start()
    assert eventually(lambda: policy.held)
    server.close()
    waiting.join(30)
    assert len(answers) == 1
    policy.held[0].set_result(reply("nobody waits"))
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, int(port)), timeout=5)


def test_a_missing_package_is_named_with_the_line_that_installs_it():
    code = (
        "import sys; sys.modules['uvicorn'] = None\n"
        "from r1_cli.gateway.server import GatewayServer\n"
        "try:\n    GatewayServer(lambda *_: None)\n"
        "except ModuleNotFoundError as error:\n    print(error)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout == "agents need uvicorn: pip install 'r1-cli[gateway]'\n"
