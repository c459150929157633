"""Find out what a chat template does, by rendering short conversations around a sentinel."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from r1_data.turns.calls import FORMATS
from r1_data.turns.calls.parse import parse_calls
from r1_data.turns.calls.types import signatures
from r1_data.turns.conversation import SENTINEL, STAND_IN, Writer, as_user_messages, make_call, needs_parts
from r1_data.turns.info import Results, TemplateInfo
from r1_data.types import DataError, JsonObject, Message

if TYPE_CHECKING:
    from r1_data.render import Renderer

_MARK = "r1mark"  # the text of a message behind the turn
_THOUGHT = "A thought.\n</think>\n\n"
# Contents of a turn, behind each of which the same text must follow.
_CONTENTS = (SENTINEL, f"Two words.\n{SENTINEL}", f"<think>\n{_THOUGHT}{SENTINEL}", f'{{"a": [1]}} {SENTINEL}')
_ARGUMENTS = {"row": 3, "label": "a b"}
_TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "r1look",
        "description": "Look closer.",
        "parameters": {
            "type": "object",
            "properties": {
                "row": {"type": "integer", "description": "A row."},
                "label": {"type": "string", "description": "A label."},
            },
            "required": ["row"],
        },
    },
}
_USER: Message = {"role": "user", "content": _MARK}
_RESULT: Message = {"role": "tool", "name": "r1look", "tool_call_id": "call00000", "content": _MARK}
_OVERRIDE = "give another template (data.override_chat_template)"


def probe_template(renderer: "Renderer", *, end_token_ids: Sequence[int] = ()) -> TemplateInfo:
    """Probe the chat template of a run, once, before its first step.

    Args:
        end_token_ids: the tokens at which the engine ends a turn; empty: any special token may end one.

    Raises:
        DataError: turns cannot be appended with this template. The message says which rule it breaks, shows what was
            found, and names the way out.
    """
    return _Probe(renderer, end_token_ids).run()


class _Probe:
    def __init__(self, renderer: "Renderer", end_token_ids: Sequence[int]) -> None:
        self.renderer, self.ends, self.ends_given = renderer, end_tokens(renderer, end_token_ids), bool(end_token_ids)
        self.writer = _open_writer(renderer)

    def run(self) -> TemplateInfo:
        user, user_end, before_user = self._behind([_USER])
        results, tool_end, before_tool, call_end = self._results()
        ends = dict.fromkeys([user_end, tool_end] if tool_end else [user_end])
        prompt = self.writer.write(STAND_IN)
        opened = re.search(r"<think>\s*\Z", prompt)
        prefill = opened[0] if opened else ""
        call_format, writes_calls = self._call_format(prompt, prefill, [*ends])
        return TemplateInfo(
            end_tokens=tuple(ends),
            end_token_ids=tuple(map(self.renderer.tokenizer.convert_tokens_to_ids, ends)),
            before_user=before_user,
            before_tool=before_tool,
            results=results,
            call_end=call_end,
            shows_tools="r1look" in self._tried(STAND_IN, tools=[_TOOL]),
            reads_tools_later=self._reads_tools(results, user),
            call_format=call_format,
            writes_calls=writes_calls,
            tool_pictures=results == "message" and self._places_picture(_RESULT),
            user_pictures=self._places_picture(_USER),
            content_parts=self.writer.content_parts,
            reads_system=_MARK in self._tried([{"role": "system", "content": _MARK}, *STAND_IN]),
            prefill=prefill,
            keeps_tool=self._keeps_tool(prompt, prefill, results),
            keeps_user=self._keeps(prompt, prefill, _plain(prefill), [_USER]),
            keeps_thoughts=self._keeps(prompt, prefill, _thinking(prefill), [_USER]),
        )

    def _behind(self, messages: Sequence[Message]) -> tuple[str, str, str]:
        """Return what stands behind a turn, the end token that it begins with, and what stands before the text."""
        found = {content: self.writer.behind_turn(messages, content=content) for content in _CONTENTS}
        text = found[SENTINEL]
        if SENTINEL in text:
            raise DataError(f"the chat template writes an assistant's content twice; {_OVERRIDE}")
        for content, other in found.items():
            if other != text:
                raise DataError(
                    "what the chat template writes behind an assistant's turn depends on what the turn says: "
                    f"{text!r} behind {_shown(SENTINEL)!r}, but {other!r} behind {_shown(content)!r}; {_OVERRIDE}"
                )
        if (number := text.count(_MARK)) != 1:
            raise DataError(
                f"the chat template writes the text of a {messages[0]['role']} message {number} times behind an "
                f"assistant's turn: {text!r}; {_OVERRIDE}"
            )
        for longer in self._longer(messages):
            if (other := self.writer.behind_turn(messages, before=longer)) != text:
                raise DataError(
                    "what the chat template writes behind an assistant's turn depends on the conversation before it: "
                    f"{text!r} in a short one, {other!r} in a longer one; {_OVERRIDE}, or other arguments "
                    "(data.chat_template_kwargs)"
                )
        return text, self._end(text), text.partition(_MARK)[0]

    def _longer(self, messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
        turn: Message = {"role": "assistant", "content": "A turn."}
        yield [*STAND_IN, turn, *messages]
        yield [*STAND_IN, turn, *messages, turn, *STAND_IN]
        if self.renderer.vision is not None and self._places_picture(_USER):
            yield [_with_picture(STAND_IN[0])]

    def _end(self, text: str) -> str:
        for token in sorted(self.ends, key=len, reverse=True):
            if text.startswith(token):
                return token
        known = ", ".join(sorted(self.ends)) if self.ends_given else "any special token"
        raise DataError(
            f"behind an assistant's turn the chat template writes {text!r}, which begins with no end token of the "
            f"model ({known}); name it in eos_token_id of the model's generation_config.json, or {_OVERRIDE}"
        )

    def _results(self) -> tuple[Results, str, str, str]:
        """Return how results are written, the end token, what stands before a result, and the end of a call."""
        try:
            _, end, before = self._behind([_RESULT])
        except DataError:
            pass
        else:
            return "message", end, before, ""
        try:
            return "call", *self._behind_call()
        except DataError:
            pass
        self._behind(as_user_messages([_RESULT]))
        return "user", "", "", ""

    def _behind_call(self) -> tuple[str, str, str]:
        """Return the end token of a call, what stands before a result, and the end of a call."""
        text = self.writer.behind_calls([_RESULT])
        turn: Message = {"role": "assistant", "content": "", "tool_calls": [make_call("r1look", {}, "call00001")]}
        result, answer = {**_RESULT, "tool_call_id": "call00001"}, {"role": "assistant", "content": "A turn."}
        longer = self.writer.behind_calls([_RESULT], before=[*STAND_IN, turn, result, answer, *STAND_IN])
        _, written, called = self._called({"row": SENTINEL}).partition(SENTINEL)
        if not written or text != longer or text.count(_MARK) != 1:
            raise DataError("the chat template does not write a call and its result behind it")
        place = max((called.rfind(token) for token in self.ends), default=-1)
        text = (call_end := called[place:] if place >= 0 else "") + text
        return self._end(text), text.partition(_MARK)[0], call_end

    def _called(self, arguments: "JsonObject | str") -> str:
        call = make_call("r1look", arguments, "call00000")
        messages = [*STAND_IN, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return self.writer.write(messages, tools=[_TOOL], generation_prompt=False)

    def _call_format(self, prompt: str, prefill: str, ends: Sequence[str]) -> tuple[str, bool]:
        """Return the format that reads a rendered call, "" if none does; and whether the template writes calls."""
        written = ""
        tools = signatures([_TOOL])
        for arguments in (_ARGUMENTS, '{"row": 3, "label": "a b"}'):  # some templates take JSON text
            try:
                whole = self._called(arguments)
            except DataError:
                continue
            turn = whole[_common(whole, self._tried(STAND_IN, tools=[_TOOL]) or prompt) :]
            places = [place for token in ends if (place := turn.find(token)) >= 0]
            turn = turn[: min(places, default=len(turn))]
            written = written or (turn if "r1look" in turn else "")
            for name, tool_format in FORMATS.items():
                calls = parse_calls(tool_format, turn, tools, thinking=bool(prefill))
                if len(calls) == 1 and not calls[0].error and calls[0].arguments == _ARGUMENTS:
                    return name, True
        return "", bool(written)

    def _reads_tools(self, results: Results, user: str) -> bool:
        if self.writer.behind_turn([_USER], tools=[_TOOL]) != user:
            return True
        if results == "message":
            return self.writer.behind_turn([_RESULT]) != self.writer.behind_turn([_RESULT], tools=[_TOOL])
        return results == "call" and self.writer.behind_calls([_RESULT]) != self.writer.behind_calls(
            [_RESULT], tools=[_TOOL]
        )

    def _places_picture(self, message: Message) -> bool:
        if self.renderer.vision is None:
            return False
        token, _ = self.renderer.vision.tokens["picture"]
        try:
            return self.writer.behind_turn([_with_picture(message)]).count(token) == 1
        except DataError:
            return False

    def _keeps_tool(self, prompt: str, prefill: str, results: Results) -> bool:
        if results == "call":
            return self._called(_ARGUMENTS).startswith(self._tried(STAND_IN, tools=[_TOOL]))
        messages = [_RESULT] if results == "message" else as_user_messages([_RESULT])
        contents = [_plain(prefill)]
        if not prompt.rstrip().endswith("</think>"):  # the policy may think
            contents.append(_thinking(prefill))
        return all(self._keeps(prompt, prefill, content, messages) for content in contents)

    def _keeps(self, prompt: str, prefill: str, content: str, messages: Sequence[Message]) -> bool:
        turn = {"role": "assistant", "content": prefill + content}
        return self._tried([*STAND_IN, turn, *messages]).startswith(prompt + content)

    def _tried(self, messages: Sequence[Message], tools: Sequence[JsonObject] = ()) -> str:
        try:
            return self.writer.write(messages, tools=tools)
        except DataError:
            return ""


def end_tokens(renderer: "Renderer", end_token_ids: Sequence[int] = ()) -> frozenset[str]:
    """Return the texts of the tokens that may end a turn: those given, else all special tokens."""
    tokens = renderer.tokenizer.added_tokens_decoder
    if end_token_ids:
        return frozenset(str(renderer.tokenizer.convert_ids_to_tokens(token_id)) for token_id in end_token_ids)
    return frozenset(token.content for token in tokens.values() if token.special)


def _open_writer(renderer: "Renderer") -> Writer:
    """Raises DataError if the template shows no user's text behind a turn."""
    writer = Writer(renderer, content_parts=needs_parts(renderer))
    try:
        text = writer.behind_turn([_USER])
    except DataError as error:
        reason = str(error)
    else:
        if _MARK in text:
            return writer
        reason = f"behind a turn it writes {text!r} without the user's text"
    raise DataError(f"the chat template cannot go on behind an assistant's turn ({reason}); {_OVERRIDE}")


def _with_picture(message: Message) -> Message:
    return {**message, "content": [{"type": "image"}, {"type": "text", "text": message["content"]}]}


def _plain(prefill: str) -> str:
    """A turn as it is sampled behind `prefill`."""
    return f"{_THOUGHT}An answer." if prefill else "An answer."


def _thinking(prefill: str) -> str:
    return f"{_THOUGHT}An answer." if prefill else f"<think>\n{_THOUGHT}An answer."


def _common(text: str, other: str) -> int:
    """Return the length of the longest common beginning."""
    return next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))


def _shown(content: str) -> str:
    return content.replace(SENTINEL, "TEXT")
