"""Dataset rows (`Example`, `Conversation`), their renderings (`Prompt`, `Demonstration`), and the errors of rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

Row: TypeAlias = dict[str, object]  # of a dataset: column -> cell
Message: TypeAlias = dict[str, Any]  # "role", "content", and other fields that a chat template reads
JsonObject: TypeAlias = dict[str, Any]  # e.g. the OpenAI schema of a tool
PictureReference: TypeAlias = "bytes | Path | Url | Image"
MediaReference: TypeAlias = "PictureReference | Video"
Turns = Literal["all", "each", "last"]  # which assistant messages of a conversation are trained
Truncation = Literal["error", "drop", "right"]  # of a conversation over the limit: refused, left out, or cut
Item = TypeVar("Item", bound="Example | Conversation")  # what a row is read to
Rendered = TypeVar("Rendered")  # what an item is rendered to


class DataError(ValueError):
    """A row, file or picture that cannot be used; the message names file and row, and what to do."""

    kind = "row"  # of trouble, for counts

    def __init__(self, message: object = "") -> None:
        """Characters that cannot be printed, such as half of a surrogate pair, are escaped."""
        super().__init__(str(message).encode("utf-8", "backslashreplace").decode())


class MissingColumn(DataError):
    kind = "missing column"


class EmptyCell(DataError):
    kind = "empty"


class Blank(DataError):
    """A row whose prompt has no visible character and no media."""

    kind = "blank"


class Overlong(DataError):
    """A row over the limit of tokens or bytes; its exact number of tokens was not measured."""

    kind = "overlong"


class MarkerMismatch(DataError):
    kind = "markers"


class NoAnswer(DataError):
    """A row without an answer to train on, or with an empty one."""

    kind = "no answer"


class RoleOrder(DataError):
    kind = "roles"


class BadPair(DataError):
    """Two answers that cannot be compared, or a row without the answers that the loss compares."""

    kind = "pair"


class MediaError(DataError):
    """A picture or video that cannot be used; the rest of its row may be fine."""

    kind = "media"


@dataclass(frozen=True, slots=True)
class Downloads:
    """Limits of downloads over http and https."""

    max_bytes: int = 64 * 2**20  # of one file
    timeout: float = 20.0  # seconds for one file


@dataclass(frozen=True, slots=True)
class Url:
    """A picture or video on the network, downloaded at each read, because its content may change."""

    address: str
    downloads: Downloads

    def __str__(self) -> str:
        return self.address


@dataclass(frozen=True, slots=True)
class Video:
    """A video: an encoded file, or its frames as picture references.

    Example: `Video(Path("clips/7.mp4"))`, `Video((b"\\x89PNG…", b"\\x89PNG…"), fps=2.0)`
    """

    source: "bytes | Path | Url | tuple[PictureReference, ...]"
    fps: float | None = None  # of frames; None: the sampling rate


@dataclass(frozen=True, slots=True)
class Example:
    """A dataset row before rendering."""

    id: str  # stable over runs and machines: "file name:row number"
    messages: list[Message]  # OpenAI style, with media items
    media: tuple[MediaReference, ...]  # one reference per media item, in order
    ground_truth: str
    metadata: Mapping[str, object] = field(default_factory=dict)  # the row's other columns, and its data_source
    source: str = ""  # which of several sources the row is from
    tools: tuple[JsonObject, ...] = ()  # OpenAI schemas that the chat template shows

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells the row from others, beside its media."""
        return self.id, self.messages, self.ground_truth

    def as_asked(self) -> "Example":
        """Return the example with its messages, media and tools only, which are all that the model gets."""
        return Example(self.id, self.messages, self.media, "", tools=self.tools)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle in a third of the time of a dataclass with slots."""
        fields = (self.id, self.messages, self.media, self.ground_truth, self.metadata, self.source, self.tools)
        return Example, fields


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt for the learner and the engine; stored once, shared by its whole group.

    The learner uses `token_ids`, in which each picture or video is expanded to its placeholders. An engine with its own
    processor uses `engine_token_ids` (one placeholder each), `images` and `videos`.
    """

    id: str
    text: str  # the rendered chat, for logs
    token_ids: list[int]  # [prompt_length], placeholders expanded
    engine_token_ids: list[int]  # [<= prompt_length], one placeholder per picture or video
    position_ids: "Tensor"  # int64 [axes, prompt_length]; one axis for text models, four for M-RoPE
    ground_truth: str
    images: "Sequence[Image]" = ()  # decoded and resized: what the model sees
    # Further forward arguments, e.g. pixel_values; `r1_data.model_inputs.LazyInputs` loads them when first read.
    model_inputs: "Mapping[str, Tensor]" = field(default_factory=dict)
    metadata: Mapping[str, object] = field(default_factory=dict)
    messages: Sequence[Message] = ()  # the chat before rendering, for rewards that read conversations
    source: str = ""  # which of several sources the row is from
    videos: "Sequence[Tensor]" = ()  # decoded and resized, uint8 [frames, 3, height, width] each

    def __post_init__(self) -> None:
        if self.position_ids.shape[-1] != len(self.token_ids):
            raise DataError(
                f"prompt {self.id}: {len(self.token_ids)} tokens but {self.position_ids.shape[-1]} position ids"
            )


