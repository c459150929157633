"""Find the assistant's characters in the final rendering of a chat template.

Lengths of partial renderings are not used: a template may change earlier turns when later ones follow. Instead, marks
(words that no text has) are inserted into the messages. Without its marks, the marked rendering must equal the plain
one; where the marks stood, the messages stand.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from r1_data.marks import (
    IN_CALL,
    IN_REASONING,
    IN_TEXT,
    PLAIN,
    PLAIN_END,
    TAG,
    TAG_END,
    Marks,
    has_reasoning,
    mark_message,
    mark_tags,
    read_marks,
)
from r1_data.render import Renderer
from r1_data.turns.conversation import Writer, needs_parts
from r1_data.turns.encoding import any_of
from r1_data.turns.probe import end_tokens
from r1_data.types import DataError, JsonObject, Message

OVERRIDE = "give a template with {% generation %} around the assistant's text (data.override_chat_template)"

_CUT_TAG = re.compile(r"[<\[][^>\]\s]*\Z")  # the beginning of a tag
_FOLLOWING: Message = {"role": "user", "content": "Next?"}


@dataclass(frozen=True, slots=True)
class Span:
    """Characters that the assistant wrote: text, shown reasoning, calls, and the token that ends the turn."""

    message: int  # index of the assistant's message
    start: int  # behind what the generation prompt supplies
    stop: int
    ended: bool  # whether it ends with a special token, at which sampling can stop


@dataclass(frozen=True, slots=True)
class Found:
    text: str  # the final rendering
    spans: tuple[Span, ...]
    plain: tuple[tuple[int, int], ...]  # text of messages that spells special tokens; it must not become them
    hidden: tuple[int, ...]  # assistant messages whose reasoning the template does not show here


class AnswerFinder:
    """Finds answers in the renderings of one renderer's chat template."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._writer: Writer | None = None
        eos = renderer.tokenizer.eos_token
        self.special = any_of({*end_tokens(renderer), *([str(eos)] if eos else [])})
        self.run = re.compile(f"(?:{self.special.pattern})+")
        self._endings: list[str] = []  # that were found behind answers without calls

    def find(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        template_kwargs: Mapping[str, object] | None = None,
    ) -> Found:
        """Render a conversation and find its assistant messages.

        Tags `{% generation %}` are used if the template has them, else marks. A first message of the assistant has no
        span, because nothing stands before it to answer. An answer without a special token behind it is not `ended`.

        Raises:
            DataError: the template refuses the messages, or an answer cannot be found; names message and template.
        """
        self._writer = self._writer or Writer(self._renderer, content_parts=needs_parts(self._renderer))
        kwargs, errors = template_kwargs or {}, []
        for form in _forms(messages):
            case = _Case(self, self._writer, form, tools, kwargs)
            try:
                return case.find()
            except DataError as error:
                errors.append(error)
        raise errors[0]

    def __reduce__(self) -> tuple[type["AnswerFinder"], tuple[Renderer]]:
        return AnswerFinder, (self._renderer,)

    def ending(self, behind: str, *, calls: bool, compare: Callable[[], tuple[str, str]]) -> tuple[int, bool]:
        """Return how many characters behind an answer's last mark belong to it, and whether a token ends it.

        Args:
            behind: the final rendering behind the mark.
            calls: whether the mark stands in a call.
            compare: renders what stands behind the mark if the conversation ends there, and if it goes on. What both
                begin with is the answer's own.
        """
        if not calls and (known := next((known for known in self._endings if behind.startswith(known)), None)):
            return len(known), True
        own = os.path.commonprefix(list(compare()))
        if runs := list(self.run.finditer(own)):
            if not calls:
                self._endings.append(own[: runs[-1].end()])
            return runs[-1].end(), True
        end = len(own.rstrip())
        # The token depends on what follows in gpt-oss and GLM.
        direct = self.special.match(behind, end) or self.special.match(behind)
        return (direct.end(), True) if direct else (end, False)


