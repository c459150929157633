"""Environments over OpenEnv's WebSocket, against a stand-in for its server."""

import base64
import contextlib
import io
import json
import threading

import PIL.Image
import pytest
from environment_files import answer, open_pool, opened, say
from patience import eventually

from r1_rewards.types import Failure, Score

serve = pytest.importorskip("websockets.sync.server").serve


class Counter:
    """A session as OpenEnv's servers have it: counts up to a goal."""

    def __init__(self):
        self.count = 0

    def answer(self, message):
        kind, data = message["type"], message.get("data")
        if kind == "reset":
            self.count = data.get("seed", 0)
        elif kind == "step" and set(data) != {"message"}:
            return {"type": "error", "data": {"message": "field required: message", "code": "VALIDATION_ERROR"}}
        elif kind == "step" and data["message"] == "garbage":
            return ["garbage"]
        elif kind == "step":
            self.count += len(data["message"])
        observation = {"text": f"count {self.count}", "metadata": {}}
        if kind == "step" and data["message"] == "picture":
            buffer = io.BytesIO()
            PIL.Image.new("RGB", (4, 4)).save(buffer, "PNG")
            observation["image"] = base64.b64encode(buffer.getvalue()).decode()
        reward = None if kind == "reset" else 0.5
        return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": self.count >= 10}}


@contextlib.contextmanager
def serving(closed):
    def session(connection):
        assert connection.request.path == "/ws"
        counter = Counter()
        for text in connection:
            message = json.loads(text)
            if message["type"] == "close":
                closed.append(counter.count)
                return
            connection.send(json.dumps(counter.answer(message)))

    with serve(session, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"openenv+ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()


def test_episodes_are_sessions_of_the_server():
    closed = []
    with serving(closed) as url:
        with open_pool(environment=url, environment_kwargs={"observation": "text"}, workers=2) as pool:
            assert opened(pool, {"seed": 3}, key="a").messages[0]["content"] == "count 3"
            assert opened(pool, {"other": 3}, key="b").messages[0]["content"] == "count 0"
            assert say(pool, "xx", "a").messages[0]["content"] == "count 5"
            assert say(pool, "x", "b").messages[0]["content"] == "count 1"
            result = say(pool, "xxxxx", "a")
            assert (result.done, result.reward) == (True, 0.0)
            pool.finish("a")
            score = answer(pool, "a")
            assert isinstance(score, Score)
            assert score.value == 1.0
            failure = say(pool, "garbage", "b")
            assert isinstance(failure, Failure)
            assert "no message of OpenEnv" in failure.message
            assert eventually(lambda: 10 in closed)  # a pool that is closed does not wait for it
        with open_pool(environment=url, environment_kwargs={"turn_rewards": True}) as pool:
            opened(pool)
            result = say(pool, "picture")
            assert result.reward == 0.5
            picture, text = result.messages[0]["content"]
            assert PIL.Image.open(io.BytesIO(picture["image"])).size == (4, 4)
            assert text == {"type": "text", "text": '{"text": "count 7"}'}
        with open_pool(environment=url, environment_kwargs={"action": ""}) as pool:
            opened(pool)
            assert say(pool, '{"message": "xxxx"}').messages[0]["content"] == '{"text": "count 4"}'
            failure = say(pool, '{"code": "x"}')
            assert "OpenEnv (VALIDATION_ERROR): field required: message" in failure.message


def test_a_server_that_is_not_there_is_a_failure():
    with open_pool(environment="openenv+ws://127.0.0.1:9") as pool:
        failure = opened(pool)
        assert failure.cause == "exception"
        assert "ConnectionRefusedError" in failure.message