@dataclass(frozen=True, slots=True)
class Conversation:
    """A row for fine-tuning before rendering."""

    id: str  # stable over runs and machines: "file name:row number"
    # OpenAI style, with media items and at least one assistant message. Further keys of a message are kept:
    # `tool_calls`, `reasoning_content`, `name`; `weight: 0` or `train: false` excludes an answer from the loss.
    messages: list[Message]
    media: tuple[MediaReference, ...] = ()  # one reference per media item, in order
    tools: tuple[JsonObject, ...] = ()  # OpenAI schemas that the chat template shows
    metadata: Mapping[str, object] = field(default_factory=dict)  # the row's other columns
    source: str = ""  # which of several sources the row is from
    # Of a preference row: the messages of the worse answer. Those of the better one end `messages`; the messages before
    # are the prompt of both.
    rejected: list[Message] | None = None
    label: bool | None = None  # of a KTO row: whether the ending is desired
    template_kwargs: Mapping[str, object] = field(default_factory=dict)  # of the row, e.g. `enable_thinking`
    # How many messages stand before the better answer; None: those up to the last that is a user's or a system's.
    prompt_messages: int | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells the row from others, beside its media."""
        rest = (self.tools, self.rejected, self.label, sorted(self.template_kwargs.items()), self.prompt_messages)
        return (self.id, self.messages, *rest)

    def as_asked(self) -> "Conversation":
        """Return the conversation without its metadata, which are not rendered."""
        return replace(self, metadata={}, source="")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle in a third of the time of a dataclass with slots."""
        fields = (self.id, self.messages, self.media, self.tools, self.metadata, self.source)
        return Conversation, (*fields, self.rejected, self.label, self.template_kwargs, self.prompt_messages)


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A rendered conversation for the learner, and which of its tokens are trained."""

    id: str
    token_ids: list[int]  # [L], placeholders expanded
    loss_mask: list[bool]  # [L]; false on prompts, on tool results, and on what the generation prompt supplies
    position_ids: "Tensor"  # int64 [axes, L]; one axis for text models, four for M-RoPE
    model_inputs: "Mapping[str, Tensor]" = field(default_factory=dict)
    prompt_length: int = 0  # tokens before the first trained one
    source: str = ""  # which of several sources the row is from
    label: bool | None = None  # of a preference row: whether this is the better answer; of a KTO row: its label
    images: "Sequence[Image]" = ()  # decoded and resized, in the order of their placeholders
    videos: "Sequence[Tensor]" = ()  # decoded and resized, uint8 [frames, 3, height, width] each

    def __post_init__(self) -> None:
        lengths = len(self.token_ids), len(self.loss_mask), self.position_ids.shape[-1]
        if len(set(lengths)) > 1:
            raise DataError(f"conversation {self.id}: tokens, loss mask and position ids differ in length: {lengths}")


def json_columns(columns: Mapping[str, object]) -> Row:
    """Return the columns that can be written as JSON; bytes and dates cannot."""
    return {name: value for name, value in columns.items() if is_json(value)}


def is_json(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_json(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_json, value))
    return value is None or isinstance(value, str | int | float | bool)
