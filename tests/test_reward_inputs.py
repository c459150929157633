"""The inputs of a reward in a real step (images, messages, the step, columns), and rewards over HTTP."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from endtoend import QUICKSTART, R1, SMALL, read_log

STEPS = [*SMALL, "trainer.max_steps=2", "trainer.val_before_train=false", "trainer.val_freq=-1", "trainer.save_freq=-1"]
CURIOUS = """
def compute_score(reward_inputs, images, messages, response_lengths, step):
    assert messages[0][-1]["role"] == "user" and response_lengths[0] == reward_inputs[0]["response_length"]
    return [{"overall": 0.5, "step": step, "width": pictures[0].width} for pictures in images]
"""


def train(r1: R1, folder: Path, *overrides: str, ok: bool = True):  # type: ignore[no-untyped-def]
    return r1("train", QUICKSTART, *STEPS, f"trainer.save_checkpoint_path={folder}", *overrides, ok=ok)


def test_a_reward_function_sees_the_pictures_the_messages_and_the_step(r1: R1, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(CURIOUS)
    train(r1, tmp_path / "run", f"worker.reward.reward_function={tmp_path / 'reward.py'}:compute_score")
    records = read_log(tmp_path / "run")
    assert [record["reward/failures"] for record in records] == [0, 0]
    assert [record["reward/step"] for record in records] == [0, 1]
    assert all(record["reward/width"] > 1 for record in records)


def test_a_column_that_the_data_does_not_have_is_refused_before_the_first_step(r1: R1, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def compute_score(reward_inputs, dificulty): ...\n")
    reward = f"worker.reward.reward_function={tmp_path / 'reward.py'}:compute_score"
    result = train(r1, tmp_path / "run", reward, ok=False)
    assert result.exit_code == 2
    assert "a parameter 'dificulty', which is no column of the data" in result.output


def test_a_reward_server_scores_a_run(r1: R1, tmp_path: Path) -> None:
    pytest.importorskip("httpx", reason='needs "r1-rewards[http]"')
    asked: list[dict[str, list[str]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            answer = json.dumps({"rewards": [0.25] * len(asked[-1]["query"])}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"worker.reward.reward_function=http://127.0.0.1:{server.server_port}/get_reward"
    train(r1, tmp_path / "run", url, "+worker.reward.reward_function_kwargs.batch_size=8", "trainer.max_steps=1")
    server.shutdown()
    [record] = read_log(tmp_path / "run")
    assert record["reward/overall"] == 0.25
    assert [len(request["labels"]) for request in asked] == [8, 8]
    assert all(query.startswith(prompt) for query, prompt in zip(asked[0]["query"], asked[0]["prompts"], strict=True))
