"""Render an example to a `Prompt`, used alike by the length filter, the engine and the learner."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from r1_data.media_cache import MediaCache
from r1_data.pictures import to_pil
from r1_data.positions import PositionIds, count_tokens, find_rule
from r1_data.references import Video
from r1_data.tokens import check_length, encode_all
from r1_data.types import (
    Conversation,
    DataError,
    Example,
    JsonObject,
    MediaError,
    MediaReference,
    Message,
    Overlong,
    Prompt,
)
from r1_data.videos import FrameRules
from r1_data.vision import PER_TOKEN, Pixels, Vision, unsupported_reason
from r1_data.whole_pictures import WholePictures

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

_RULES = "2"  # increment when the same example gets another length


class Renderer:
    """Renders examples for one model: a tokenizer for text models, a processor for vision-language models.

    The processor resizes media once. Its rule and the size in a header give the prompt's length without decoding.
    """

    def __init__(
        self,
        processor: "PreTrainedTokenizerBase | ProcessorMixin",
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        position_ids: PositionIds | None = None,
        video_min_pixels: int | None = None,
        video_max_pixels: int | None = None,
        frames: FrameRules | None = None,
        cache: MediaCache | None = None,
    ) -> None:
        """Raises DataError: no chat template, an argument that it does not read, or min_pixels above max_pixels.

        With a processor of an unknown family, rows with media are refused.

        Args:
            processor: a Hugging Face tokenizer, or a processor with an image processor.
            min_pixels, max_pixels: height × width of a resized picture, and of a video's frame by the rule of
                qwen-vl-utils; None: as the processor is configured.
            chat_template: Jinja text that replaces the model's chat template.
            chat_template_kwargs: additional arguments of the template, e.g. `enable_thinking`.
            video_min_pixels, video_max_pixels: see `Vision`.
            frames: which frames of a video are sampled; None: two a second, as many as the processor allows.
            cache: of resized media.
            position_ids: (token ids [L], processor output and `mm_token_type_ids` [1, L]: 0 text, 1 pictures, 2 videos)
                -> int64 [axes, L]; None: from the configuration beside the processor, see `r1_data.positions`.
        """
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self._processor: ProcessorMixin | None = processor if hasattr(processor, "image_processor") else None
        self._vision: Vision | WholePictures | None = None
        self._refusal: str | None = "the row has pictures or videos, but the model reads text only"
        if self._processor is not None:
            self._refusal = unsupported_reason(processor)
        if self._refusal is None:
            pixels = {"min_pixels": min_pixels, "max_pixels": max_pixels}
            video_pixels = {"video_min_pixels": video_min_pixels, "video_max_pixels": video_max_pixels}
            self._vision = Vision(processor, **pixels, **video_pixels, frames=frames, cache=cache)
        elif self._processor is not None:
            try:
                self._vision, self._refusal = WholePictures(processor), None
            except DataError as error:
                instead = "train on rows without pictures, or a model of docs/models.md whose pictures are read"
                self._refusal = f"pictures of {type(processor).__name__} cannot be used: {error}; {instead}"
        self._template = chat_template or processor.chat_template
        if not (self._template or self.tokenizer.chat_template):
            raise DataError("the model has no chat template; give one (data.override_chat_template)")
        self._template_kwargs = dict(chat_template_kwargs or {})
        _check_template_kwargs(self._template or self.tokenizer.chat_template, self._template_kwargs)
        self._position_ids = position_ids
        if position_ids is None and self._processor is None:
            self._position_ids = count_tokens

    def prompt_length(self, example: Example) -> int:
        """Return the prompt length, from media headers. Raises as `render`."""
        (length,) = self.measure([example])
        if isinstance(length, DataError):
            raise length
        return length

    def measure(self, examples: Sequence[Example], limit: int | None = None) -> list[int | DataError]:
        """Return the prompt length of each example, or its error; texts are tokenized together.

        A long text is tokenized only until it exceeds `limit` tokens: it is `Overlong`.
        """
        found: list[str | DataError] = []
        for example in examples:
            try:
                found.append(written := self._write(example))
                check_length(self.tokenizer, written, limit, f"{example.id}: the prompt", "max_prompt_length")
            except Overlong as error:
                found[-1] = error
            except DataError as error:
                found.append(error)
        texts = [text for text in found if isinstance(text, str)]
        try:
            tokens = iter(encode_all(self.tokenizer, texts))
        except (TypeError, ValueError, OverflowError):  # tokenized one by one below to find which
            tokens = None
        lengths: list[int | DataError] = []
        for example, text in zip(examples, found, strict=True):
            try:
                if isinstance(text, DataError):
                    raise text
                token_ids = self._tokenize(example, text) if tokens is None else self._checked(example, next(tokens))
                lengths.append(self._length(example, text, token_ids))
            except DataError as error:
                lengths.append(error)
        return lengths

    def _length(self, example: Example, text: str, token_ids: list[int]) -> int:
        if self._vision is None or not example.media:
            return len(token_ids)
        pictures = [reference for reference in example.media if not isinstance(reference, Video)]
        videos = [reference for reference in example.media if isinstance(reference, Video)]
        try:
            placeholders = [self._vision.video_text(video) for video in videos]
            added = self._vision.added_tokens(pictures)
        except ValueError as error:  # a MediaError, or the processor's own: a picture 200 times as wide as high
            raise MediaError(f"{example.id}: {error}") from error
        if videos:
            pieces = text.split(self._vision.tokens["video"][0])
            text = "".join(part for pair in zip(pieces, [*placeholders, ""], strict=True) for part in pair)
            token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return len(token_ids) + added

    def count_values(self, example: Example | Conversation) -> int:
        """Return the number of values in the model inputs, from media headers. Raises MediaError that names the row."""
        try:
            return self._vision.count_values(example.media) if self._vision is not None else 0
        except ValueError as error:
            raise MediaError(f"{example.id}: {error}") from error

    def fingerprint(self) -> str:
        """Return a hash of everything but the example that determines a prompt's length."""
        import transformers

        parts = [_RULES, transformers.__version__, repr(self._template or self.tokenizer.chat_template)]
        parts += [repr(sorted(self._template_kwargs.items())), self._vision.describe() if self._vision else ""]
        tokenizer = self.tokenizer
        parts.append(tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(tokenizer))
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()

    def load(self, example: Example | Conversation) -> Pixels:
        """Decode and resize the media of an example, the only step that untrusted data can break. Raises MediaError."""
        if self._vision is None:
            return Pixels([], [], [])
        try:
            return self._vision.load(example.media)
        except ValueError as error:
            raise MediaError(f"{example.id}: {error}") from error

    @property
    def vision(self) -> Vision | WholePictures | None:
        """Resizes and processes media as for prompts; None if the model's media cannot be used."""
        return self._vision

    def require_vision(self) -> Vision | WholePictures:
        """Return `vision`. Raises MediaError that says why there is none."""
        if self._vision is None:
            raise MediaError(self._refusal)
        return self._vision

    def describe_media(self) -> str:
        """Say how pictures are read, and whether videos are, in one line."""
        if self._vision is None:
            return str(self._refusal)
        how = "resized once, within data.min_pixels and data.max_pixels"
        how = "read by the processor's own call" if isinstance(self._vision, WholePictures) else how
        return f"{how}; videos " + ("are read, too" if self._vision.reads_videos else "are refused")

    @property
    def position_ids(self) -> PositionIds:
        """The rule of position ids. Raises DataError if the processor's model is unknown."""
        if self._position_ids is None:  # found late: lengths do not need it
            self._position_ids = find_rule(self._processor)
        return self._position_ids

    def render(self, example: Example, pixels: Pixels | None = None) -> Prompt:
        """Render and tokenize; `pixels` are those of `load`, which is called if they are not given.

        Raises DataError that names the row: unreadable media, media for a text model, media tokens spelled out in the
        text, or another number of placeholders than features.
        """
        import torch

        text = self._write(example)
        engine_token_ids = self._tokenize(example, text)
        pixels = self.load(example) if pixels is None else pixels
        inputs = self.process(example.id, text, engine_token_ids, pixels)
        token_ids = inputs["input_ids"][0].tolist() if inputs else list(engine_token_ids)
        position_ids = self.find_positions(example.id, torch.tensor(token_ids), inputs)
        return Prompt(
            id=example.id,
            text=text,
            token_ids=token_ids,
            engine_token_ids=engine_token_ids,
            position_ids=position_ids,
            ground_truth=example.ground_truth,
            images=tuple(map(to_pil, pixels.images)),
            videos=tuple(pixels.videos),
            model_inputs={name: value for name, value in inputs.items() if name not in PER_TOKEN},
            metadata=example.metadata,
            messages=example.messages,
            source=example.source,
        )

    def template_for(self, tools: Sequence[JsonObject] = ()) -> str:
        """Return the Jinja text that renders chats, which may differ for chats with tools."""
        return str(self.tokenizer.get_chat_template(self._template, list(tools) or None))

    def write_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        generation_prompt: bool = True,
        template: str | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Render messages to text with the chat template. Raises DataError if the template refuses them.

        Args:
            tools: OpenAI schemas, passed to the template.
            generation_prompt: whether the text ends where the model is to begin its turn.
            template: replaces the chat template.
            template_kwargs: of this chat, beside those of the constructor.
        """
        arguments = {**self._template_kwargs, **(template_kwargs or {})}
        if tools:
            arguments["tools"] = list(tools)
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=template or self._template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **arguments,
            )
        except Exception as error:  # a template may call any method of the row's values
            raise DataError(f"the chat template refuses these messages ({error})") from error
        return text

    def check_media(self, media: Sequence[MediaReference]) -> None:
        """Raise DataError if there are media but the model's cannot be used."""
        if media and self._refusal:
            raise DataError(self._refusal)

    def _write(self, example: Example) -> str:
        try:
            self.check_media(example.media)
            return self.write_chat(example.messages, tools=example.tools)
        except DataError as error:
            raise DataError(f"{example.id}: {error}") from error

    def _tokenize(self, example: Example, text: str) -> list[int]:
        try:
            return self._checked(example, self.tokenizer(text, add_special_tokens=False)["input_ids"])
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{example.id}: the prompt cannot be tokenized ({error})") from error

    def _checked(self, example: Example, token_ids: list[int]) -> list[int]:
        if not token_ids:
            raise DataError(f"{example.id}: the prompt is empty")
        try:
            self.check_placeholders(example.media, token_ids)
        except DataError as error:
            raise DataError(f"{example.id}: {error}") from error
        return token_ids

    def check_placeholders(self, media: Sequence[MediaReference], token_ids: list[int]) -> None:
        """Raise DataError unless every picture and video has one placeholder in a rendered chat."""
        if self._vision is None:
            return
        videos = sum(isinstance(reference, Video) for reference in media)
        expected = {"picture": len(media) - videos, "video": videos}
        for kind, (token, token_id) in self._vision.tokens.items():
            found = token_ids.count(token_id)
            if found != expected[kind]:
                raise DataError(
                    f"{found} {kind} placeholders in the prompt for {expected[kind]} {kind}s; the text must not spell "
                    f"{token}, and the chat template must place each {kind} once"
                )

    def process(self, row: str, text: str, engine_token_ids: list[int], pixels: Pixels) -> "dict[str, Tensor]":
        """Return the processor's output for a rendered chat and its media; empty for a text model.

        Raises DataError that names the row: another number of placeholders than features.
        """
        if self._vision is None:
            return {}
        try:
            if isinstance(self._vision, WholePictures):  # its call has checked that placeholders are features
                return self._vision.process(text, pixels)
            inputs = None if pixels.videos else self._vision.process_pictures(engine_token_ids, pixels.images)
            if inputs is None:
                inputs = self._vision.process(text, pixels)
        except ValueError as error:
            raise MediaError(f"{row}: {error}") from error
        features = self._vision.count_features(inputs)
        for kind, (_, token_id) in self._vision.tokens.items():
            placeholders = int((inputs["input_ids"] == token_id).sum())
            if placeholders != features[kind]:
                found = f"{placeholders} {kind} placeholders but {features[kind]} {kind} features"
                raise DataError(f"{row}: {found}")
        return inputs

    def find_positions(self, row: str, token_ids: "Tensor", inputs: "Mapping[str, Tensor]") -> "Tensor":
        """Return the position ids, int64 [axes, L], of token ids [L]. Raises DataError that names the row."""
        find_positions = self.position_ids
        try:
            return find_positions(token_ids, inputs).long()
        except (ValueError, RuntimeError, StopIteration) as error:
            raise DataError(f"{row}: no position ids for this prompt ({error})") from error


def _check_template_kwargs(template: object, kwargs: Mapping[str, object]) -> None:
    if not kwargs or not isinstance(template, str):
        return
    from jinja2 import TemplateSyntaxError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        read = meta.find_undeclared_variables(environment.parse(template))
    except TemplateSyntaxError:  # a tag of transformers, or a broken template: raised when it is rendered
        return
    for name in kwargs:
        if name not in read:
            raise DataError(f"the chat template has no argument {name!r}; it reads {', '.join(sorted(read))}")
