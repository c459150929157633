"""Read pictures: their size from the header, and their pixels.

Files are untrusted: only common formats are opened, and exceeding PIL's pixel limit is an error.
"""

import io
import os
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from r1_data.references import describe, fetched_file, is_pil, open_file
from r1_data.types import MediaError, PictureReference

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_ORIENTATION = 0x0112  # EXIF tag
_ENDS = {"PNG": b"IEND", "JPEG": b"\xff\xd9"}
# What PIL raises for broken files. A TypeError: an offset of a TIFF that is a fraction.
_BROKEN = (OSError, SyntaxError, ValueError, TypeError, EOFError, struct.error, MemoryError)
_DEEP = ("I;16", "I;16B", "I;16L", "I;16N")  # PIL's modes of 16-bit gray
_BOUNDLESS = ("I", "F")  # PIL's modes without a defined white
_LFS = b"version https://git-lfs"
_TAIL = 64  # bytes at the end of a file that contain its end marker


def image_size(reference: PictureReference) -> tuple[int, int]:
    """Return (height, width) of a picture as `load_image` gives it, from its header.

    Raises MediaError for a truncated file: if its end looks wrong, it is decoded to make sure.
    """
    with _opened(reference) as (image, source):
        width, height = image.size
        if source is not None and not _is_whole(source, image.format):
            image.load()
        return (width, height) if _orientation(image) >= 5 else (height, width)


def load_image(reference: PictureReference) -> "Image":
    """Decode a picture to RGB at full size, rotated by its EXIF orientation.

    Transparency becomes white, 16-bit gray is scaled to 8 bits, of an animation the first frame is used. The model's
    image processor resizes later, once.
    """
    from PIL.Image import Transpose

    upright = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    with _opened(reference) as (image, _):
        turn = upright.get(_orientation(image))
        picture = _to_rgb(image)
        if turn is not None:
            picture = picture.transpose(turn)
    picture.info = {}  # or a later reader would apply the EXIF orientation again
    return picture


def _to_rgb(image: "Image") -> "Image":
    if image.mode in _DEEP:
        import numpy
        from PIL.Image import fromarray

        return fromarray((numpy.asarray(image) >> 8).astype(numpy.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    from PIL.Image import new

    clear = image.convert("RGBA")
    picture = new("RGB", image.size, "white")
    picture.paste(clear, mask=clear.getchannel("A"))
    return picture


def to_pil(pixels: "Tensor") -> "Image":
    """Convert pixels, uint8 [3, height, width]."""
    from PIL.Image import fromarray

    return fromarray(pixels.permute(1, 2, 0).numpy())


def from_pil(image: "Image") -> "Tensor":
    """Convert a picture to pixels, uint8 [3, height, width]."""
    import numpy as np
    import torch

    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


@contextmanager
def _opened(reference: PictureReference) -> "Iterator[tuple[Image, BinaryIO | None]]":
    import PIL.Image

    name, data = describe(reference), reference
    if ("ignore", None, PIL.Image.DecompressionBombWarning, None, 0) not in warnings.filters:
        # `_check_pixels` makes it an error. The user's filters take precedence.
        warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning, append=True)
    try:
        if is_pil(reference):
            _check_pixels(reference)
            yield reference, None
            return
        data = fetched_file(reference)
        if data == b"":
            raise MediaError("the picture is empty")
        source = io.BytesIO(data) if isinstance(data, bytes) else open_file(data)
        with source as file, PIL.Image.open(file, formats=_FORMATS) as image:
            _check_pixels(image)
            yield image, file
    except MediaError as error:
        raise MediaError(str(error) if str(reference) in str(error) else f"{name}: {error}") from error
    except _BROKEN as error:
        raise MediaError(f"{name}: the picture cannot be read ({_why(data, error)})") from error
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise MediaError(f"{name}: {error}") from error


def _why(data: PictureReference, error: BaseException) -> str:
    if isinstance(data, bytes):
        head = data[: len(_LFS)]
    elif isinstance(data, os.PathLike):
        with open(data, "rb") as file:
            head = file.read(len(_LFS))
    else:
        head = b""
    if head == _LFS:
        return "a pointer of git-lfs; fetch the file with git lfs pull"
    return "not a picture of a known format" if "cannot identify" in str(error) else str(error)


def _is_whole(file: BinaryIO, image_format: str | None) -> bool:
    place = file.tell()
    try:
        length = file.seek(0, os.SEEK_END)
        if image_format == "WEBP":
            file.seek(4)
            return int.from_bytes(file.read(4), "little") + 8 <= length
        end = _ENDS.get(image_format or "")
        file.seek(-min(_TAIL, length), os.SEEK_END)
        return end is not None and end in file.read()
    finally:
        file.seek(place)


def _check_pixels(image: "Image") -> None:
    import PIL.Image

    limit, (width, height) = PIL.Image.MAX_IMAGE_PIXELS, image.size
    if limit is not None and width * height > limit:
        raise MediaError(f"{width}x{height} pixels are over the limit of {limit} (PIL.Image.MAX_IMAGE_PIXELS)")
    if image.mode in _BOUNDLESS:
        depth = "float" if image.mode == "F" else "32-bit"
        raise MediaError(f"pixels of {depth} depth have no known white; save the picture with 8 or 16 bits")
    if width < 1 or height < 1:
        raise MediaError(f"a picture of {width}x{height} pixels is empty")


def _orientation(image: "Image") -> int:
    from PIL.Image import Exif

    data = image.info.get("exif")
    if not data:
        return 1
    exif = Exif()
    exif.load(data)
    value = exif.get(_ORIENTATION, 1)
    return value if value in range(1, 9) else 1
