"""Sessions of the embedded engine: whatever comes and goes meanwhile, a request gets the tokens of `generate`."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from embedded_cases import HandPrompt, copy_of, engine_for, forward_logits, mixed_prompts, text_prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replays import Replaying, stand_in
from test_rollout_stopping import Letters

from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.errors import NonFiniteLogits, PromptError
from r1_rollout.types import Completion, Interactive, SamplingParams
from r1_rollout.weights import LocalWeights

PARAMS = SamplingParams(max_tokens=9, seed=5)


@pytest.fixture(params=[False, True], ids=["launched", "graphs"])
def engine(text_model: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EmbeddedEngine:
    """With graphs, rows of ended samples stay for a while; a stand-in replays the steps."""
    stand_in(monkeypatch, Replaying)
    engine = engine_for(text_model, max_sequences=4, tokenizer=Letters())
    engine._graphs = request.param
    engine.load_weights(LocalWeights(text_model.state_dict().items(), 1))
    return engine


def of_generate(engine: EmbeddedEngine, prompt: HandPrompt, **changes: Any) -> list[Completion]:
    ((_, group),) = engine.generate([prompt], replace(PARAMS, **changes))
    return group


def engine_slots(session: Any) -> list[Any]:
    slots: list[Any] = session._steps._slots
    return slots


def same(group: list[Completion], expected: list[Completion]) -> bool:
    """Tokens are equal; log-probs differ by the rounding of batches of other sizes."""
    assert [one.token_ids.tolist() for one in group] == [one.token_ids.tolist() for one in expected]
    for one, other in zip(group, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=2e-5, rtol=2e-5)
    return [one.finish_reason for one in group] == [one.finish_reason for one in expected]


REQUESTS = st.tuples(
    st.just("submit"),
    st.integers(1, 40),  # tokens of the prompt
    st.integers(1, 4),  # samples
    st.integers(1, 9),  # tokens of an answer
    st.sampled_from([(), ("a",), ("e", "xq")]),
    st.booleans(),  # samples one by one
)
ACTIONS = st.lists(
    REQUESTS | st.tuples(st.just("poll")) | st.tuples(st.just("cancel"), st.integers(0, 20)), max_size=20
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_requests_that_come_and_go_in_any_order_get_the_tokens_of_generate(
    engine: EmbeddedEngine, actions: list[tuple[Any, ...]]
) -> None:
    session = engine.open_session(PARAMS)
    submitted: dict[str, tuple[HandPrompt, dict[str, Any]]] = {}
    done: dict[str, list[Completion]] = {}
    cancelled: set[str] = set()
    split: dict[str, dict[int, Completion]] = {}

    def collect(found: list[tuple[str, list[Completion]]]) -> None:
        for name, group in found:
            key, _, number = name.partition("/")
            assert key not in done.keys() | cancelled
            assert bool(number) == (key in split)
            if number:
                assert int(number) not in split[key]
                (split[key][int(number)],) = group
                if len(split[key]) < submitted[key][1]["n"]:
                    continue
                group = [split[key][number] for number in range(len(split[key]))]
            done[key] = group

    for kind, *values in actions:
        if kind == "submit":
            length, n, max_tokens, stop, one_by_one = values
            key = f"request {len(submitted)}"
            changes = {"n": n, "max_tokens": max_tokens, "stop": stop}
            submitted[key] = text_prompt(f"id of {key}", length), changes
            if one_by_one:
                split[key] = {}
            session.submit(key, submitted[key][0], split=one_by_one, **changes)
        elif kind == "poll":
            collect(session.poll(0))
        elif (key := f"request {len(submitted) - 1 - values[0]}") in submitted and key not in done:
            session.cancel(key)
            cancelled.add(key)
    while found := session.poll():
        collect(found)
    session.close()
    assert done.keys() == submitted.keys() - cancelled
    for key, group in done.items():
        prompt, changes = submitted[key]
        assert same(group, of_generate(engine, prompt, **changes))


def test_a_session_with_the_prompts_of_generate_gives_the_same_bits(engine: EmbeddedEngine, text_model: Any) -> None:
    prompts = mixed_prompts(text_model)
    expected = dict(engine.generate(prompts, replace(PARAMS, n=2)))
    session = engine.open_session(PARAMS)
    for index, prompt in enumerate(prompts):
        session.submit(str(index), prompt, n=2, max_tokens=9)
    found: dict[str, list[Completion]] = {}
    while finished := session.poll():
        found.update(finished)
    assert found == {str(index): group for index, group in expected.items()}


def test_turns_with_pictures_go_on_from_all_that_came_before(vision_model: Any) -> None:
    """A later turn's prompt is all tokens before it, and more; log-probs are those of a plain forward."""
    engine = EmbeddedEngine(copy_of(vision_model), end_token_ids={7}, banned_token_ids=range(60, 64), max_sequences=8)
    engine.load_weights(LocalWeights(vision_model.state_dict().items(), 1))
    session = engine.open_session(PARAMS)
    prompts = mixed_prompts(vision_model)
    for index, prompt in enumerate(prompts):
        session.submit(f"{index}/0", prompt, max_tokens=3)
    turns = 0
    while found := session.poll():
        for key, (completion,) in found:
            row, turn = map(int, key.split("/"))
            prompt, tokens = prompts[row], completion.token_ids.tolist()
            logits = forward_logits(vision_model, prompt, tokens)
            expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=3e-6, rtol=3e-6)
            turns += 1
            if turn < 2:
                more = [*tokens, 5, 6]
                first = prompt.position_ids.max(dim=1, keepdim=True).values
                first[1:] = first[1:].max()
                behind = first + 1 + torch.arange(len(more))[None]
                prompts[row] = replace(
                    prompt,
                    id=f"{row}/0/{turn + 1}",
                    token_ids=[*prompt.token_ids, *more],
                    position_ids=torch.cat([prompt.position_ids, behind], dim=1),
                )
                session.submit(f"{row}/{turn + 1}", prompts[row], max_tokens=3)
    assert turns == 3 * len(prompts)


