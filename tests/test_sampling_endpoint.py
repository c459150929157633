"""`r1 sample` asks an OpenAI-compatible server: one that is busy, one that fails, and one that is dead."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from endtoend import QUICKSTART, R1

from r1_rewards.services.endpoint import Patience


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("r1_cli.build.endpoint.Patience", partial(Patience, backoff=0.01))


Answer = Callable[[dict[str, Any], int], tuple[int, object]]  # (request, its number) -> status and reply
WORDS = [
    QUICKSTART, "data.filter_overlong_prompts_workers=1", "data.train_files=examples/quickstart/train.parquet[:4]",
    "--n", "2", "--served-name", "teacher", "--timeout", "20", "--concurrency", "4",
]  # fmt: skip


@contextmanager
def served(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the address of a server, and the requests that it has had."""
    requests: list[dict[str, Any]] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                requests.append({**body, "path": self.path, "key": self.headers.get("authorization")})
                status, reply = answer(body, len(requests))
            content = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            if status == 429:
                self.send_header("retry-after", "0")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        server.shutdown()
        server.server_close()


def reply(text: str, finish: str = "stop", **more: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text, **more}, "finish_reason": finish}]}


def rows(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(next((folder / "samples").iterdir())).to_pylist()
    return found


def test_answers_of_a_busy_server_are_recorded_as_it_sent_them(
    r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    texts = [" <think>é 漢</think>\\boxed{2}", "a\nb", ""]

    def answer(body: dict[str, Any], number: int) -> tuple[int, object]:
        if number in (2, 5):
            return (429, {}) if number == 2 else (503, {})
        if number == 7:
            return 200, {"choices": []}  # unusable
        return 200, reply(texts[body["seed"] % 3], "length" if body["seed"] % 2 else "stop", reasoning_content="hm")

    with served(answer) as (address, requests):
        r1("sample", address, *WORDS, "--output", tmp_path)
    table = rows(tmp_path)
    assert len(table) == 8
    assert {one["answer"] for one in table} <= {f"<think>\nhm\n</think>\n\n{text}" for text in texts}
    sent = {one["seed"]: one for one in requests}
    assert len(sent) == 8  # each answer has its own seed, and a repeated request the same
    assert len(requests) == 11
    asked = requests[0]
    assert (asked["path"], asked["model"], asked["key"]) == ("/v1/chat/completions", "teacher", "Bearer secret")
    assert (asked["temperature"], asked["max_tokens"]) == (1.0, 20)
    picture, question = asked["messages"][0]["content"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert question["type"] == "text"
    assert {one["finish_reason"] for one in table} == {"length" if s % 2 else "stop" for s in sent}
    assert "secret" not in (tmp_path / "manifest.json").read_text()


def test_groups_that_a_server_fails_stay_undone_and_the_same_command_fills_them(r1: R1, tmp_path: Path) -> None:
    refused = set[int]()

    def refuse_some(body: dict[str, Any], number: int) -> tuple[int, object]:
        if number == 3:
            refused.add(body["seed"])
        return (400, {"error": "content policy"}) if body["seed"] in refused else (200, reply(str(body["seed"])))

    with served(refuse_some) as (address, _):
        ended = r1("sample", address, *WORDS, "--output", tmp_path, ok=False)
    assert ended.exit_code == 2
    assert "1 of 4 prompts got no answers" in ended.output.replace("\n", " ")
    assert "1 groups are not done: run the same command again" in ended.stderr
    before = rows(tmp_path)
    assert len(before) == 6
    with served(lambda body, number: (200, reply(str(body["seed"])))) as (address, requests):
        r1("sample", address, *WORDS, "--output", tmp_path)
    assert len(requests) == 2
    assert len(rows(tmp_path)) == 8
    assert [one for one in rows(tmp_path) if one["key"] in {b["key"] for b in before}] != []
    left = {one["prompt_id"] for one in rows(tmp_path)} - {one["prompt_id"] for one in before}
    assert len(left) == 1


def test_a_dead_server_ends_the_command_and_loses_nothing(r1: R1, tmp_path: Path) -> None:
    with served(lambda body, number: (200, {})) as (address, _):
        pass
    ended = r1("sample", address, *WORDS, "--output", tmp_path, ok=False)
    assert ended.exit_code == 2
    assert "4 of 4 prompts got no answers" in ended.stderr
    assert not (tmp_path / "samples").exists()
    ended = r1("sample", "http://127.0.0.1:9/v1", QUICKSTART, "--output", tmp_path, ok=False)
    assert "--served-name is missing" in ended.stderr
