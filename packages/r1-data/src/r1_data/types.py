"""The two containers of a question: `Example` as the row says it, `Prompt` as a model reads it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor


class DataError(ValueError):
    """A row, file or picture that cannot be used; the message names the file, the row and what to do."""

    kind = "row"  # what sort of thing is wrong, for counts

    def __init__(self, message: object = "") -> None:
        """What cannot be printed, as half of a surrogate pair in a file's name, is written as an escape."""
        super().__init__(str(message).encode("utf-8", "backslashreplace").decode())


class MissingColumn(DataError):
    """A row without the column of its prompt or answer."""

    kind = "missing column"


class EmptyCell(DataError):
    """A row whose prompt or answer is null."""

    kind = "empty"


class Blank(DataError):
    """A row whose prompt shows nothing."""

    kind = "blank"


class Overlong(DataError):
    """A row that is certainly over the limit of tokens or of bytes; how long it is in tokens was not measured."""

    kind = "overlong"


class MarkerMismatch(DataError):
    """A row whose markers and media are not equal in number."""

    kind = "markers"


class MediaError(DataError):
    """A picture or a video that cannot be used; the rest of its row may be sound."""

    kind = "media"


@dataclass(frozen=True, slots=True)
class Example:
    """One row, before any model is known.

    Example: `Example("train.parquet:17", [{"role": "user", "content": [{"type": "image"}, {"type": "text",
    "text": "How many discs?"}]}], (b"\\x89PNG…",), "3", {"data_source": "shapes"})`
    """

    id: str  # stable over runs and machines: "file name:row number"
    messages: list[dict[str, Any]]  # OpenAI style; media items stand where the pictures belong
    media: tuple[Any, ...]  # one reference per media item, in order, not decoded: see `r1_data.references`
    ground_truth: str
    metadata: Mapping[str, Any] = field(default_factory=dict)  # the row's other columns, and its data_source
    source: str = ""  # which of several sources the row is from

    def as_asked(self) -> "Example":
        """The same without what the model is not shown."""
        return Example(self.id, self.messages, self.media, "")

    def __reduce__(self) -> tuple[Any, ...]:
        """In a third of the time that a dataclass with slots takes."""
        return Example, (self.id, self.messages, self.media, self.ground_truth, self.metadata, self.source)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question as the learner and the engine both read it; stored once, shared by its whole group.

    The learner takes `token_ids`, in which each picture or video already stands as its full run of placeholders; an
    engine with a processor of its own takes `engine_token_ids` (one placeholder each), `images` and `videos`.
    """

    id: str
    text: str  # the rendered chat, for logs
    token_ids: list[int]  # [prompt_length], placeholders expanded
    engine_token_ids: list[int]  # [<= prompt_length], one placeholder per picture or video
    position_ids: "Tensor"  # int64 [axes, prompt_length]; one axis for text models, four for M-RoPE
    ground_truth: str
    images: "Sequence[Image]" = ()  # decoded and resized into the pixel budget: what the model sees
    # Further forward arguments, e.g. pixel_values; `r1_data.model_inputs.LazyInputs` loads them when first read.
    model_inputs: "Mapping[str, Tensor]" = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()  # the chat before rendering, for rewards that read conversations
    source: str = ""  # which of several sources the row is from
    videos: "Sequence[Tensor]" = ()  # likewise, uint8 [frames, 3, height, width] each

    def __post_init__(self) -> None:
        if self.position_ids.shape[-1] != len(self.token_ids):
            raise DataError(
                f"prompt {self.id}: {len(self.token_ids)} tokens but {self.position_ids.shape[-1]} position ids"
            )


def json_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a data row that can be written as JSON; bytes and dates cannot."""
    return {name: value for name, value in columns.items() if is_json(value)}


def is_json(value: Any) -> bool:
    """Whether a value can be written as JSON."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_json(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_json, value))
    return value is None or isinstance(value, str | int | float | bool)
