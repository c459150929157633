"""A model behind HTTP is asked for log-probs by token ids, and what it answers is checked."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from cli_references import prompt_of
from loopback import answering

from r1_cli.build.endpoint import open_endpoint
from r1_cli.build.rewards.served_model import ServedReading
from r1_rewards.services.endpoint import Patience
from r1_rewards.types import RewardSpecError

READY = Patience(timeout=5.0, deadline=5.0, tries=1)


def as_vllm(body: dict[str, Any]) -> dict[str, Any]:
    """What vLLM answers: a log-prob of minus its number for every token but the first."""
    tokens = body.get("prompt") or body["token_ids"]
    listed = [None, *({str(token): {"logprob": -float(token), "rank": 1}} for token in tokens[1:])]
    return {"choices": [{"text": "", "prompt_logprobs": listed}]}


def as_echo(body: dict[str, Any]) -> dict[str, Any]:
    """What OpenAI's older servers answer, with the token that they have sampled."""
    logprobs = [None, *(-float(token) for token in body["prompt"][1:]), -0.5]
    return {"choices": [{"text": "", "logprobs": {"token_logprobs": logprobs}}]}


@pytest.mark.parametrize("answer", [as_vllm, as_echo])
def test_a_server_is_asked_by_numbers_with_its_token_and_read_from_the_start_on(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    seen: list[tuple[dict[str, Any], str, str]] = []

    def respond(body: bytes, path: str, headers: Any) -> tuple[int, Any]:
        seen.append((json.loads(body), path, headers["authorization"]))
        return 200, answer(seen[-1][0])

    with answering(respond) as url:
        reading = ServedReading(f"{url}/v1", served_name="tiny", token_env="MY_TOKEN", patience=READY)
        rows = reading.read_logprobs([prompt_of(), prompt_of()], [[7, 8, 9], [5, 6]], [1, 0])
    assert rows == [[-8.0, -9.0], [-5.0, -6.0]]
    assert {path for _, path, _ in seen} == {"/v1/completions"}
    assert {token for _, _, token in seen} == {"Bearer secret"}
    bodies = sorted((body for body, _, _ in seen), key=lambda body: len(body["prompt"]))
    assert [body["prompt"] for body in bodies] == [[1, 2, 5, 6], [1, 2, 7, 8, 9]]
    assert {body["model"] for body in bodies} == {"tiny"}


def test_pictures_go_to_vllm_itself_with_one_placeholder_each() -> None:
    from PIL import Image

    seen: list[tuple[dict[str, Any], str]] = []

    def respond(body: bytes, path: str, headers: Any) -> tuple[int, Any]:
        seen.append((json.loads(body), path))
        listed: list[Any] = [None] * 5 + [{"8": {"logprob": -1.5}}]
        return 200, {"choices": [{}], "prompt_logprobs": listed}

    picture = replace(
        prompt_of(), token_ids=[3, 3, 3, 3, 1], position_ids=torch.arange(5)[None], engine_token_ids=[3, 1],
        images=(Image.new("RGB", (4, 4)),), model_inputs={"pixel_values": torch.zeros(1)},
    )  # fmt: skip
    with answering(respond) as url:
        assert ServedReading(url, patience=READY).read_logprobs([picture], [[8]], [0]) == [[-1.5]]
    ((body, path),) = seen
    assert path == "/inference/v1/generate"
    assert body["token_ids"] == [3, 1, 8]
    assert body["content_parts"][0]["url"].startswith("data:image/png;base64,")


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": []},
        {"choices": [{"text": "a"}]},
        {"choices": [{"prompt_logprobs": [None, {"2": {"logprob": -1}}]}]},
        {"choices": [{"prompt_logprobs": [None, {"2": -1.0}, {"77": {"logprob": -1}}]}]},
        {"choices": [{"logprobs": {"token_logprobs": [None, -1.0, "x"]}}]},
    ],
)
def test_a_server_that_makes_no_sense_leaves_the_row_empty_and_says_so_once(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with answering(lambda body, path, headers: (200, answer)) as url:
        reading = ServedReading(url, patience=READY)
        assert reading.read_logprobs([prompt_of()] * 2, [[9]] * 2, [0, 0]) == [[], []]
    assert len([record for record in caplog.records if "no log-probs" in record.message]) == 1


def test_a_token_never_crosses_a_network_in_the_clear_and_servers_know_one_temperature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    with pytest.raises(RewardSpecError, match="unencrypted"):
        ServedReading("http://10.0.0.7:8000", token_env="MY_TOKEN")
    ServedReading("https://models.example/v1", token_env="MY_TOKEN")
    with pytest.raises(ValueError, match="temperature 1"):
        ServedReading("http://localhost:1").read_logprobs([], [], [], 0.6)


def test_r1_sample_sends_no_key_over_the_network_unencrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_KEY", "secret")
    with pytest.raises(RewardSpecError, match=r"http://10\.0\.0\.7.*OWN_KEY.*unencrypted"):
        open_endpoint("http://127.0.0.1:8000/v1,http://10.0.0.7:8000/v1", "OWN_KEY", 1, 1.0)
    open_endpoint("http://127.0.0.1:8000/v1,https://10.0.0.7/v1", "OWN_KEY", 1, 1.0)