def test_poll_returns_at_once_if_nothing_is_pending_and_waits_no_longer_than_it_may(engine: EmbeddedEngine) -> None:
    session = engine.open_session(replace(PARAMS, max_tokens=240, ignore_eos=True))
    assert session.poll() == session.poll(5) == []
    session.submit("long", text_prompt("p", 5), max_tokens=240)
    began = time.monotonic()
    assert session.poll(0.01) == []
    assert 0.01 <= time.monotonic() - began < 2
    session.cancel("long")
    assert session.poll() == []


def test_a_cancelled_key_frees_its_rows_and_may_be_used_again(engine: EmbeddedEngine) -> None:
    session = engine.open_session(replace(PARAMS, ignore_eos=True))
    session.submit("a", text_prompt("first", 5), n=4, max_tokens=9)
    session.submit("b", text_prompt("second", 7), n=3, max_tokens=9)
    assert session.poll(0) == []
    with pytest.raises(ValueError, match="a is pending already"):
        session.submit("a", text_prompt("third", 5), max_tokens=2)
    session.cancel("a")
    session.cancel("never seen")
    session.submit("a", text_prompt("third", 5), max_tokens=2)
    ((key, group),) = session.poll()
    assert key == "a"
    assert [one.token_ids.tolist() for one in group] == [
        one.token_ids.tolist() for one in of_generate(engine, text_prompt("third", 5), max_tokens=2, ignore_eos=True)
    ]


@pytest.mark.parametrize("waiting", [["d", "e"], []])
def test_others_go_on_when_running_and_waiting_requests_are_cancelled(
    engine: EmbeddedEngine, waiting: list[str]
) -> None:
    session, counts = engine.open_session(PARAMS), {"a": 1, "b": 1, "c": 2} | dict.fromkeys(waiting, 1)
    prompts = {key: text_prompt(key, 30 - 5 * index) for index, key in enumerate(counts)}
    for key, n in counts.items():
        session.submit(key, prompts[key], n=n, max_tokens=9)
    assert session.poll(0) == session.poll(0) == []
    session.cancel("a")
    session.cancel("d")
    found: dict[str, list[Completion]] = {}
    while finished := session.poll():
        found.update(finished)
    assert found.keys() == {"b", "c", *waiting[1:]}
    assert not engine_slots(session)
    assert all(same(group, of_generate(engine, prompts[key], n=counts[key])) for key, group in found.items())


def test_samples_of_a_split_request_come_when_they_have_finished(engine: EmbeddedEngine) -> None:
    prompt, stop = text_prompt("p", 5), tuple("abcdefghijkl")
    lengths = [len(one.token_ids) for one in of_generate(engine, prompt, n=4, max_tokens=9, stop=stop)]
    assert len({*lengths}) > 1
    session = engine.open_session(PARAMS)
    session.submit("p", prompt, n=4, max_tokens=9, split=True, stop=stop)
    came: list[str] = []
    while finished := session.poll():
        came += [key for key, _ in finished]
        if len(came) < 4:
            with pytest.raises(ValueError, match="p is pending already"):
                session.submit("p", prompt, max_tokens=2)
    assert [lengths[int(key.removeprefix("p/"))] for key in came] == sorted(lengths)
    session.submit("p", prompt, max_tokens=2)


