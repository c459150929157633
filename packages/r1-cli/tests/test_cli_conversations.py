"""Which conversation a request goes on from: matching of messages, and the forest of a session."""

from typing import Any

import pytest

from r1_cli.gateway.conversations import Forest, message_key, reply_keys, request_key, tools_key
from r1_cli.gateway.messages import ChatRequest

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "How many?"}
CALL = {"id": "call00000", "name": "look", "arguments": {"x": 3.0, "deep": {"b": 1, "a": [2]}}}


def keys(*messages: dict[str, Any]) -> list[str]:
    return [message_key(message) for message in messages]


def key_of(request: ChatRequest) -> str:
    return request_key(request, tools_key(request.tools), keys(*request.messages))


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Talk:
    """A session whose turns are answered at once, unless `answer` is None."""

    def __init__(self) -> None:
        self.forest: Forest[str] = Forest()

    def ask(self, *messages: dict[str, Any], answer: str | None = "A", tools: str = "") -> tuple[int | None, int]:
        """Return the number of the turn that the request goes on from, and the messages that it covers."""
        found = keys(*messages)
        parent, covered = self.forest.find(tools, found)
        node = self.forest.add(parent, tools, found[covered:], "")
        if answer is not None:
            node.replies = reply_keys({answer}, (), answer)
        return None if parent is None else parent.number, covered

    @property
    def paths(self) -> list[list[int]]:
        return [[node.number for node in leaf.path] for leaf in self.forest.leaves]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (
            USER,
            {"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}]},
            True,
        ),
        (USER, {**USER, "name": "anna", "id": 3}, True),
        (USER, {**USER, "content": "How many? "}, False),
        (USER, {**USER, "role": "system"}, False),
        (said("5"), {**said(" 5\n"), "reasoning_content": "so", "refusal": None, "tool_calls": []}, True),
        (said(""), said(None), True),  # type: ignore[arg-type]
        ({**said(""), "tool_calls": [CALL]}, {"role": "assistant", "tool_calls": [{**CALL, "id": "other"}]}, True),
        (
            {**said(""), "tool_calls": [CALL]},
            {**said(""), "tool_calls": [{**CALL, "arguments": {"deep": {"a": [2], "b": 1}, "x": 3}}]},
            True,
        ),
        ({**said(""), "tool_calls": [CALL]}, {**said(""), "tool_calls": [{**CALL, "arguments": {"x": 4}}]}, False),
        ({**said(""), "tool_calls": [CALL]}, {**said(""), "tool_calls": [{**CALL, "arguments": '{"x'}]}, False),
        ({**said(""), "tool_calls": [CALL]}, said(""), False),
        ({**said("x"), "tool_calls": [CALL]}, {**said("x"), "tool_calls": [CALL, CALL]}, False),
        ({"role": "tool", "content": "7", "tool_call_id": "a"}, {"role": "tool", "content": "7", "name": "look"}, True),
        (
            {"role": "user", "content": [{"type": "image", "image": b"a"}, {"type": "text", "text": "?"}]},
            {"role": "user", "content": [{"type": "image", "image": b"a"}, {"type": "text", "text": "?"}]},
            True,
        ),
        (
            {"role": "user", "content": [{"type": "image", "image": b"a"}, {"type": "text", "text": "?"}]},
            {"role": "user", "content": [{"type": "image", "image": b"b"}, {"type": "text", "text": "?"}]},
            False,
        ),
        (
            {"role": "user", "content": [{"type": "image", "image": b"a"}, {"type": "text", "text": "?"}]},
            {"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image", "image": b"a"}]},
            False,
        ),
    ],
)
def test_a_message_is_known_by_role_content_and_calls(one: dict[str, Any], other: dict[str, Any], same: bool) -> None:
    assert (message_key(one) == message_key(other)) is same


def test_a_turn_is_known_by_the_text_returned_or_sampled_and_with_the_stop_string_put_back() -> None:
    known = reply_keys({"print(5)", "print(5)</code>"}, (), "print(5)</code>\n")
    for text in ("print(5)", "print(5)</code>", "print(5)</code>\n", " print(5)"):
        assert message_key(said(text)) in known
    assert message_key(said("print(6)")) not in known


