"""Read pictures by the processor's own call, for families whose processor cuts and resizes pictures by its own rule.

No model family is named here. The processor is tried once with pictures of several shapes, to learn along which axis
its inputs of several pictures are those of each, joined; other axes may be filled with zeros at their end. Rows must be
joined so, too, along the first axis, because the learner joins them so. Where what it makes of a picture depends on the
others of its row, rows are measured whole, and later turns have no pictures.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from r1_data.model_inputs import join, joined_shape
from r1_data.pictures import from_pil, image_size, load_image, to_pil
from r1_data.references import Video, describe, fetched
from r1_data.types import DataError, MediaError, MediaReference, PictureReference
from r1_data.vision import KINDS, PER_TOKEN, Pixels

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import ProcessorMixin

_BETWEEN = " and "
_SHAPES = ((90, 60), (60, 420), (900, 700))  # width, height


@dataclass(frozen=True, slots=True)
class _Read:
    token_ids: list[int]  # in the place of the placeholder
    shapes: dict[str, tuple[int, ...]]  # of the model inputs


class WholePictures:
    """Calls one processor with pictures as they are.

    The processor alone decides the sizes. All media errors are MediaError.
    """

    reads_videos = False

    def __init__(self, processor: "ProcessorMixin") -> None:
        """Raises DataError that says why pictures cannot be read so."""
        self._processor = processor
        self._sizes: dict[tuple[int, int], _Read] = {}
        self.tokens = {"picture": _placeholder(processor)}
        self._axes = _find_axes(processor)  # of pictures, by the name of the input; None: rows are measured whole

    def row_ids(self, pictures: Sequence[PictureReference]) -> list[list[int]]:
        """Return the tokens in the place of each placeholder of a row, which has no other pictures."""
        if self._axes is not None or not pictures:
            return [self._measure(picture).token_ids for picture in pictures]
        apart = self._processor.tokenizer(_BETWEEN, add_special_tokens=False)["input_ids"]
        found = self._call_blank(pictures, _BETWEEN)["input_ids"][0].tolist()
        ends = [at for at in range(len(found)) if found[at : at + len(apart)] == apart]
        starts = [0, *(end + len(apart) for end in ends)]
        return [found[start:end] for start, end in zip(starts, [*ends, len(found)], strict=True)]

    def added_tokens(self, pictures: Sequence[PictureReference]) -> int:
        """Return how many tokens a row's pictures add to their placeholders."""
        return sum(len(run) - 1 for run in self.row_ids(pictures))

    def video_text(self, video: Video) -> str:
        raise self._no_videos(video)

    def count_values(self, media: Sequence[MediaReference]) -> int:
        """Return the number of values in the model inputs of media, from headers. Raises MediaError."""
        pictures = [self._picture(reference) for reference in map(fetched, media)]
        if self._axes is None and pictures:
            return sum(value.numel() for name, value in self._call_blank(pictures).items() if name not in PER_TOKEN)
        axes, shapes = self._axes or {}, [self._measure(picture).shapes for picture in pictures]
        names = shapes[0] if shapes else ()
        return sum(prod(joined_shape([one[name] for one in shapes], axes[name])) for name in names)

    def load(self, media: Sequence[MediaReference]) -> Pixels:
        """Decode pictures; they keep their size."""
        return Pixels([from_pil(load_image(self._picture(reference))) for reference in map(fetched, media)], [], [])

    def process(self, text: str, pixels: Pixels) -> "dict[str, Tensor]":
        """Call the processor with a rendered chat and its pictures, or its tokenizer if there are none."""
        if not pixels.images:  # some processors read no text alone
            tokenizer = self._processor.tokenizer
            return {"input_ids": tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]}
        return _call(self._processor, text, pixels.images)

    def process_pictures(self, token_ids: list[int], images: "Sequence[Tensor]") -> "dict[str, Tensor]":
        """Return what `process` does for token ids with a placeholder a picture; `images` are uint8 [3, H, W] each.

        Raises MediaError if what the processor makes of a picture depends on the others.
        """
        import torch

        axes = self._require_axes() if images else {}
        token, token_id = self.tokens["picture"]
        outputs = [_call(self._processor, token, [image]) for image in images]
        names = outputs[0].keys() - {*PER_TOKEN} if outputs else ()
        inputs = {name: join([output[name] for output in outputs], axes[name]) for name in names}
        for name in ("input_ids", *KINDS):
            if name == "input_ids" or any(name in output for output in outputs):
                runs = iter([output[name][0].tolist() for output in outputs])
                plain = [one if name == "input_ids" else 0 for one in token_ids]
                pairs = zip(token_ids, plain, strict=True)
                inputs[name] = torch.tensor([[t for one, own in pairs for t in _expand(one == token_id, own, runs)]])
        return inputs

    def describe(self) -> str:
        """Return a cache key of all that determines token counts and pixels."""
        return repr([type(self._processor).__name__, self._processor.to_json_string()])

    def _require_axes(self) -> dict[str, int]:
        if self._axes is None:
            where = f"pictures of {type(self._processor).__name__} cannot be added in later turns"
            raise MediaError(f"{where}: the tokens of a picture depend on the others of its row")
        return self._axes

    def _measure(self, reference: PictureReference) -> _Read:
        height, width = image_size(reference)
        if (width, height) not in self._sizes:
            output = self._call_blank([reference])
            shapes = {name: tuple(value.shape) for name, value in output.items() if name not in PER_TOKEN}
            self._sizes[width, height] = _Read(output["input_ids"][0].tolist(), shapes)
        return self._sizes[width, height]

    def _call_blank(self, pictures: Sequence[PictureReference], between: str = "") -> "dict[str, Tensor]":
        """Call the processor with blank pictures of the same sizes and text between them. Raises MediaError."""
        from PIL.Image import new

        sizes = [image_size(picture) for picture in pictures]
        blank = [from_pil(new("RGB", (width, height))) for height, width in sizes]
        try:
            return _call(self._processor, between.join([self.tokens["picture"][0]] * len(blank)), blank)
        except ValueError as error:
            raise MediaError(f"{', '.join(map(describe, pictures))}: {error}") from error

    def _picture(self, reference: MediaReference) -> PictureReference:
        if isinstance(reference, Video):
            raise self._no_videos(reference)
        return reference

    def _no_videos(self, video: Video) -> MediaError:
        name = describe(video.source, "video")
        return MediaError(f"{name}: videos of {type(self._processor).__name__} cannot be used, only its pictures")


