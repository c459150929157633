"""Which recorded conversation a request goes on from. A session is a forest: each path is one conversation."""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from r1_cli.gateway.messages import ChatRequest
from r1_data.types import JsonObject, Message

State = TypeVar("State")


@dataclass(eq=False, slots=True)
class PathNode(Generic[State]):
    """A turn of the policy, and the messages between it and the turn before it."""

    parent: "PathNode[State] | None"
    tools: str  # key of the tools that the policy saw
    keys: tuple[str, ...]  # of these messages
    number: int  # of the turn in its session, from 0
    state: State
    replies: frozenset[str] = frozenset()  # keys under which a client may send the turn back; none while in flight
    children: "list[PathNode[State]]" = field(default_factory=list)

    @property
    def path(self) -> "list[PathNode[State]]":
        """The turns of its conversation, from the first to this one."""
        turns, node = [self], self.parent
        while node is not None:
            turns.append(node)
            node = node.parent
        return turns[::-1]


class Forest(Generic[State]):
    """The conversations of a session."""

    def __init__(self) -> None:
        self.roots: list[PathNode[State]] = []
        self.nodes: list[PathNode[State]] = []  # in the order of their requests

    def find(self, tools: str, keys: Sequence[str]) -> tuple[PathNode[State] | None, int]:
        """Return the turn of which the conversation is the longest that begins these messages, and its length.

        The length is below that of `keys`. Of equally long ones it is the latest; None and 0 if there is none.
        """
        found: tuple[PathNode[State] | None, int] = None, 0
        waiting = [(root, 0) for root in self.roots]
        while waiting:
            node, begin = waiting.pop()
            end = begin + len(node.keys)
            if node.tools != tools or end + 1 >= len(keys) or node.keys != tuple(keys[begin:end]):
                continue
            if keys[end] in node.replies:
                if found[0] is None or (end + 1, node.number) > (found[1], found[0].number):
                    found = node, end + 1
                waiting += [(child, end + 1) for child in node.children]
        return found

    def find_twin(self, parent: PathNode[State] | None, tools: str, keys: Sequence[str]) -> PathNode[State] | None:
        """Return a turn that was sampled from the same messages, in flight or not."""
        others = self.roots if parent is None else parent.children
        return next((node for node in others if node.tools == tools and node.keys == tuple(keys)), None)

    def add(self, parent: PathNode[State] | None, tools: str, keys: Sequence[str], state: State) -> PathNode[State]:
        number = self.nodes[-1].number + 1 if self.nodes else 0
        node = PathNode(parent, tools, tuple(keys), number, state)
        (self.roots if parent is None else parent.children).append(node)
        self.nodes.append(node)
        return node

    def remove(self, node: PathNode[State]) -> None:
        """Remove a turn that nothing goes on from."""
        assert not node.children
        (self.roots if node.parent is None else node.parent.children).remove(node)
        self.nodes.remove(node)

    @property
    def leaves(self) -> list[PathNode[State]]:
        return [node for node in self.nodes if not node.children]


def request_key(request: ChatRequest, tools: str, keys: Sequence[str]) -> str:
    """Return a key that a request shares with its retries; `tools` and `keys` are those of its tools and messages."""
    return _digest([list(keys), tools, request.max_tokens, list(request.stop), request.seed])


def tools_key(tools: Sequence[JsonObject]) -> str:
    return _digest(list(tools))


def message_key(message: Message) -> str:
    """Return a key that a message shares with its copies, in which ids and empty fields may differ or be left out."""
    content = message.get("content")
    parts = [{"type": "text", "text": content or ""}] if not isinstance(content, list | tuple) else content
    calls = [(call["name"], call["arguments"]) for call in message.get("tool_calls") or ()]
    return _key(message["role"], list(_join(parts)), calls)


def reply_keys(texts: Collection[str], calls: Sequence[tuple[str, object]], raw: str) -> frozenset[str]:
    """Return the keys under which a client may send a turn back: one of its texts with its calls, or `raw` alone."""
    with_calls = {_key("assistant", [text], calls) for text in texts}
    return frozenset(with_calls | {_key("assistant", [raw], ())})


def _key(role: str, content: Sequence[object], calls: Sequence[tuple[str, object]]) -> str:
    if role == "assistant":  # clients trim a turn's text
        content = [part.strip() if isinstance(part, str) else part for part in content]
    made = [[name, _same_numbers(arguments)] for name, arguments in calls]
    return _digest([role, list(content), made])


def _join(parts: Sequence[Mapping[str, object]]) -> Iterator[object]:
    """Yield texts, neighbours joined, and the digests of pictures."""
    text = ""
    for part in parts:
        if part["type"] == "text":
            text += str(part["text"])
            continue
        image = part["image"]
        assert isinstance(image, bytes)
        yield from (text, {"image": hashlib.sha256(image).hexdigest()})
        text = ""
    yield text


def _same_numbers(value: object) -> object:
    """Write numbers of one value alike: 3.0 as 3."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {str(key): _same_numbers(item) for key, item in value.items()}
        case list() | tuple():
            return [_same_numbers(item) for item in value]
    return value


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
