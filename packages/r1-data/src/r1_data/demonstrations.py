"""Render conversations to demonstrations: tokens, and which of them are trained."""

import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from r1_data.assistant import AnswerFinder, Found
from r1_data.dataset import BadRows, LengthLimit, Overlength, RowDataset
from r1_data.pictures import to_pil
from r1_data.prefetch import PromptMemory
from r1_data.references import Video
from r1_data.render import Renderer
from r1_data.tokens import check_length, encode_pieces
from r1_data.turns.encoding import SafeEncoder
from r1_data.types import (
    Conversation,
    DataError,
    Demonstration,
    MediaError,
    MediaReference,
    Message,
    Row,
    Truncation,
    Turns,
)
from r1_data.vision import PER_TOKEN, Pixels
from r1_data.workers import Workers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RULES = "2"  # increment when the same conversation gets another length or mask
_MEDIA = ("image", "video")  # types of content items


class ConversationRenderer:
    """Renders conversations with one renderer, which prompts have, too, so that their tokens are alike.

    Special tokens that a message's text spells are tokenized as plain characters. Tags that are no special tokens, such
    as `<think>`, are tokens, as in prompts.
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        turns: Turns = "all",
        train_on_prompt: bool = False,
        max_length: int | None = None,
        truncation: Truncation = "error",
    ) -> None:
        """Store the settings.

        Args:
            turns: which answers are trained. all: every answer of one demonstration. each: a demonstration per answer,
                which ends there, as the template renders the conversation up to it. last: the last answer.
                Of a row with a preference or a label, it is always the last answer.
            train_on_prompt: whether prompts and tool results are trained, too.
            max_length: tokens of a demonstration, media included.
            truncation: of what is longer. right: it is cut. error, drop: a dataset refuses it, or leaves it out.
        """
        self.renderer, self._turns, self._train_on_prompt = renderer, turns, train_on_prompt
        self.max_length, self.truncation = max_length, truncation
        self._cut = max_length if truncation == "right" else None
        self.tokenizer: PreTrainedTokenizerBase = renderer.tokenizer
        self._finder = AnswerFinder(renderer)
        self._encoder = SafeEncoder(renderer.tokenizer)

    def render(self, conversation: Conversation, pixels: Pixels | None = None) -> tuple[Demonstration, ...]:
        """Render and tokenize: one demonstration, or several for `turns` each, or (better, worse) of a preference row.

        `pixels` are those of `load`, which is called if they are not given.

        Raises:
            DataError: names row, message and template, and what to do: an answer that cannot be found, no trained
                token, tools that the template ignores, and all that `Renderer.render` refuses.
        """
        pixels = self.load(conversation) if pixels is None else pixels
        return tuple(self._demonstrate(path, layout, pixels) for path, layout in self._lay_out(conversation))

    def measure(self, conversations: Sequence[Conversation], limit: int | None = None) -> list[int | DataError]:
        """Return the length of each conversation's longest demonstration, without decoding media, or its error.

        A text that certainly exceeds `limit` tokens is `Overlong`, and not tokenized further. Lengths are those before
        anything is cut.
        """
        lengths: list[int | DataError] = []
        for conversation in conversations:
            try:
                lengths.append(max(layout.length for _, layout in self._lay_out(conversation, limit)))
            except DataError as error:
                lengths.append(error)
        return lengths

    def survey(self, conversation: Conversation, limit: int | None = None) -> list["Survey"]:
        """Return what each demonstration shows and trains, without decoding media. Raises DataError, as `render`."""
        return [
            Survey(layout.text, layout.trained, layout.length, sum(layout.mask[: self._cut]), layout.hidden)
            for _, layout in self._lay_out(conversation, limit)
        ]

    def load(self, conversation: Conversation) -> Pixels:
        """Decode and resize the media of a conversation. Raises MediaError."""
        return self.renderer.load(conversation)

    def count_values(self, conversation: Conversation) -> int:
        """As `Renderer.count_values`."""
        return self.renderer.count_values(conversation)

    def fingerprint(self) -> str:
        """Return a hash of everything but the conversation that determines lengths."""
        return f"{self.renderer.fingerprint()} {_RULES} {self._turns} {self._train_on_prompt} {self._cut}"

    def _lay_out(self, conversation: Conversation, limit: int | None = None) -> "list[tuple[_Path, _Layout]]":
        paths = [*_paths(conversation, self._turns)]
        if not any(path.answers for path in paths):
            raise DataError(
                f"{conversation.id}: the conversation has no answer to train: a message of the assistant behind "
                "another message, without weight: 0 or train: false"
            )
        try:
            self.renderer.check_media(conversation.media)
            self._check_tools(conversation)
            found = [(path, self._lay_out_path(path, limit)) for path in paths]
        except DataError as error:
            raise type(error)(f"{conversation.id}: {error}") from error
        trained = [(path, layout) for path, layout in found if any(layout.mask[: self._cut])]
        if not trained or (len(trained) < len(paths) and conversation.rejected is not None):
            within = "" if self._cut is None else f" within the first {self._cut} tokens"
            raise DataError(f"{conversation.id}: no token of an answer is left to train{within}")
        return trained

    def _check_tools(self, conversation: Conversation) -> None:
        if conversation.tools and "tools" not in self.renderer.template_for(conversation.tools):
            raise DataError(
                "the row has tools, but the chat template never reads them; write them into the system message, or "
                "give another template (data.override_chat_template)"
            )

    def _lay_out_path(self, path: "_Path", limit: int | None) -> "_Layout":
        conversation = path.conversation
        found = self._finder.find(path.messages, tools=conversation.tools, template_kwargs=conversation.template_kwargs)
        check_length(self.tokenizer, found.text, limit, "the conversation", "max_length")
        others = [(span.start, span.stop) for span in found.spans if span.message not in path.answers]
        trained = [(span.start, span.stop) for span in found.spans if span.message in path.answers]
        if self._train_on_prompt:
            trained = _outside(others, len(found.text))
        token_ids, mask = self._tokenize(found.text, trained, found.plain)
        self.renderer.check_placeholders(path.media, token_ids)
        expanded, text = token_ids, found.text
        if videos := [reference for reference in path.media if isinstance(reference, Video)]:
            text, move = self._write_videos(found, videos)
            expanded, mask = self._tokenize(text, [(move(start), move(stop)) for start, stop in trained], ())
        expanded, mask = self._expand_pictures(path, expanded, mask)
        mask[:1] = [False]  # nothing predicts the first token
        return _Layout(found.text, token_ids, expanded, mask, tuple(trained), len(found.hidden))

    def _tokenize(
        self, text: str, trained: Sequence[tuple[int, int]], plain: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[bool]]:
        """Return tokens, of which none extends over an end of a trained range, and which of them are trained."""
        token_ids, offsets, cuts = list[int](), list[tuple[int, int]](), sorted({*chain.from_iterable(trained)})
        bounds = [0, *chain.from_iterable(plain), len(text)]
        try:
            for index, (start, stop) in enumerate(pairwise(bounds)):
                if index % 2:  # a special token that a message spells
                    piece = self._encoder.encode_plain(text[start:stop])
                    places = [(0, stop - start)] * len(piece)
                else:
                    own = [cut - start for cut in cuts if start < cut < stop]
                    piece, places = encode_pieces(self.tokenizer, text[start:stop], own) if start < stop else ([], [])
                token_ids += piece
                offsets += [(start + first, start + last) for first, last in places]
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"the conversation cannot be tokenized ({error})") from error
        return token_ids, _mask(offsets, trained)

    # --- pictures and videos ------------------------------------------------------------------------------------------

    def _write_videos(self, found: Found, videos: Sequence[Video]) -> tuple[str, Callable[[int], int]]:
        """Return the text with every video's placeholders written out, and where its characters move."""
        vision = self.renderer.require_vision()
        token, _ = vision.tokens["video"]
        if any(token in found.text[start:stop] for start, stop in found.plain):
            raise DataError(f"a row with videos must not spell {token} in its text")
        pieces = found.text.split(token)
        try:
            written = [vision.video_text(video) for video in videos]
        except ValueError as error:
            raise MediaError(str(error)) from error
        text = "".join(part for pair in zip(pieces, [*written, ""], strict=True) for part in pair)
        places = [*accumulate(len(piece) + len(token) for piece in pieces[:-1])]
        longer = [0, *accumulate(len(one) - len(token) for one in written)]
        return text, lambda place: place + longer[bisect_right(places, place)]

    def _expand_pictures(self, path: "_Path", token_ids: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
        pictures = [reference for reference in path.media if not isinstance(reference, Video)]
        if not path.media:
            return token_ids, mask
        vision = self.renderer.require_vision()
        try:
            written = iter(vision.row_ids(pictures))
        except ValueError as error:
            raise MediaError(str(error)) from error
        media = {token_id for _, token_id in vision.tokens.values()}
        token_id = vision.tokens["picture"][1]
        runs = [next(written) if token == token_id else [token] for token in token_ids]
        expanded = [token for run in runs for token in run]
        # A placeholder is never sampled, so it is never trained.
        trained = [
            own and token not in media for token, own, run in zip(token_ids, mask, runs, strict=True) for _ in run
        ]
        return expanded, trained

    def _demonstrate(self, path: "_Path", layout: "_Layout", pixels: Pixels) -> Demonstration:
        import torch

        conversation = path.conversation
        pictures = sum(not isinstance(reference, Video) for reference in path.media)
        videos = len(path.media) - pictures
        own = Pixels(pixels.images[:pictures], pixels.videos[:videos], pixels.clips[:videos])
        inputs = self.renderer.process(conversation.id, layout.text, layout.engine_token_ids, own)
        token_ids, mask = layout.token_ids, layout.mask
        if inputs and inputs["input_ids"][0].tolist() != token_ids:
            raise DataError(
                f"{conversation.id}: the processor writes other tokens than placeholders into this text, so that the "
                "answer's tokens cannot be found; a row with videos must not spell special tokens"
            )
        position_ids = self.renderer.find_positions(conversation.id, torch.tensor(token_ids), inputs)
        if self._cut is not None and len(token_ids) > self._cut:
            self._check_cut(conversation.id, token_ids)
            token_ids, mask, position_ids = token_ids[: self._cut], mask[: self._cut], position_ids[:, : self._cut]
        return Demonstration(
            id=conversation.id,
            token_ids=token_ids,
            loss_mask=mask,
            position_ids=position_ids,
            model_inputs={name: value for name, value in inputs.items() if name not in PER_TOKEN},
            prompt_length=mask.index(True),
            source=conversation.source,
            label=path.label,
            images=tuple(map(to_pil, own.images)),
            videos=tuple(own.videos),
        )

    def _check_cut(self, row: str, token_ids: Sequence[int]) -> None:
        vision = self.renderer.vision
        media = {token_id for _, token_id in vision.tokens.values()} if vision is not None else {}
        if any(token in media for token in token_ids[self._cut :]):
            raise DataError(
                f"{row}: cut at {self._cut} tokens, the conversation loses a picture or video; drop the row"
            )


class ConversationDataset(RowDataset[Conversation, tuple[Demonstration, ...]]):
    """Rows as demonstrations: `dataset[i]` renders the i-th kept row, which may have several."""

    def __init__(
        self,
        rows: Sequence[tuple[str, Row]] | Sequence[Mapping[str, object]],
        renderer: ConversationRenderer,
        reader: Callable[[str, Mapping[str, object]], Conversation],
        *,
        bad_rows: BadRows = "refuse",
        progress: Callable[[int, int], None] | None = None,
        memory: PromptMemory | None = None,
        workers: Workers | None = None,
        known_lengths: str | Path | None = None,
    ) -> None:
        """As `RowDataset`, which has the other arguments. `renderer` has the limit and what happens beyond it."""
        overlong: dict[Truncation, Overlength] = {"error": "error", "drop": "skip", "right": "cut"}
        limit = LengthLimit(
            renderer.max_length or sys.maxsize, "max_length", "conversation", overlong[renderer.truncation]
        )
        super().__init__(
            rows,
            reader,
            renderer,
            limit,
            bad_rows=bad_rows,
            progress=progress,
            memory=memory,
            workers=workers,
            known_lengths=known_lengths,
        )

    def length_of(self, rendered: tuple[Demonstration, ...]) -> int:
        return max(len(one.token_ids) for one in rendered)


@dataclass(frozen=True, slots=True)
class Survey:
    """What a demonstration shows and trains."""

    text: str  # as the chat template writes it
    trained: tuple[tuple[int, int], ...]  # ranges of its characters
    tokens: int  # media included, before anything is cut
    trained_tokens: int  # behind the cut, if there is one
    hidden: int  # answers whose reasoning the template leaves out


@dataclass(frozen=True, slots=True)
class _Path:
    """Messages that become one demonstration."""

    conversation: Conversation
    messages: Sequence[Message]
    answers: frozenset[int]  # the messages that are trained
    label: bool | None = None

    @property
    def media(self) -> Sequence[MediaReference]:
        contents = (message["content"] for message in self.messages if isinstance(message.get("content"), list))
        count = sum(part.get("type") in _MEDIA for content in contents for part in content)
        whole = self.messages is self.conversation.messages  # all are given, so that an excess is noticed
        return self.conversation.media if whole else self.conversation.media[:count]


@dataclass(frozen=True, slots=True)
class _Layout:
    text: str  # as the template writes it
    engine_token_ids: list[int]  # one placeholder per picture or video
    token_ids: list[int]  # placeholders expanded
    mask: list[bool]
    trained: tuple[tuple[int, int], ...]  # ranges of characters
    hidden: int  # answers whose reasoning the template leaves out

    @property
    def length(self) -> int:
        return len(self.token_ids)


def _paths(conversation: Conversation, turns: Turns) -> Iterator[_Path]:
    messages = conversation.messages
    if conversation.rejected is not None:
        start = conversation.prompt_messages
        start = _count_prompt(messages) if start is None else start
        for label, whole in ((True, messages), (False, [*messages[:start], *conversation.rejected])):
            yield _Path(conversation, whole, frozenset(_answers(conversation.id, whole, start)), label)
        return
    answers = _answers(conversation.id, messages)
    if turns == "each" and conversation.label is None:
        yield from (_Path(conversation, messages[: answer + 1], frozenset([answer])) for answer in answers)
        return
    chosen = answers[-1:] if turns == "last" or conversation.label is not None else answers
    yield _Path(conversation, messages, frozenset(chosen), conversation.label)


def _count_prompt(messages: Sequence[Message]) -> int:
    """Return how many messages stand before the last answer, which may call tools."""
    return max((i + 1 for i, message in enumerate(messages) if message["role"] not in ("assistant", "tool")), default=0)


def _answers(row: str, messages: Sequence[Message], start: int = 0) -> list[int]:
    """Return the messages of the assistant that are trained. Raises DataError for a weight that is not 0 or 1."""
    found = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index < max(start, 1):
            continue
        weight, train = message.get("weight"), message.get("train")
        if weight not in (None, 0, 1) or train not in (None, True, False):
            name, value = ("weight", weight) if weight not in (None, 0, 1) else ("train", train)
            raise DataError(
                f"{row}: message {index + 1} has {name}={value!r}; read are weight 0 and 1, train true and false"
            )
        if weight != 0 and train is not False:
            found.append(index)
    return found


def _outside(ranges: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    bounds = [0, *chain.from_iterable(sorted(ranges)), length]
    return [(start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True) if start < stop]


def _mask(offsets: Sequence[tuple[int, int]], trained: Sequence[tuple[int, int]]) -> list[bool]:
    """Return for each token whether its characters are in one of the trained ranges, which are in order."""
    mask, ranges = list[bool](), deque(trained)
    for start, _ in offsets:
        while ranges and ranges[0][1] <= start:
            ranges.popleft()
        mask.append(bool(ranges) and ranges[0][0] <= start)
    return mask
