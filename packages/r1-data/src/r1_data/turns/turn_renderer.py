"""Render what follows a sampled turn: only what is new is rendered and tokenized, and never what was sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from r1_data.pictures import from_pil, to_pil
from r1_data.turns.calls import FORMATS, named_format
from r1_data.turns.calls.hermes import write_call
from r1_data.turns.calls.parse import parse_calls, split_calls
from r1_data.turns.calls.types import ParsedCall, signatures
from r1_data.turns.continuation import Continuation
from r1_data.turns.conversation import Writer, append_content, as_user_messages, make_call
from r1_data.turns.encoding import SafeEncoder
from r1_data.turns.info import TemplateInfo
from r1_data.turns.observations import read_messages
from r1_data.turns.tool_prompt import ToolPrompt
from r1_data.types import DataError, Example, JsonObject, MediaError, Message, PictureReference, Prompt
from r1_data.vision import PER_TOKEN

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from r1_data.render import Renderer

History = Literal["sampled", "template"]


class TurnRenderer:
    """Appends turns to prompts of one renderer: tools' schemas, calls, and what an environment answers."""

    def __init__(
        self,
        renderer: "Renderer",
        info: TemplateInfo,
        *,
        tools: Sequence[JsonObject] = (),
        tool_format: str = "auto",
        history: History = "sampled",
        max_parallel_calls: int = 1,
    ) -> None:
        """Raises DataError: an unknown format, or with `auto`, a template whose calls no format reads.

        Args:
            info: of the renderer's chat template, by `probe_template`.
            tools: OpenAI schemas of the tools.
            tool_format: a format of `r1_data.turns.calls`; auto: the one in which the template writes calls, and
                hermes with a template that writes none.
            history: sampled: the policy sees its turns as it sampled them. template: as the chat template shows them
                later, see `fork`.
            max_parallel_calls: with one call a turn, sampling stops behind it (`stop_strings`).
        """
        self.renderer, self.info, self.tools, self.history = renderer, info, tuple(tools), history
        self._with_tools = partial(
            TurnRenderer,
            renderer,
            info,
            tool_format=tool_format,
            history=history,
            max_parallel_calls=max_parallel_calls,
        )
        self.tool_format = named_format(_choose(tool_format, info, bool(tools)))
        stops = bool(tools) and max_parallel_calls == 1
        self.stop_strings: tuple[str, ...] = self.tool_format.stop_strings if stops else ()
        if history == "template" and info.results == "call":
            raise DataError(
                "multi_turn.history=template cannot be used: the template writes results behind parsed calls"
            )
        self._signatures = signatures(tools)
        shown = info.shows_tools and self.tool_format.name == info.call_format
        self.tool_prompt = ToolPrompt(self.tools, self.tool_format.name, shown, info.reads_system)
        self._later_tools = self.tools if shown and info.reads_tools_later else ()
        self._writer = Writer(renderer, content_parts=info.content_parts)
        self._encoder = SafeEncoder(renderer.tokenizer)
        self._ends = {*info.end_tokens, str(renderer.tokenizer.eos_token)}
        self._text_axes: int | None = None

    # --- the first prompt and the calls -------------------------------------------------------------------------------

    def with_tools(self, tools: Sequence[JsonObject]) -> "TurnRenderer":
        """Return a renderer for an agent's own tools. Raises DataError as the constructor.

        Special tokens that the schemas spell are left out.
        """
        return self._with_tools(tools=self._without_special(list(tools)))

    def render(self, id_: str, messages: Sequence[Mapping[str, object]]) -> Prompt:
        """Render an agent's own messages whole, with the tools' schemas, up to where the policy begins its turn.

        No text of them becomes a control token; from an assistant's messages and calls, special tokens are left out.

        Args:
            messages: OpenAI messages of all roles; see `read_messages` for contents. A call is {"id", "name",
                "arguments"}.

        Raises:
            DataError: no messages, messages of another kind, or such as the template refuses.
            MediaError: a picture that cannot be used.
        """
        if not messages:
            raise DataError("a conversation needs at least one message")
        pictures: list[PictureReference] = []
        read = [self._read(message, pictures) for message in messages]

        def write(messages: Sequence[Message]) -> str:
            example = self.tool_prompt(Example(id_, list(messages), (), ""))
            return self._writer.write(self._shown(example.messages), tools=example.tools)

        text, token_ids = self._encoder.encode(write, read, cached=False)
        expanded, position_ids, inputs, images = self._expand(token_ids, pictures)
        return Prompt(id_, text, expanded, token_ids, position_ids, "", images, inputs, messages=read)

    def split_calls(self, text: str) -> tuple[str, list[ParsedCall]]:
        """Return a turn's text before its calls, and the calls; without tools there are none.

        Args:
            text: the turn as `decode_turn` returns it.
        """
        calls: list[ParsedCall] = []
        for end in self._ends:
            text = text.removesuffix(end)
        if self.tools:
            thinking = self.info.prefill.rstrip() == "<think>"
            text, calls = split_calls(self.tool_format, text, self._signatures, thinking=thinking)
        return self._encoder.without_special(text), calls

    def decode_turn(self, token_ids: Sequence[int]) -> str:
        """Return the text of a sampled turn for `parse_calls`: with special tokens, which may mark calls."""
        return str(self.renderer.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def parse_calls(self, text: str, metadata: Mapping[str, object] = MappingProxyType({})) -> list[ParsedCall]:
        """Return the calls of a turn; without tools there are none. Those that cannot be executed have an error.

        Do not execute calls of a turn that was cut by a limit of tokens.

        Args:
            text: the turn as `decode_turn` returns it.
            metadata: of the example, whose row may name the tools that it may use.
        """
        if not (tools := self.tool_prompt.select(metadata)):
            return []
        for end in self._ends:
            text = text.removesuffix(end)
        known = self._signatures if tools is self.tools else signatures(tools)
        return parse_calls(self.tool_format, text, known, thinking=self.info.prefill.rstrip() == "<think>")

    def extend_prompt(self, prompt: Prompt, messages: Sequence[Mapping[str, object]]) -> Prompt:
        """Return an episode's first prompt with what its environment says before the first turn.

        The contents are appended to the last user message, without anything between them; without one they are a user
        message of their own. No text of them becomes a control token.

        Args:
            prompt: rendered from an example as `tool_prompt` returned it.
            messages: see `r1_data.turns.observations.read_messages`.

        Raises:
            DataError: messages of another kind, or such as the template refuses; a prompt with videos.
            MediaError: a picture that cannot be used.
        """
        if prompt.videos:
            raise DataError(f"{prompt.id}: reset() cannot add to the prompt of a row with videos")
        new, pictures = read_messages(messages)
        tools = self.tool_prompt.written_by_template(prompt.metadata)

        def extend(new: Sequence[Message]) -> list[Message]:
            return append_content(prompt.messages, [message["content"] for message in new])

        text, token_ids = self._encoder.encode(
            lambda new: self._writer.write(extend(new), tools=tools), new, cached=False
        )
        expanded, position_ids, inputs, images = self._expand(token_ids, pictures, seen=prompt.images)
        return replace(
            prompt,
            text=text,
            token_ids=expanded,
            engine_token_ids=token_ids,
            position_ids=position_ids,
            images=images,
            model_inputs=inputs if pictures else prompt.model_inputs,
            messages=extend(new),
        )

    # --- what an environment answers ----------------------------------------------------------------------------------

    def continuation(
        self, turn_token_ids: Sequence[int], new_messages: Sequence[Mapping[str, object]], *, closed: bool
    ) -> Continuation:
        """Render what stands behind a turn: its end, the new messages, and the beginning of the policy's next turn.

        The cost depends on the new messages only: a short conversation stands in the place of the history.

        Args:
            turn_token_ids: the turn as sampled; it is not tokenized again.
            new_messages: see `r1_data.turns.observations.read_messages`.
            closed: the policy ended the turn with an end token. Otherwise, after a limit or a stop string, the end
                token is part of the continuation.

        Raises:
            DataError: messages of another kind, or such as the template refuses.
            MediaError: a picture that cannot be used.
        """
        messages, pictures = read_messages(new_messages)
        if not messages:
            raise DataError("an environment that goes on must answer with at least one message")
        text, token_ids = self._encoder.encode(self._behind, messages)
        last = turn_token_ids[-1] if turn_token_ids else None
        text, token_ids = self._without_end(text, token_ids, last, closed)
        expanded, position_ids, inputs, images = self._expand(token_ids, pictures)
        return Continuation(expanded, token_ids, position_ids, inputs, images, text, tuple(messages))

    def fork(
        self, prompt: Prompt, messages: Sequence[Message], text: str, images: "Sequence[Image]" = ()
    ) -> Prompt | None:
        """Return the conversation as the template shows it now, None if that is the text which the policy has seen.

        With `history` sampled it is always None. The prompt begins a new path of the episode.

        Args:
            prompt: the episode's first, rendered from an example as `tool_prompt` returned it.
            messages: all turns and answers since: turns as decoded, answers as in `Continuation.messages`.
            text: that the policy has seen, up to and with the last continuation: the text of its prompt, its turns as
                `decode_turn` returns them, and the continuations'.
            images: all pictures so far, decoded and resized: the prompt's and those of continuations.

        Raises:
            DataError: messages that the template refuses, or a prompt with videos.
        """
        if self.history == "sampled":
            return None
        if prompt.videos:
            raise DataError(f"{prompt.id}: multi_turn.history=template cannot be used for rows with videos")
        later = [self._as_written(message) for message in messages]
        tools = self.tool_prompt.written_by_template(prompt.metadata)

        def write(later: Sequence[Message]) -> str:
            return self._writer.write([*prompt.messages, *self._shown(later)], tools=tools)

        if write(later) == text:
            return None
        forked, token_ids = self._encoder.encode(write, later, cached=False)
        expanded, position_ids, inputs, _ = self._expand(token_ids, seen=images)
        return replace(
            prompt,
            text=forked,
            token_ids=expanded,
            engine_token_ids=token_ids,
            position_ids=position_ids,
            images=tuple(images),
            model_inputs=inputs,
            messages=[*prompt.messages, *later],
        )

    # --- parts of both ------------------------------------------------------------------------------------------------

    def _behind(self, messages: Sequence[Message]) -> str:
        shown = self._shown(messages)
        if self.info.results == "call" and any(message["role"] == "tool" for message in shown):
            return self.info.call_end + self._writer.behind_calls(shown, tools=self._later_tools)
        return self._writer.behind_turn(shown, tools=self._later_tools)

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages in the roles in which the template writes them; assistants' as they are."""
        shown: list[Message] = []
        for as_is, group in groupby(messages, key=lambda message: message["role"] in ("assistant", "system")):
            run = list(group)
            shown += run if as_is else self._answers(run)
        return shown

    def _answers(self, messages: list[Message]) -> list[Message]:
        results = [message for message in messages if message["role"] == "tool"]
        pictures = any(isinstance(result["content"], list) for result in results) and not self.info.tool_pictures
        if pictures or (self.info.results == "user" and (results or len(messages) > 1)):
            messages = as_user_messages(messages)
        if not self.info.user_pictures and any(
            message["role"] == "user" and isinstance(message["content"], list) for message in messages
        ):
            self.renderer.require_vision()
            raise MediaError("the chat template writes no placeholder for a picture behind a turn")
        return messages

    def _read(self, message: Mapping[str, object], pictures: list[PictureReference]) -> Message:
        if message.get("role") != "assistant":
            (read,), found = read_messages([message], roles=("system", "tool", "user"))
            pictures += found
            return read
        (read,), found = read_messages([{**message, "content": message.get("content") or ""}], roles=("assistant",))
        content = read["content"]
        if found or not isinstance(content, str):
            raise DataError("an assistant's message cannot have pictures")
        content = self._encoder.without_special(content)
        if "</think>" in content:
            content = self.info.prefill + content
        calls = message.get("tool_calls")
        if not isinstance(calls, list | tuple) or not calls:
            return {"role": "assistant", "content": content}
        calls = self._without_special(list(calls))
        if not self.info.writes_calls:
            return {"role": "assistant", "content": "\n".join([*filter(None, [content]), *map(write_call, calls)])}
        made = [make_call(call["name"], call["arguments"], call["id"]) for call in calls]
        return {"role": "assistant", "content": content, "tool_calls": made}

    def _without_special(self, value: Any) -> Any:
        """Leave out special tokens from all texts of a JSON value."""
        match value:
            case str():
                return self._encoder.without_special(value)
            case dict():
                return {self._without_special(key): self._without_special(item) for key, item in value.items()}
            case list() | tuple():
                return [self._without_special(item) for item in value]
        return value

    def _as_written(self, message: Message) -> Message:
        """Return a sampled turn with what its prompt began of it, and without special tokens; others as they are."""
        if message["role"] != "assistant":
            return message
        content = self._encoder.without_special(str(message["content"]))
        return {"role": "assistant", "content": self.info.prefill + content}

    def _without_end(self, text: str, token_ids: list[int], last: int | None, closed: bool) -> tuple[str, list[int]]:
        """Leave out the end token where the policy sampled it, or another one in its place."""
        ends = dict(zip(self.info.end_token_ids, self.info.end_tokens, strict=True))
        first = token_ids[0] if token_ids else None
        if first in ends and (first == last or (closed and len(ends) == 1)):
            return text.removeprefix(ends[first]), token_ids[1:]
        return text, token_ids

    def _expand(
        self, token_ids: list[int], media: Sequence[PictureReference] = (), *, seen: "Sequence[Image]" = ()
    ) -> "tuple[list[int], Tensor, dict[str, Tensor], tuple[Image, ...]]":
        """Return tokens with placeholders expanded, positions from 0, model inputs and pictures.

        `seen` are pictures before those of `media` that are resized already.
        """
        import torch

        vision = self.renderer.vision
        placeholders = 0 if vision is None else token_ids.count(vision.tokens["picture"][1])
        pictures = len(media) + len(seen)
        if placeholders != pictures:
            found = f"{placeholders} placeholders for {pictures} pictures"
            raise DataError(f"{found} behind a turn: the template drops them")
        if not pictures:
            return list(token_ids), self._text_positions(len(token_ids)), {}, ()
        vision = self.renderer.require_vision()
        try:
            images = [*map(from_pil, seen), *(vision.load(media).images if media else ())]
            inputs = vision.process_pictures(token_ids, images)
        except ValueError as error:
            raise MediaError(str(error)) from error
        if inputs is None:
            raise MediaError(
                "pictures behind a turn need a family whose placeholder of a picture is one repeated token"
            )
        expanded = inputs["input_ids"][0].tolist()
        position_ids = self.renderer.position_ids(torch.tensor(expanded), inputs).long()
        further = {name: value for name, value in inputs.items() if name not in PER_TOKEN}
        return expanded, position_ids, further, tuple(map(to_pil, images))

    def _text_positions(self, length: int) -> "Tensor":
        """Return the positions of text, which every rule counts alike on all axes."""
        import torch

        if self._text_axes is None:
            counted = self.renderer.position_ids(torch.zeros(2, dtype=torch.long), {})
            if not torch.equal(counted.long(), torch.arange(2).expand(len(counted), -1)):
                raise DataError("turns cannot be appended: the rule of position ids does not count the tokens of text")
            self._text_axes = len(counted)
        return torch.arange(length).expand(self._text_axes, -1)


def _choose(name: str, info: TemplateInfo, has_tools: bool) -> str:
    if name != "auto":
        return name
    if not info.call_format and info.writes_calls and info.shows_tools and has_tools:
        raise DataError(
            "no format of r1 reads the calls that the chat template writes; set multi_turn.format to one of "
            f"{', '.join(sorted(FORMATS))}: r1 then writes the tools' schemas itself"
        )
    return info.call_format or "hermes"
