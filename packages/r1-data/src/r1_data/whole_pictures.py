"""Read pictures by the processor's own call, for families whose processor cuts and resizes pictures by its own rule.

No model family is named here. The processor is tried once with pictures of several shapes: its inputs for all of them
must be those of each, joined along the first axis, because a batch of rows is joined so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from r1_data.pictures import from_pil, image_size, load_image, to_pil
from r1_data.references import Video, describe, fetched
from r1_data.types import MediaError, MediaReference, PictureReference
from r1_data.vision import PER_TOKEN, Pixels

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import ProcessorMixin

_SHAPES = ((90, 60), (60, 420), (900, 700))  # width, height
_KINDS = ("token_type_ids", "mm_token_type_ids")  # what says that pictures attend otherwise, or stand otherwise


@dataclass(frozen=True, slots=True)
class _Read:
    token_ids: list[int]  # in the place of the placeholder
    values: int  # of the model inputs


def unread_reason(processor: "ProcessorMixin") -> str | None:
    """Return why pictures cannot be read by the processor's own call; None if they can."""
    if _placeholder(processor) is None:
        return "it has no image_token that its tokenizer knows"
    from PIL.Image import new

    pictures = [from_pil(new("RGB", shape, "white")) for shape in _SHAPES]
    try:
        alone = [_call(processor, processor.image_token, [picture]) for picture in pictures]
        together = _call(processor, processor.image_token * len(pictures), pictures)
    except Exception as error:  # whatever a processor of an unknown family raises
        return f"its own call does not read pictures of several shapes ({error})"
    for name in _KINDS:
        if name in together and together[name].any():
            return f"its model needs {name} of pictures, which r1 does not hand on to it"
    if unjoined := _unjoined(alone, together):
        return f"{', '.join(unjoined)} of several pictures are not those of each, joined along the first axis"
    return None


class WholePictures:
    """Calls one processor, for which `unread_reason` is None, with pictures as they are.

    The processor alone decides the sizes. All media errors are MediaError.
    """

    def __init__(self, processor: "ProcessorMixin") -> None:
        self._processor = processor
        self._sizes: dict[tuple[int, int], _Read] = {}
        self.tokens: dict[str, tuple[str, int]] = {}
        if (placeholder := _placeholder(processor)) is not None:
            self.tokens["picture"] = placeholder

    def picture_ids(self, reference: PictureReference) -> list[int]:
        """Return the tokens in the place of a picture's placeholder."""
        return self._measure(reference).token_ids

    def picture_tokens(self, reference: PictureReference) -> int:
        return len(self.picture_ids(reference))

    def video_text(self, video: Video) -> str:
        raise self._no_videos(video)

    def count_values(self, media: Sequence[MediaReference]) -> int:
        """Return the number of values in the model inputs of media, from headers. Raises MediaError."""
        return sum(self._measure(self._picture(reference)).values for reference in map(fetched, media))

    def load(self, media: Sequence[MediaReference]) -> Pixels:
        """Decode pictures; they keep their size."""
        return Pixels([from_pil(load_image(self._picture(reference))) for reference in map(fetched, media)], [], [])

    def process(self, text: str, pixels: Pixels) -> "dict[str, Tensor]":
        """Call the processor with a rendered chat and its pictures."""
        return _call(self._processor, text, pixels.images)

    def process_pictures(self, token_ids: list[int], images: "Sequence[Tensor]") -> "dict[str, Tensor]":
        """Return what `process` does for token ids with a placeholder a picture; `images` are uint8 [3, H, W] each."""
        import torch

        token, token_id = self.tokens["picture"]
        outputs = [_call(self._processor, token, [image]) for image in images]
        runs = iter([output["input_ids"][0].tolist() for output in outputs])
        expanded = [t for one in token_ids for t in (next(runs) if one == token_id else (one,))]
        names = outputs[0].keys() - {*PER_TOKEN} if outputs else ()
        inputs = {name: torch.cat([output[name] for output in outputs]) for name in names}
        return {**inputs, "input_ids": torch.tensor([expanded])}

    def describe(self) -> str:
        """Return a cache key of all that determines token counts and pixels."""
        return repr([type(self._processor).__name__, self._processor.to_json_string()])

    def _measure(self, reference: PictureReference) -> _Read:
        from PIL.Image import new

        height, width = image_size(reference)
        if (width, height) not in self._sizes:
            try:
                output = _call(self._processor, self.tokens["picture"][0], [from_pil(new("RGB", (width, height)))])
            except ValueError as error:
                raise MediaError(f"{describe(reference)}: {error}") from error
            values = sum(value.numel() for name, value in output.items() if name not in PER_TOKEN)
            self._sizes[width, height] = _Read(output["input_ids"][0].tolist(), values)
        return self._sizes[width, height]

    def _picture(self, reference: MediaReference) -> PictureReference:
        if isinstance(reference, Video):
            raise self._no_videos(reference)
        return reference

    def _no_videos(self, video: Video) -> MediaError:
        name = describe(video.source, "video")
        return MediaError(f"{name}: videos of {type(self._processor).__name__} cannot be used, only its pictures")


def _placeholder(processor: "ProcessorMixin") -> tuple[str, int] | None:
    token: str | None = getattr(processor, "image_token", None)
    token_id = None if token is None else processor.tokenizer.convert_tokens_to_ids(token)
    if token is None or token_id is None or token_id == processor.tokenizer.unk_token_id:
        return None
    return token, int(token_id)


def _call(processor: "ProcessorMixin", text: str, images: "Sequence[Tensor]") -> "dict[str, Tensor]":
    import torch

    pictures = {"images": [to_pil(image) for image in images]} if images else {}
    output = processor(text=[text], text_kwargs={"add_special_tokens": False}, return_tensors="pt", **pictures)
    return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}


def _unjoined(alone: "Sequence[Mapping[str, Tensor]]", together: "Mapping[str, Tensor]") -> list[str]:
    """Return the names of inputs that are not those of each picture, joined."""
    import torch

    names = sorted({*together, *(name for one in alone for name in one)})
    if "input_ids" not in names or not {*names} - {*PER_TOKEN}:
        return names or ["no inputs"]
    wrong = []
    for name in names:
        parts = [one[name] for one in alone if name in one]
        axis = 1 if name in PER_TOKEN else 0
        try:
            same = name in together and torch.equal(torch.cat(parts, dim=axis), together[name])
        except (RuntimeError, IndexError):
            same = False
        if not same:
            wrong.append(name)
    return wrong