def test_a_key_that_was_returned_may_be_used_again(engine: EmbeddedEngine) -> None:
    session = engine.open_session(PARAMS)
    for _ in range(2):
        session.submit("a", text_prompt("p", 5), max_tokens=2)
        assert [key for key, _ in session.poll()] == ["a"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"n": 5}, ValueError, "n=5 samples a prompt, but max_sequences=4"),
        ({"max_tokens": 10}, ValueError, "max_tokens=10 of a request is over the session's 9"),
        ({"prompt": text_prompt("p", 0)}, PromptError, "prompt p is empty"),
        ({"prompt": HandPrompt("p", [1, 2], torch.zeros(3, 2).long())}, PromptError, "axes like the first"),
    ],
)
def test_a_request_that_is_refused_leaves_the_others_alone(
    engine: EmbeddedEngine, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    session = engine.open_session(PARAMS)
    session.submit("good", text_prompt("q", 3), max_tokens=9)
    with pytest.raises(error, match=message):
        session.submit("bad", **{"prompt": text_prompt("p", 3), "max_tokens": 2} | changes)
    assert [key for key, _ in session.poll()] == ["good"]


def test_stop_strings_of_a_request_need_a_tokenizer(text_model: Any) -> None:
    engine = engine_for(text_model)
    engine.load_weights(LocalWeights(text_model.state_dict().items(), 1))
    with pytest.raises(ValueError, match=r"stop=\('x',\) needs a tokenizer"):
        engine.open_session(PARAMS).submit("a", text_prompt("p", 3), max_tokens=2, stop=("x",))


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("weights", "new weights came"),
        ("block", "its active block ended"),
        ("generate", "a later generate"),
        ("session", "a later session"),
        ("close", "it was closed"),
    ],
)
def test_a_session_that_has_ended_says_why(text_model: Any, ending: str, reason: str) -> None:
    engine = engine_for(text_model)
    weights = LocalWeights(text_model.state_dict().items(), 1)
    with engine.active(weights):
        session = engine.open_session(PARAMS)
        session.submit("a", text_prompt("p", 3), max_tokens=9)
        if ending == "weights":
            engine.load_weights(weights)
        elif ending == "generate":
            list(engine.generate([text_prompt("p", 3)], PARAMS))
        elif ending == "session":
            engine.open_session(PARAMS)
        elif ending == "close":
            session.close()
            session.close()
    for call in (session.poll, lambda: session.submit("b", text_prompt("p", 3), max_tokens=2)):
        with pytest.raises(RuntimeError, match=reason):
            call()
    session.cancel("a")


def test_a_session_ends_the_generate_before_it_and_needs_an_active_engine(text_model: Any) -> None:
    engine = engine_for(text_model, max_sequences=2)
    with pytest.raises(RuntimeError, match=r"open_session\(\) needs an active engine"):
        engine.open_session(PARAMS)
    with engine.active(LocalWeights(text_model.state_dict().items(), 1)):
        groups = engine.generate([text_prompt(f"p{index}", 3) for index in range(3)], PARAMS)
        next(groups)
        engine.open_session(PARAMS)
        with pytest.raises(RuntimeError, match="a later session began"):
            next(groups)
    assert isinstance(engine, Interactive)


def test_logits_that_are_not_finite_end_the_session(text_model: Any) -> None:
    engine = engine_for(text_model)
    engine.load_weights(
        LocalWeights(((name, tensor * torch.nan) for name, tensor in text_model.state_dict().items()), 1)
    )
    session = engine.open_session(PARAMS)
    session.submit("a", text_prompt("p", 3), max_tokens=9)
    with pytest.raises(NonFiniteLogits):
        session.poll()
    with pytest.raises(RuntimeError, match="a step failed"):
        session.poll()


def test_a_request_whose_last_token_is_under_way_can_be_cancelled(engine: EmbeddedEngine) -> None:
    """With graphs the host has not read the third token yet, and nobody asks for the answer any more."""
    session = engine.open_session(PARAMS)
    session.submit("a", text_prompt("q", 3), max_tokens=3, n=2, split=True)
    for _ in range(3):
        session.poll(timeout=0.0)
    session.cancel("a")
    session.submit("b", text_prompt("q", 3), max_tokens=3)
    assert [key for key, _ in session.poll()] == ["b"]
