"""Turns of episodes in published chat templates: what r1 appends has the tokens of the full rendering."""

from importlib.util import find_spec

import pytest
from published_markers import templates, tokenizer_of
from turn_cases import ANSWER, QUESTION, RESULT, THOUGHT, TURN, plain, sampled, turns_of

from r1_data.turns.conversation import as_user_messages, make_call

pytestmark = [
    pytest.mark.slow,  # the templates are in no environment unless asked for
    pytest.mark.skipif(find_spec("trl") is None, reason="needs the chat templates of TRL"),
]


@pytest.mark.parametrize(("kind", "count"), [("result", 27), ("results", 27), ("user", 25), ("user after <think>", 21)])
def test_what_stands_behind_a_turn_has_the_tokens_of_the_full_rendering(kind, count):
    messages = {"result": [RESULT], "results": [RESULT, RESULT]}.get(kind, [ANSWER])
    compared: list[str] = []
    for name, template in templates().items():
        turns = turns_of(tokenizer := tokenizer_of(template), template)
        info, write = turns.info, turns.renderer.write_chat
        kept = {"user": info.keeps_user, "user after <think>": info.keeps_thoughts}.get(kind, info.keeps_tool)
        if not kept or (kind.startswith("result") and info.results == "call"):
            continue
        turn = f"<think>\n{THOUGHT}" if "<think>" in kind or info.prefill else TURN.strip()
        own = messages if info.results == "message" else as_user_messages(messages)
        whole = plain(tokenizer, write([QUESTION, {"role": "assistant", "content": turn}, *own]))
        said = sampled(turns, turn.removeprefix(info.prefill))
        found = turns.continuation(said, messages, closed=True)
        assert [*plain(tokenizer, write([QUESTION])), *said, *found.token_ids] == whole, name
        compared.append(name)
    assert len(compared) == count, compared


def test_results_behind_their_calls_have_the_tokens_of_the_full_rendering():
    compared: list[str] = []
    for name, template in templates().items():
        turns = turns_of(tokenizer := tokenizer_of(template), template)
        if turns.info.results != "call":
            continue
        call = {"role": "assistant", "content": "", "tool_calls": [make_call("look", {"x": 1}, "call00000")]}
        whole = plain(tokenizer, turns.renderer.write_chat([QUESTION, call, RESULT]))
        found = turns.continuation(plain(tokenizer, "x"), [RESULT], closed=False).token_ids
        assert whole[-len(found) :] == found, name
        compared.append(name)
    assert len(compared) == 6, compared
