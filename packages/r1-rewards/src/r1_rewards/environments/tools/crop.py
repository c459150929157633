"""Zoom into a picture of the prompt."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_SIDE = 4096  # pixels of the enlarged part


def crop(
    x0: float, y0: float, x1: float, y1: float, picture: int = 1, *, images: "Sequence[Image]", side: int = 0
) -> "Image":
    """Zoom into a part of a picture: the part is returned, enlarged.

    Args:
        x0: Left edge of the part, from 0 (left edge of the picture) to 1 (right edge).
        y0: Upper edge of the part, from 0 (top of the picture) to 1 (bottom).
        x1: Right edge of the part, from 0 to 1.
        y1: Lower edge of the part, from 0 to 1.
        picture: The number of the picture, from 1.
    """
    # `side` is the longer side of the result in pixels; 0: that of the picture.
    if not 1 <= picture <= len(images):
        raise ValueError(f"there is no picture {picture}; there are {len(images)}")
    if not (0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1):
        raise ValueError("write 0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1")
    source = images[picture - 1].convert("RGB")
    width, height = source.size
    box = (math.floor(x0 * width), math.floor(y0 * height), math.ceil(x1 * width), math.ceil(y1 * height))
    part = source.crop(box)
    factor = min(MAX_SIDE, side or max(width, height)) / max(part.size)
    return part.resize((max(1, round(part.width * factor)), max(1, round(part.height * factor))))
