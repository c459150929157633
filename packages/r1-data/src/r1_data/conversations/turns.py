"""Read the messages of a conversation as OpenAI's, whatever their keys and roles are, and check their order."""

from collections.abc import Mapping
from dataclasses import dataclass

from r1_data.cells import brief, decoded, is_visible, require_unicode, unwrapped
from r1_data.conversations.tools import read_calls, read_json
from r1_data.markers import Cells
from r1_data.messages import parse_messages, read_list
from r1_data.types import DataError, EmptyCell, Message, NoAnswer, RoleOrder

SYSTEM = ("system", "developer")
_REASONING = ("reasoning_content", "reasoning", "thinking")  # keys beside `content`


@dataclass(frozen=True, slots=True)
class Tags:
    """Keys and roles of messages, by the names of LLaMA-Factory's `dataset_info.json`.

    Messages with the keys `role` and `content` are read with any tags.
    """

    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str = "human"
    assistant_tag: str = "gpt"
    observation_tag: str = "observation"  # results of tools
    function_tag: str = "function_call"  # the assistant's calls, as JSON
    system_tag: str = "system"

    def role(self, name: object) -> str:
        """Return OpenAI's role. Raises DataError for a role that is neither one of these nor OpenAI's."""
        known = {
            self.user_tag: "user",
            self.assistant_tag: "assistant",
            self.observation_tag: "tool",
            self.function_tag: "assistant",
            self.system_tag: "system",
        } | {role: role for role in ("user", "assistant", "tool", *SYSTEM)}
        if not isinstance(name, str) or name not in known:
            tags = ", ".join(dict.fromkeys(known))
            raise DataError(f"a message has the role {brief(name)}, which is none of {tags}; data.tags names others")
        return known[name]


def read_turns(value: object, tags: Tags, embedded: Cells, role: str = "user") -> list[Message]:
    """Read messages from a list, one message, JSON text of these, or the text of one message of `role`.

    Raises DataError if text that begins like JSON is none, and EmptyCell for null and NaN.
    """
    value = decoded(value, "the cell") if isinstance(value, bytes) else unwrapped(value)
    if isinstance(value, str):
        value = _parse(value, tags)
    if isinstance(value, Mapping):
        value = [value]
    if value is None or value != value:
        raise EmptyCell("holds no message but NaN" if value is not None else "is empty")
    if isinstance(value, str | bool | int | float):
        return [{"role": role, "content": str(value)}]
    if not isinstance(value, list):
        raise DataError(f"must hold text or a list of messages, found {brief(value)}")
    return read_list([_to_openai(message, tags, place) for place, message in enumerate(value, start=1)], embedded)


def _parse(text: str, tags: Tags) -> object:
    opening = text[:80].replace(" ", "").replace("\n", "")
    if opening.startswith((f'[{{"{tags.role_tag}":', f'[{{"{tags.content_tag}":')):
        return read_json(text, "the text of messages")
    return parse_messages(text)


def _to_openai(message: object, tags: Tags, place: int) -> object:
    if not isinstance(message, Mapping):
        return message
    tagged = tags.role_tag in message and ("role" not in message or tags.content_tag in message)
    role_key, content_key = (tags.role_tag, tags.content_tag) if tagged else ("role", "content")
    name = message.get(role_key)
    content = unwrapped(message.get(content_key))
    others = {key: value for key, value in message.items() if key not in (role_key, content_key) and value is not None}
    if isinstance(content, float) and content != content:
        raise EmptyCell(f"message {place} holds NaN in place of text")
    role = tags.role(name)
    if name == tags.function_tag and "tool_calls" not in others:
        thought, calls = _split_call(str(content))
        return {**others, "role": role, "content": thought, "tool_calls": read_calls(calls, place)}
    if others.get("tool_calls"):
        others["tool_calls"] = read_calls(others["tool_calls"], place)
    else:
        others.pop("tool_calls", None)
    if content is None and role == "assistant":
        content = ""  # calls or reasoning alone; `require_answers` refuses a message without either
    return {**others, "role": role, "content": content}


def _split_call(text: str) -> tuple[str, str]:
    thought, end, calls = text.rpartition("</think>")
    return thought + end, calls


def require_order(messages: list[Message]) -> None:
    """Raise RoleOrder unless system messages stand first, users and tools alternate with the assistant's answers."""
    last = ""
    for place, message in enumerate(messages, start=1):
        role = message["role"]
        if role in SYSTEM:
            wrong = last and last not in SYSTEM and "a system message stands only at the beginning"
        elif role == "user":
            wrong = last == "user" and "two messages of the user follow one another"
        elif role == "tool":
            wrong = last not in ("assistant", "tool") and "a tool's result follows no call of the assistant"
        else:
            wrong = last not in ("user", "tool") and "an assistant's message follows no user's message or tool's result"
        if wrong:
            shown = " ".join(message["role"] for message in messages[:place])
            raise RoleOrder(f"message {place} is out of order: {wrong} (roles: {shown}); join or reorder the messages")
        last = role


def require_answers(messages: list[Message], what: str = "the conversation") -> None:
    """Raise NoAnswer unless `messages` end with an assistant's message, and none of those is empty."""
    if not any(message["role"] == "assistant" for message in messages):
        raise NoAnswer(f"{what} has no answer: no message of the assistant; `r1 sample` makes answers to prompts")
    if messages[-1]["role"] != "assistant":
        role = messages[-1]["role"]
        raise NoAnswer(f"{what} ends with a message of the role {role}, which nothing answers; remove the message")
    for place, message in enumerate(messages, start=1):
        require_unicode(message["content"], f"message {place} of {what}")
        if message["role"] == "assistant" and not has_content(message):
            raise NoAnswer(f"{what} has an empty answer (message {place}); fill or remove it")


def has_content(message: Message) -> bool:
    """Whether a message of the assistant shows text, media (as markers) or a call."""
    texts = [message["content"], *(message.get(key) for key in _REASONING)]
    return bool(message.get("tool_calls")) or any(isinstance(text, str) and is_visible(text) for text in texts)