def _expand(is_placeholder: bool, own: int, runs: "Iterator[list[int]]") -> Sequence[int]:
    return next(runs) if is_placeholder else (own,)


def _placeholder(processor: "ProcessorMixin") -> tuple[str, int]:
    # Some repeat another token for a picture than the one that a chat has in its place.
    token: str | None = getattr(processor, "image_placeholder_token", None) or getattr(processor, "image_token", None)
    token_id = None if token is None else processor.tokenizer.convert_tokens_to_ids(token)
    if token is None or token_id is None or token_id == processor.tokenizer.unk_token_id:
        raise DataError("it has no image_token that its tokenizer knows")
    return token, int(token_id)


def _call(processor: "ProcessorMixin", text: str, images: "Sequence[Tensor]") -> "dict[str, Tensor]":
    return _call_rows(processor, [text], [images])


def _call_rows(
    processor: "ProcessorMixin", texts: list[str], images: "Sequence[Sequence[Tensor]]"
) -> "dict[str, Tensor]":
    import torch

    rows = [[to_pil(image) for image in row] for row in images]
    pictures = {"images": rows} if any(rows) else {}
    how = {"text_kwargs": {"add_special_tokens": False, "padding": len(texts) > 1}, "return_tensors": "pt"}
    output = processor(text=texts, **how, **pictures)
    tensors = {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}
    if "image_grid_thw" in tensors and not {*KINDS} & {*tensors}:  # positions depend on both
        tensors["mm_token_type_ids"] = torch.tensor(processor.create_mm_token_type_ids(tensors["input_ids"].tolist()))
    # Some return pixels in half precision, whatever the model computes in.
    return {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}