@dataclass(frozen=True, slots=True)
class TemplateAnswers:
    """What a chat template makes of an assistant's answers."""

    opens: str  # what the generation prompt begins of an answer, e.g. "<think>\n"
    end: str  # the special tokens behind the last answer of a conversation; "" if there are none
    forgets: Literal["", "earlier", "all"]  # whose `reasoning_content` it does not show

    @classmethod
    def probe(cls, renderer: Renderer) -> "TemplateAnswers":
        """Render a short conversation. Raises DataError as `AnswerFinder.find`."""
        finder = AnswerFinder(renderer)
        answer = {"role": "assistant", "content": "An answer.", "reasoning_content": "A thought."}
        found = finder.find([_FOLLOWING, answer, _FOLLOWING, answer])
        writer = Writer(renderer, content_parts=needs_parts(renderer))
        opened = re.search(r"<think>\s*\Z", writer.write([_FOLLOWING]))
        last = found.spans[-1]
        run = [*finder.run.finditer(found.text, last.start, last.stop)]
        forgets: Literal["", "earlier", "all"] = "all" if 3 in found.hidden else "earlier" if found.hidden else ""
        return cls(opened[0] if opened else "", run[-1][0] if last.ended else "", forgets)


class _Case:
    """One conversation in one form."""

    def __init__(
        self,
        finder: AnswerFinder,
        writer: Writer,
        messages: Sequence[Message],
        tools: Sequence[JsonObject],
        template_kwargs: Mapping[str, object],
    ) -> None:
        self.finder, self.writer, self.messages = finder, writer, messages
        self.tools, self.kwargs = tools, template_kwargs
        self.template = writer.renderer.template_for(tools)
        self.tagged = mark_tags(self.template)
        self.marked: list[Message] = []

    def find(self) -> Found:
        text = self._write(self.messages)
        if _is_repr(text, self.messages):
            raise self._error("it writes the arguments of calls as Python does")
        for everywhere in (True, False):  # some templates decide by what users' texts begin or end with
            self.marked = [
                mark_message(message, index, self.finder.special, everywhere)
                for index, message in enumerate(self.messages)
            ]
            whole = self._read(self.marked, template=self.tagged)
            if whole.text == text:
                spans = self._tagged_spans(whole) if self.tagged else self._spans(whole)
                plain = tuple(whole.between(PLAIN, PLAIN_END))
                return Found(text, tuple(spans), plain, tuple(self._hidden(whole)))
        raise self._error("it changes its surroundings when a text of a message changes")

    def _spans(self, whole: Marks) -> Iterator[Span]:
        for number, message in self._answers():
            if (last := self._last(whole, number, message)) is None:
                continue
            if len(whole.all(IN_TEXT, number)) > 1:
                raise self._error("it writes the text twice", number)
            start = self._start(whole, number, last)
            behind = whole.text[last:]
            length, ended = self.finder.ending(
                behind, calls=bool(message.get("tool_calls")), compare=partial(self._compare, number, behind)
            )
            if any(place > last + length for place in whole.all(IN_TEXT, number)):
                raise self._error("it writes the message's text behind the results of its calls", number)
            yield Span(number, start, last + length, ended)

    def _tagged_spans(self, whole: Marks) -> Iterator[Span]:
        tags, answers = whole.between(TAG, TAG_END), [number for number, _ in self._answers(first=True)]
        if len(tags) == len(answers):
            owned = list(zip(answers, tags, strict=True))
        else:  # blocks without a message's text, such as one around a last end token, are nobody's
            owned = [(number, tag) for tag in tags for number in answers if self._owns(whole, number, tag)]
        if missing := [number for number, _ in self._answers() if number not in dict(owned)]:
            raise self._error("it has no {% generation %} block around the text", missing[0])
        for number, (start, stop) in owned:
            if number == 0 or self._last(whole, number, self.messages[number]) is None:
                continue
            runs = list(self.finder.run.finditer(whole.text, start, stop))
            ended = bool(runs) and not whole.text[runs[-1].end() : stop].strip()
            stop = runs[-1].end() if ended else stop
            yield Span(number, max(start, self._supplied(whole, number, stop)), stop, ended)

    def _owns(self, whole: Marks, number: int, tag: tuple[int, int]) -> bool:
        last = whole.last(number)
        return last is not None and tag[0] <= last <= tag[1]

    def _last(self, whole: Marks, number: int, message: Message) -> int | None:
        """Return where the last mark of an answer stands; None if it is empty."""
        missing = "tool_calls" if message.get("tool_calls") else "content"
        last = whole.last(number)
        if message.get(missing) and (last is None or (missing == "tool_calls" and not whole.all(IN_CALL, number))):
            raise self._error(f"it does not show the message's {missing}", number)
        return last

    def _hidden(self, whole: Marks) -> Iterator[int]:
        for number, message in self._answers():
            if has_reasoning(message) and not whole.all(IN_REASONING, number):
                yield number

    def _start(self, whole: Marks, number: int, last: int) -> int:
        """Return the character behind what the generation prompt supplies of an answer."""
        start = self._supplied(whole, number, last)
        if not start:
            raise self._error("what stands before the message is not the generation prompt", number)
        return start

    def _supplied(self, whole: Marks, number: int, last: int) -> int:
        """As `_start`; 0 if it cannot be found."""
        prompt = self._read(self.marked[:number], generation_prompt=True)
        places = {(kind, own): place for kind, own, place in prompt.places}
        anchor, other = 0, 0
        for kind, own, place in whole.places:
            if kind in (IN_TEXT, IN_CALL) and own < number and place < last and (kind, own) in places:
                anchor, other = place, places[kind, own]
        tail = prompt.text[other:]
        common = os.path.commonprefix([whole.text[anchor:last], tail])
        if len(common) < len(tail):
            closed = self._read(self.marked[:number])
            if len(common) <= len(closed.text) - other:
                return 0
            common = _CUT_TAG.sub("", common)
        return anchor + len(common)

    def _compare(self, number: int, behind: str) -> tuple[str, str]:
        """Return what stands behind an answer if the conversation ends there, and if a user's message follows."""
        ends_here = number == len(self.messages) - 1
        closed = behind if ends_here else self._behind(self.marked[: number + 1], number)
        if not ends_here:
            return closed, behind
        try:
            return closed, self._behind([*self.marked, _FOLLOWING], number)
        except DataError:  # a template of single turns
            return closed, closed

    def _behind(self, marked: Sequence[Message], number: int) -> str:
        read = self._read(marked)
        last = read.last(number)
        if last is None:
            raise self._error("it does not show the message at the end of a conversation", number)
        return read.text[last:]

    def _answers(self, *, first: bool = False) -> Iterator[tuple[int, Message]]:
        for number, message in enumerate(self.messages):
            if message["role"] == "assistant" and (number or first):
                yield number, message

    def _write(
        self, messages: Sequence[Message], *, generation_prompt: bool = False, template: str | None = None
    ) -> str:
        return self.writer.write(
            messages,
            tools=self.tools,
            generation_prompt=generation_prompt,
            template=template,
            template_kwargs=self.kwargs,
        )

    def _read(
        self, messages: Sequence[Message], *, generation_prompt: bool = False, template: str | None = None
    ) -> Marks:
        return read_marks(self._write(messages, generation_prompt=generation_prompt, template=template))

    def _error(self, reason: str, number: int | None = None) -> DataError:
        digest = hashlib.blake2b(self.template.encode(), digest_size=6).hexdigest()
        where = "the assistant's text" if number is None else f"the text of message {number + 1} (assistant)"
        return DataError(f"{where} cannot be found with the chat template {digest}: {reason}; {OVERRIDE}")


def _forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the messages in the forms that templates take: arguments of calls as objects or JSON text, no content."""
    texts = [{**message, "content": ""} if message.get("content") is None else message for message in messages]
    if not any(message.get("tool_calls") for message in messages):
        yield texts
        return
    for written in (texts, [_without_content(message) for message in texts]):
        for as_text in (False, True):
            yield [_with_arguments(message, as_text) for message in written]


def _without_content(message: Message) -> Message:
    return {**message, "content": None} if message.get("tool_calls") and not message["content"] else message


def _with_arguments(message: Message, as_text: bool) -> Message:
    if not (calls := message.get("tool_calls")):
        return message
    return {**message, "tool_calls": [_with_call_arguments(call, as_text) for call in calls]}


def _with_call_arguments(call: JsonObject, as_text: bool) -> JsonObject:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _is_repr(text: str, messages: Sequence[Message]) -> bool:
    """Whether the template wrote a call's arguments as Python does, where JSON was meant."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = call.get("function", call).get("arguments")
            if isinstance(arguments, Mapping) and arguments and repr(arguments) in text:
                return json.dumps(arguments, ensure_ascii=False) not in text
    return False
