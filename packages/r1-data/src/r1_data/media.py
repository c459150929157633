"""Pictures: what a row says about them, their size from the header, and their pixels.

A picture reference is encoded bytes, a path, or a PIL image. Data is not trusted: only common formats are opened,
the pixel limit of PIL is an error, and a path may not leave its folder.
"""

import io
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r1_data.types import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_ORIENTATION = 0x0112  # EXIF tag
_ENDS = {"PNG": b"IEND", "JPEG": b"\xff\xd9"}
_TAIL = 64  # bytes at the end of a file in which its end mark is looked for


def resolve_reference(value: Any, image_dir: str | None) -> Any:
    """Turn a cell into a picture reference: bytes, a Path, or the PIL image itself.

    Takes bytes, a path, a PIL image, or a dict with "bytes" and "path" as `datasets` stores pictures. Paths are
    relative to `image_dir` when it is given, and then may not lead out of it. Raises DataError otherwise.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str | os.PathLike):
        return _resolve_path(os.fspath(value), image_dir)
    if _is_pil(value):
        return value
    raise DataError(f"a picture must be bytes, a path or a PIL image, found {type(value).__name__}")


def image_size(reference: Any) -> tuple[int, int]:
    """(height, width) of a picture as `load_image` will give it, read from its header.

    Raises DataError for a file that is cut off: its end is looked at, and only if it looks wrong is it decoded.
    """
    with _opened(reference) as image:
        width, height = image.size
        if not _is_whole(reference, image.format):
            image.load()
        return (width, height) if _orientation(image) >= 5 else (height, width)


def load_image(reference: Any) -> "Image":
    """Decode a picture to RGB, upright by its EXIF orientation, at its full size.

    The pixel budget is not applied here: the model's own image processor resizes, once, from these pixels.
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
    with _opened(reference) as image:
        turn = upright.get(_orientation(image))
        picture = image.convert("RGB")
        if turn is not None:
            picture = picture.transpose(turn)
    picture.info = {}  # else a later reader would see the EXIF orientation and turn the picture again
    return picture


@contextmanager
def _opened(reference: Any) -> "Iterator[Image]":
    """The opened, not yet decoded picture; anything PIL cannot read becomes a DataError that names the reference."""
    import PIL.Image

    try:
        if _is_pil(reference):
            _check_pixels(reference)
            yield reference
            return
        source = io.BytesIO(reference) if isinstance(reference, bytes) else reference
        with PIL.Image.open(source, formats=_FORMATS) as image:
            _check_pixels(image)
            yield image
    except DataError as error:
        raise DataError(f"{_describe(reference)}: {error}") from error
    except FileNotFoundError as error:
        raise DataError(f"{_describe(reference)}: no such file (working directory: {Path.cwd()})") from error
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, PIL.Image.DecompressionBombError) as error:
        raise DataError(f"{_describe(reference)}: the picture cannot be read ({error})") from error


def _is_whole(reference: Any, image_format: str | None) -> bool:
    """Whether the file ends as its format says; false when that cannot be told."""
    end = _ENDS.get(image_format or "")
    if end is None or _is_pil(reference):
        return _is_pil(reference)
    if isinstance(reference, bytes):
        return end in reference[-_TAIL:]
    with open(reference, "rb") as file:
        file.seek(-min(_TAIL, os.path.getsize(reference)), os.SEEK_END)
        return end in file.read()


def _check_pixels(image: "Image") -> None:
    import PIL.Image

    limit, (width, height) = PIL.Image.MAX_IMAGE_PIXELS, image.size
    if limit is not None and width * height > limit:
        raise DataError(f"{width}x{height} pixels are over the limit of {limit} (PIL.Image.MAX_IMAGE_PIXELS)")
    if width < 1 or height < 1:
        raise DataError(f"a picture of {width}x{height} pixels is empty")


def _orientation(image: "Image") -> int:
    """EXIF orientation 1 to 8, from what is known before decoding (so that sizes never depend on decoding)."""
    from PIL.Image import Exif

    data = image.info.get("exif")
    if not data:
        return 1
    exif = Exif()
    exif.load(data)
    value = exif.get(_ORIENTATION, 1)
    return value if value in range(1, 9) else 1


def _resolve_path(path: str, image_dir: str | None) -> Path:
    if re.match(r"(https?|ftp|file|s3|gs)://|data:", path):
        raise DataError(f"{path[:80]!r}: pictures behind URLs are not read in this version; give a file or bytes")
    if "\0" in path:
        raise DataError(f"{path[:80]!r}: a path holds no zero byte")
    if image_dir is None:
        return Path(path)
    # Compared as written, not through links: a link that the owner of the folder put there may lead elsewhere.
    folder = os.path.abspath(image_dir)
    full = os.path.normpath(os.path.join(folder, path))
    if os.path.commonpath([folder, full]) != folder:
        raise DataError(f"{path!r} leads out of the picture folder {image_dir!r}")
    return Path(full)


def _is_pil(value: Any) -> bool:
    from PIL.Image import Image

    return isinstance(value, Image)


def _describe(reference: Any) -> str:
    if isinstance(reference, bytes):
        return f"picture of {len(reference)} bytes"
    return f"picture {reference}" if isinstance(reference, str | os.PathLike) else "picture in memory"
