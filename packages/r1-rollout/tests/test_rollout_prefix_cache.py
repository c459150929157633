"""Keys and values between turns: a later turn computes what is new, with the log-probs of a plain forward."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from embedded_cases import HandPrompt, engine_for, mixed_prompts, picture_prompt, plain_logprobs, text_prompt
from rollout_models import TEXT, sharpen
from transformers import AutoModelForCausalLM, Llama4TextConfig, Qwen2Config

from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.embedded.prefill import ContinuedCache
from r1_rollout.embedded.prefix_cache import Prefix, PrefixCache
from r1_rollout.types import Completion, GenerationSession, SamplingParams
from r1_rollout.weights import LocalWeights

PARAMS = SamplingParams(max_tokens=6, seed=5, ignore_eos=True)


def loaded(model: Any, **options: Any) -> EmbeddedEngine:
    engine = engine_for(model, max_sequences=8, **options)
    engine.load_weights(LocalWeights(model.state_dict().items(), 1))
    return engine


def next_turn(prompt: HandPrompt, tokens: list[int], piece: HandPrompt, id: str) -> HandPrompt:
    """Append a turn and an answer, whose positions are counted from 0."""
    first = prompt.position_ids.max(dim=1, keepdim=True).values
    if len(first) > 1:
        first[1:] = first[1:].max()
    turn = first + 1 + torch.arange(len(tokens))[None]
    behind = turn[:, -1:] + 1 + piece.position_ids
    parts = (prompt.model_inputs, piece.model_inputs)
    names = {name for part in parts for name in part}
    return HandPrompt(
        id,
        [*prompt.token_ids, *tokens, *piece.token_ids],
        torch.cat([prompt.position_ids, turn, behind], dim=1),
        {name: torch.cat([part[name] for part in parts if name in part]) for name in names},
    )


def prefilled(session: GenerationSession) -> int:
    count: int = session._steps.prefilled  # type: ignore[attr-defined]
    return count


def play(model: Any, engine: EmbeddedEngine, turns: int = 3) -> tuple[dict[str, Completion], int, int]:
    """Play episodes whose tools answer by text, and by a picture if the model sees; check each turn's log-probs.

    Returns the turns, the tokens of all finished episodes, and the tokens that were prefilled.
    """
    sees = hasattr(model.model, "get_rope_index")
    prompts = {f"{index}": prompt for index, prompt in enumerate(mixed_prompts(model))}
    session, found = engine.open_session(PARAMS), dict[str, Completion]()
    for index, (key, prompt) in enumerate(prompts.items()):
        session.submit(f"{key}/0", prompt, max_tokens=1 + index)
    while finished := session.poll():
        for key, (completion,) in finished:
            row, turn = key.split("/")
            found[key], tokens = completion, completion.token_ids.tolist()
            expected = plain_logprobs(model, prompts[row], tokens, 1.0)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=3e-6, rtol=3e-6)
            number = int(turn) + 1
            length = 1 + 5 * int(row)
            piece = text_prompt("", length, seed=number)
            if sees:
                grids = [(1, 4, 4)] if int(row) % 2 == number % 2 else []
                piece = picture_prompt(model, "", length, grids)
            prompts[row] = next_turn(prompts[row], tokens, piece, f"{row}/{number}")
            if number < turns:
                session.submit(f"{row}/{number}", prompts[row], max_tokens=1 + number)
    return found, sum(len(prompt.token_ids) for prompt in prompts.values()), prefilled(session)


@pytest.fixture(scope="module")
def windowed_model() -> Any:
    """A model whose second layer sees seven tokens."""
    torch.manual_seed(0)
    config = Qwen2Config(**TEXT, use_sliding_window=True, sliding_window=7, max_window_layers=1)
    return sharpen(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


@pytest.fixture(scope="module")
def chunked_model() -> Any:
    """A model whose first layer sees chunks of seven tokens, and whose second scales queries by their places."""
    torch.manual_seed(0)
    config = Llama4TextConfig(
        **TEXT, head_dim=12, attention_chunk_size=7, layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0], floor_scale=5, attn_scale=0.5, moe_layers=[], intermediate_size_mlp=64,
    )  # fmt: skip
    return sharpen(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


@pytest.mark.parametrize("kind", ["text_model", "vision_model", "windowed_model", "chunked_model"])
def test_a_later_turn_computes_what_is_new_and_gets_the_logprobs_of_a_plain_forward(
    kind: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    kept, tokens, computed = play(model, loaded(model))
    again, _, of_all = play(model, loaded(model, prefix_cache_bytes=0))
    assert computed <= tokens < of_all
    assert {key: one.token_ids.tolist() for key, one in kept.items()} == {
        key: one.token_ids.tolist() for key, one in again.items()
    }


def test_requests_that_share_one_prompt_and_enter_together_compute_it_once(text_model: Any) -> None:
    prompt, other = text_prompt("p/0", 20), text_prompt("q", 20, seed=3)
    later = replace(prompt, id="p/1")
    found: dict[str, list[Completion]] = {}
    for requests in ((prompt, other, later), (later,)):
        session = loaded(text_model).open_session(PARAMS)
        for one in requests:
            session.submit(one.id, one, max_tokens=4)
        while finished := session.poll():
            for key, (completion,) in finished:
                found.setdefault(key, []).append(completion)
        assert prefilled(session) == 20 * min(len(requests), 2)
    together, alone = found["p/1"]
    assert together.token_ids.tolist() == alone.token_ids.tolist() != found["p/0"][0].token_ids.tolist()
    expected = plain_logprobs(text_model, other, found["q"][0].token_ids.tolist(), 1.0)
    torch.testing.assert_close(torch.tensor(found["q"][0].logprobs), expected, atol=3e-6, rtol=3e-6)


def test_two_sessions_with_the_same_requests_give_the_same_bits(text_model: Any) -> None:
    engine = loaded(text_model)
    assert play(text_model, engine) == play(text_model, engine)


def test_samples_of_one_prompt_are_kept_apart(text_model: Any) -> None:
    session = loaded(text_model).open_session(PARAMS)
    prompt, piece = text_prompt("p", 20), text_prompt("", 3)
    session.submit("p", prompt, n=4, max_tokens=3)
    ((_, group),) = session.poll()
    later = [next_turn(prompt, one.token_ids.tolist(), piece, f"p/{number}") for number, one in enumerate(group)]
    before = prefilled(session)
    for one in later:
        session.submit(one.id, one, max_tokens=5)
    found: dict[str, list[Completion]] = {}
    while finished := session.poll():
        found.update(finished)
    assert prefilled(session) - before == 4 * (1 + 3)
    for one in later:
        (completion,) = found[one.id]
        expected = plain_logprobs(text_model, one, completion.token_ids.tolist(), 1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("change", ["nothing", "token", "picture", "grid", "position"])
def test_only_the_same_tokens_positions_and_pictures_go_on_from_a_sample(vision_model: Any, change: str) -> None:
    session = loaded(vision_model).open_session(PARAMS)
    prompt = picture_prompt(vision_model, "p", 8, [(1, 8, 4)])
    session.submit("p", prompt, max_tokens=3)
    ((_, (completion,)),) = session.poll()
    tokens, before = completion.token_ids.tolist(), prefilled(session)
    other = {
        "nothing": prompt,
        "token": replace(prompt, token_ids=[*prompt.token_ids[:-1], (prompt.token_ids[-1] + 1) % 50]),
        "picture": replace(
            prompt, model_inputs={**prompt.model_inputs, "pixel_values": prompt.model_inputs["pixel_values"] + 1}
        ),
        "grid": picture_prompt(vision_model, "p", 8, [(1, 4, 8)]),
        "position": replace(prompt, position_ids=prompt.position_ids + 1),
    }[change]
    later = next_turn(other, tokens, picture_prompt(vision_model, "", 2, []), "p/1")
    session.submit("p/1", later, max_tokens=4)
    ((_, (completion,)),) = session.poll()
    assert prefilled(session) - before == (1 + 5 if change == "nothing" else len(later.token_ids))
    if change != "position":
        expected = plain_logprobs(vision_model, later, completion.token_ids.tolist(), 1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=3e-6, rtol=3e-6)


def prefix(length: int, token: int) -> Prefix:
    tokens = (token,) * length
    return Prefix(tokens, torch.arange(length - 1)[None], {}, torch.zeros(2, 2, 1, length - 1, 4))


def test_the_oldest_sample_leaves_when_the_bound_is_reached_and_the_longest_is_found() -> None:
    size = prefix(33, 0).size
    cache = PrefixCache(3 * size)
    for token in range(4):
        cache.add(prefix(33, token))
    assert len(cache) == 3

    def take(tokens: tuple[int, ...]) -> Prefix | None:
        positions = torch.arange(len(tokens))[None]
        return cache.take(HandPrompt("p", list(tokens), positions), positions, {})

    assert take((0,) * 40) is None
    cache.add(prefix(5, 3))
    assert take((3,) * 4) is None
    longest = take((3,) * 33)
    assert longest is not None
    assert longest.length == 32
    shorter = take((3,) * 33)
    assert shorter is not None
    assert shorter.length == 4
    assert take((3,) * 33) is None
    cache.add(prefix(200, 5))
    assert len(cache) == 0, "it is larger than the bound"


def test_the_bound_of_a_session_is_kept_and_its_memory_is_freed_at_its_end(text_model: Any) -> None:
    engine = loaded(text_model, prefix_cache_bytes=1)
    _, tokens, computed = play(text_model, engine)
    assert computed > tokens, "nothing fits"
    engine = loaded(text_model)
    session = engine.open_session(PARAMS)
    session.submit("p", text_prompt("p", 5), max_tokens=2)
    session.poll()
    (kept,) = (weakref.ref(one) for one in gc.get_objects() if type(one) is PrefixCache and len(one))
    session.close()
    gc.collect()
    assert kept() is None


def test_a_model_that_does_not_go_on_from_kept_keys_computes_all_again(
    text_model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    update = ContinuedCache.update

    def forgets(self: ContinuedCache, *args: Any) -> Any:
        keys, values = update(self, *args)
        return keys.roll(1, dims=2), values

    monkeypatch.setattr(ContinuedCache, "update", forgets)
    engine = loaded(text_model)
    _, tokens, computed = play(text_model, engine)
    assert computed > tokens
    assert "computes each turn's history again" in caplog.text
