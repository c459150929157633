"""Pictures on their way to a worker process: PNG inside JSON, or a path; decoded only for a function that asks."""

import base64
import io
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image


def encode(picture: Any, seen: dict[int, dict[str, str]]) -> dict[str, str]:
    """Return a picture (PIL image, encoded bytes or path) as JSON; `seen` keeps those of a batch, which groups share.

    Raises TypeError for anything else.
    """
    if id(picture) not in seen:
        seen[id(picture)] = _encode(picture)
    return seen[id(picture)]


def decode(picture: Mapping[str, str]) -> "Image":
    """Return the picture, with PIL. Raises RuntimeError without Pillow, OSError for what is no picture."""
    try:
        import PIL.Image
    except ImportError as error:
        raise RuntimeError("a reward function that asks for pictures needs: pip install pillow") from error
    return PIL.Image.open(picture["path"] if "path" in picture else io.BytesIO(base64.b64decode(picture["bytes"])))


def _encode(picture: Any) -> dict[str, str]:
    if isinstance(picture, str | os.PathLike):
        return {"path": os.path.abspath(picture)}
    if not isinstance(picture, bytes):
        if not hasattr(picture, "save"):
            raise TypeError(f"a picture is {type(picture).__name__}; it must be a PIL image, bytes or a path")
        buffer = io.BytesIO()
        picture.save(buffer, format="PNG", compress_level=1)
        picture = buffer.getvalue()
    return {"bytes": base64.b64encode(picture).decode("ascii")}