# --- what the processor makes of several pictures ---------------------------------------------------------------------


def _find_axes(processor: "ProcessorMixin") -> dict[str, int] | None:
    """Return along which axis each input of several pictures is joined; None if a picture depends on its row.

    Raises DataError: the inputs of rows are not joined, or there are none.
    """
    from PIL.Image import new

    token, pictures = _placeholder(processor)[0], [from_pil(new("RGB", shape, "white")) for shape in _SHAPES]
    try:
        alone = [_call(processor, token, [picture]) for picture in pictures]
        together = _call(processor, token * len(pictures), pictures)
    except Exception as error:  # whatever a processor of an unknown family raises
        raise DataError(f"its own call does not read pictures of several shapes ({_first_line(error)})") from error
    names = sorted({*together, *(name for one in alone for name in one)})
    if unknown := [name for name in names if _is_per_token(together, name) and name not in PER_TOKEN]:
        raise DataError(f"its model needs {', '.join(unknown)} of every token, which r1 does not hand on to it")
    found = {name: _find_axis([one[name] for one in alone if name in one], together.get(name)) for name in names}
    axes = {name: axis for name, axis in found.items() if axis is not None}
    bad = [name for name, axis in found.items() if axis is None or (name in PER_TOKEN and axis != 1)]
    if bad or not {*axes} - {*PER_TOKEN}:
        if not bad:
            raise DataError("its own call returns nothing of a picture")
        if not _is_counted_alike(processor, pictures):
            raise DataError(f"what it makes of a picture depends on the rest of the row ({', '.join(bad)})")
        _check_rows(processor, {*together} - {*PER_TOKEN}, pictures)
        return None
    kept = {name: axis for name, axis in axes.items() if name not in PER_TOKEN}
    # Some inputs are there for large pictures only.
    if any(len({one[name].shape[1:] if name in one else None for one in [*alone, together]}) > 1 for name in kept):
        _check_rows(processor, kept, pictures)
    return kept


def _find_axis(alone: "Sequence[Tensor]", together: "Tensor | None") -> int | None:
    import torch

    if together is None:
        return None
    for axis in range(min(2, together.ndim)):
        try:
            if torch.equal(join(alone, axis), together):
                return axis
        except ValueError:
            break
    return None


def _is_counted_alike(processor: "ProcessorMixin", pictures: "Sequence[Tensor]") -> bool:
    """Whether pictures add as many tokens beside one another as with text between them."""
    token = _placeholder(processor)[0]
    try:
        found = [_call(processor, text.join([token] * len(pictures)), pictures) for text in ("", _BETWEEN)]
    except Exception:  # as above
        return False
    words = processor.tokenizer(_BETWEEN, add_special_tokens=False)["input_ids"]
    beside, apart = (one["input_ids"].shape[1] for one in found)
    return bool(apart == beside + len(words) * (len(pictures) - 1))


def _check_rows(processor: "ProcessorMixin", names: Collection[str], pictures: "Sequence[Tensor]") -> None:
    """Compare the processor's own batch of two rows with what the learner makes of them. Raises DataError."""
    import torch

    token, rows = _placeholder(processor)[0], [pictures[:2], pictures[2:]]
    try:
        apart = [_call(processor, token * len(row), row) for row in rows]
        batch = _call_rows(processor, [token * len(row) for row in rows], rows)
    except Exception as error:  # as above
        raise DataError(f"its own call does not read two rows with pictures ({_first_line(error)})") from error
    bad = []
    for name in sorted(names):
        parts = [one[name] for one in apart]
        if len({part.ndim for part in parts}) > 1 or not torch.equal(join(parts), batch[name]):
            bad.append(name)
    if bad:
        raise DataError(f"what it makes of a row depends on the others of the batch ({', '.join(bad)})")


def _is_per_token(output: "Mapping[str, Tensor]", name: str) -> bool:
    return name.endswith("token_type_ids") and output[name].shape == output["input_ids"].shape


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
