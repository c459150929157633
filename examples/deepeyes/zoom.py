"""DeepEyes' tool: zoom into a part of the prompt's picture, given in pixels."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from r1_rewards.environments.tools.crop import crop

if TYPE_CHECKING:
    from PIL.Image import Image

MIN_SIDE = 30  # pixels; a smaller part shows nothing
MAX_RATIO = 100  # of the longer side to the shorter one


def image_zoom_in_tool(bbox_2d: list[float], label: str = "", *, images: "Sequence[Image]") -> "Image":
    """Zoom into a part of the picture.

    Args:
        bbox_2d: The part as [x1, y1, x2, y2] in pixels: its upper left and its lower right corner.
        label: What the part shows.
    """
    if len(bbox_2d) != 4:
        raise ValueError("bbox_2d must be [x1, y1, x2, y2]")
    width, height = images[0].size
    x0, y0 = max(0, bbox_2d[0]), max(0, bbox_2d[1])
    x1, y1 = min(width, bbox_2d[2]), min(height, bbox_2d[3])
    short, long = sorted((x1 - x0, y1 - y0))
    if short <= MIN_SIDE or long > MAX_RATIO * short:
        raise ValueError(f"bbox_2d must be wider and higher than {MIN_SIDE} pixels, in a picture of {width} x {height}")
    return crop(x0 / width, y0 / height, x1 / width, y1 / height, images=images, side=round(long))
