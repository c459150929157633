"""What servers are asked, and which answers are believed: pictures without loss, stop strings, and no surprises."""

import base64
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from r1_rollout.sampling import sample_seed
from r1_rollout.types import SamplingParams
from r1_rollout.vllm.client import ServerFault
from r1_rollout.vllm.servers.protocol import generate_body, picture_ids, read_group, read_replay, replay_body


def prompt(**fields: Any) -> Any:
    values = {"id": "row 1", "token_ids": [5, 60, 60, 7], "engine_token_ids": [5, 60, 7], "model_inputs": {}}
    return SimpleNamespace(**values | fields)


def event(tokens: list[int], reason: str | None, **fields: Any) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": -0.5} for token in tokens]
    choice = {"index": 0, "token_ids": tokens, "logprobs": {"content": content}, "finish_reason": reason}
    return {"choices": [choice | {"weight_versions": [{"version": "7-a", "start": 0, "end": 9}]} | fields]}


def read(*events: dict[str, Any], params: SamplingParams) -> Any:
    events[0]["prompt_token_ids"] = [5, 60, 60, 7]
    return read_group(events, prompt(), params, end_token_ids={2}, banned={60}, label="7-a", version=7)[0]


def test_pictures_go_without_loss_and_the_prompt_with_one_placeholder_each() -> None:
    picture = Image.frombytes("RGB", (28, 14), bytes(range(256))[:196] * 6)
    body = generate_body(
        prompt(images=(picture,), model_inputs={"pixel_values": torch.ones(2)}), SamplingParams(max_tokens=4), {2}
    )
    assert body["token_ids"] == [5, 60, 7]
    kind, _, data = body["content_parts"][0]["url"].partition(",")
    assert kind == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).tobytes() == picture.tobytes()
    (name,) = picture_ids(prompt(images=(picture,)))
    again = generate_body(prompt(images=(picture.copy(), picture)), SamplingParams(max_tokens=4), {2}, {name})
    assert again["content_parts"] == [{"type": "image_url", "uuid": name}] * 2
    palette, grey = picture.convert("P"), picture.convert("L")
    other = palette.copy()
    other.putpalette([0] * 768)
    assert len({name, *picture_ids(prompt(images=(palette, grey, other, picture.rotate(90, expand=True))))}) == 5
    assert replay_body(prompt(images=(picture,)), [7], 1.0)["content_parts"] == body["content_parts"]


def test_what_cannot_be_sent_is_refused() -> None:
    params = SamplingParams(max_tokens=4)
    with pytest.raises(ValueError, match=r"row 1 has a video.*let one engine sample"):
        generate_body(prompt(videos=(torch.ones(2),)), params, {2})
    with pytest.raises(ValueError, match="row 1 has pixel_values but no images"):
        generate_body(prompt(model_inputs={"pixel_values": torch.ones(2)}), params, {2})


def test_the_ends_of_an_answer_are_those_of_the_call() -> None:
    def ends(**settings: Any) -> Any:
        return generate_body(prompt(), SamplingParams(max_tokens=4, **settings), {2})["sampling_params"][
            "stop_token_ids"
        ]

    assert ends() == [2]
    assert ends(stop_token_ids=(9,)) == [2, 9]
    assert ends(ignore_eos=True, stop_token_ids=(9,)) == [9]


def test_answers_end_by_a_token_a_string_or_their_length_and_by_nothing_else() -> None:
    plain, stop = SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, stop=("end",))
    assert read(event([7], None), event([8, 2], "stop"), params=plain).token_ids.tolist() == [7, 8, 2]
    assert read(event([7, 8, 9], "length"), params=plain).finish_reason == "length"
    assert read(event([7, 8], "stop", stop_reason="end"), params=stop).finish_reason == "stop"
    refused = [
        ([event([7, 8], "stop")], plain, "ended by 'stop' after 2 of 3 tokens"),
        ([event([7, 8], "stop", stop_reason="end")], plain, "ended by 'stop' after 2 of 3"),
        ([event([7, 8], "length")], plain, "max_model_len too small"),
        ([event([7, 8, 9, 9], "length")], plain, "has 4 tokens"),
        ([event([], "stop")], plain, "has 0 tokens"),
        ([event([2, 8, 9], "length")], plain, "goes on after an end token"),
        ([event([60, 8, 9], "length")], plain, r"banned tokens \[60\]"),
        ([event([7, 8, 9], "length"), event([7], None)], plain, "goes on after its end"),
        ([event([7, 8, 9], "length", index=-1)], plain, "goes on after its end"),
        ([event([7, 8, 9], "length", index=1)], plain, "IndexError"),
    ]
    for events, params, message in refused:
        with pytest.raises(ServerFault, match=message):
            read(*events, params=params)


def test_scores_are_of_the_tokens_that_were_given() -> None:
    assert read_replay(event([7, 8], "length"), prompt(), [7, 8], "7-a") == [-0.5, -0.5]
    with pytest.raises(ServerFault, match="without `plain_logprobs`"):
        read_replay(event([7, 9], "length"), prompt(), [7, 8], "7-a")
    with pytest.raises(ServerFault, match="not from 8-b"):
        read_replay(event([7, 8], "length"), prompt(), [7, 8], "8-b")
    with pytest.raises(ServerFault, match="another form"):
        read_replay(None, prompt(), [7, 8], "7-a")


def test_seeds_differ_by_run_and_prompt_and_leave_room_for_the_samples() -> None:
    seeds = {sample_seed(seed, f"row {i}", sample) for seed in range(20) for i in range(200) for sample in range(8)}
    assert len(seeds) == 32000
    assert all(0 <= seed < 2**63 for seed in seeds)
    body = generate_body(prompt(), SamplingParams(max_tokens=4, n=8, seed=3), {2})
    assert body["sampling_params"]["seed"] + 5 == sample_seed(3, "row 1", 5)  # vLLM adds the sample's number
