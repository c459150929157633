"""`r1 sample` asks an OpenAI-compatible server: one that is busy, one that fails, and one that is dead."""

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from chat_server import reply, served
from endtoend import QUICKSTART, R1

from r1_rewards.services.endpoint import Patience


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("r1_cli.build.endpoint.Patience", partial(Patience, backoff=0.01))


WORDS = [
    QUICKSTART, "data.filter_overlong_prompts_workers=1", "data.train_files=examples/quickstart/train.parquet[:4]",
    "--n", "2", "--served-name", "teacher", "--timeout", "20", "--concurrency", "4",
]  # fmt: skip


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
    assert len(requests) == 1  # the group's other answer is kept
    assert not list(tmp_path.glob("replies*"))
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