def test_a_turn_with_calls_is_known_by_its_text_and_calls_or_by_what_was_sampled() -> None:
    known = reply_keys({"So:"}, [("look", CALL["arguments"])], 'So:\n<tool_call>{"name": "look"}</tool_call>')
    assert message_key({**said("So:"), "tool_calls": [CALL]}) in known
    assert message_key(said('So:\n<tool_call>{"name": "look"}</tool_call>')) in known
    assert message_key(said("So:")) not in known


def test_a_conversation_goes_on_from_its_own_turns() -> None:
    talk = Talk()
    assert talk.ask(SYSTEM, USER, answer="5") == (None, 0)
    assert talk.ask(SYSTEM, USER, said("5"), user("Sure?"), answer="6") == (0, 3)
    assert talk.ask(SYSTEM, USER, said("5"), user("Sure?"), said("6"), user("Really?")) == (1, 5)
    assert talk.paths == [[0, 1, 2]]


def test_an_edited_history_goes_on_from_before_the_edit() -> None:
    talk = Talk()
    talk.ask(USER, answer="5")
    talk.ask(USER, said("5"), user("Sure?"), answer="6")
    assert talk.ask(USER, said("5"), user("Are you sure?"), answer="7") == (0, 2)
    assert talk.ask(USER, said("4"), user("Sure?")) == (None, 0)
    assert talk.paths == [[0, 1], [0, 2], [3]]


def test_a_summarised_history_and_a_sub_agent_begin_paths_of_their_own() -> None:
    talk = Talk()
    talk.ask(SYSTEM, USER, answer="5")
    talk.ask({"role": "system", "content": "Search."}, USER, answer="found")
    assert talk.ask(SYSTEM, USER, said("5"), user("found")) == (0, 3)
    assert talk.ask(SYSTEM, user("So far: 5, found. Go on.")) == (None, 0)
    assert talk.paths == [[1], [0, 2], [3]]


def test_requests_at_once_on_one_path_are_forks_and_a_turn_in_flight_is_gone_on_from_by_nobody() -> None:
    talk = Talk()
    talk.ask(USER, answer="5")
    assert talk.ask(USER, said("5"), user("b"), answer=None) == (0, 2)
    assert talk.ask(USER, said("5"), user("b"), answer="8") == (0, 2)
    assert talk.ask(USER, said("5"), user("b"), said("8"), user("c")) == (2, 4)
    assert talk.paths == [[0, 1], [0, 2, 3]]
    first = talk.forest.nodes[1]
    assert talk.forest.find_twin(talk.forest.nodes[0], "", first.keys) is first
    talk.forest.remove(first)
    assert talk.paths == [[0, 2, 3]]


def test_the_first_turn_replayed_alone_is_a_new_root() -> None:
    talk = Talk()
    talk.ask(USER, answer="5")
    talk.ask(USER, said("5"), user("b"))
    assert talk.ask(USER) == (None, 0)
    assert talk.ask(USER, said("5")) == (None, 0)  # nothing to answer: the client asks to go on with its own text


def test_of_equal_conversations_the_latest_is_gone_on_from() -> None:
    talk = Talk()
    for _ in range(3):
        talk.ask(USER, answer="5")
    assert talk.ask(USER, said("5"), user("b")) == (2, 2)


def test_other_tools_are_another_conversation() -> None:
    talk = Talk()
    talk.ask(USER, answer="5", tools="look")
    assert talk.ask(USER, said("5"), user("b"), tools="look") == (0, 2)
    assert talk.ask(USER, said("5"), user("b"), tools="") == (None, 0)


def test_a_retry_is_the_same_request_and_another_seed_is_not() -> None:
    request = ChatRequest((SYSTEM, USER), ({"type": "function"},), 16, ("x",))
    assert key_of(request) == key_of(ChatRequest((dict(SYSTEM), USER), ({"type": "function"},), 16, ("x",)))
    others = [
        ChatRequest((SYSTEM, USER), (), 16, ("x",)),
        ChatRequest((SYSTEM, USER), ({"type": "function"},), 17, ("x",)),
        ChatRequest((SYSTEM, USER), ({"type": "function"},), 16, ()),
        ChatRequest((SYSTEM, USER), ({"type": "function"},), 16, ("x",), seed=1),
        ChatRequest((SYSTEM, user("\ud800")), ({"type": "function"},), 16, ("x",)),
    ]
    assert len({key_of(one) for one in [request, *others]}) == 6
    assert tools_key([{"a": 1, "b": 2}]) == tools_key([{"b": 2, "a": 1}])
