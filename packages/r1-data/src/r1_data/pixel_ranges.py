"""The allowed sizes of resized pictures and frames, from the model's processor and the user's settings.

All ranges bound height × width. The user's range for videos follows qwen-vl-utils, as in EasyR1: with tokens of f × f
pixels and n frames, of which t become one token in time, a frame has at most

    cap(n) = max(min(768 f², 0.9 · 128,000 f² · t / n), 1.05 · min_pixels)

pixels: 768 tokens for t frames, and 115,200 tokens for all.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from r1_data.types import DataError

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, BaseVideoProcessor

_LEAST, _MOST = 128, 768  # tokens of a frame
_TOTAL = 0.9 * 128_000  # tokens of a video
_SLACK = 1.05  # times the lower bound: the minimum of the upper bound of a long video


def picture_range(processor: "BaseImageProcessor", low: int | None, high: int | None) -> dict[str, int]:
    """Return the range as the Qwen-VL processors expect it: areas, although they are called edges.

    None: as the processor is configured. Raises DataError if low exceeds high.
    """
    low = processor.size["shortest_edge"] if low is None else low
    high = processor.size["longest_edge"] if high is None else high
    _require_range(low, high, "")
    return {"shortest_edge": low, "longest_edge": high}


@dataclass(frozen=True, slots=True)
class FrameRange:
    """The allowed sizes of a video's frames, in the terms of its processor."""

    configured: tuple[int, int]  # of the processor
    token: int  # f², pixels
    temporal: int  # t
    together: bool  # the processor bounds all frames together (Qwen3-VL), not each (Qwen2-VL, Qwen2.5-VL)
    low: int | None = None  # of pictures and frames, set by the user
    high: int | None = None
    video_low: int | None = None  # of frames only
    video_high: int | None = None  # of frames only; may exceed the cap

    def __post_init__(self) -> None:
        low, high = self._requested
        if low is not None and high is not None:
            _require_range(low, high, "video_")

    @property
    def _requested(self) -> tuple[int | None, int | None]:
        return self.video_low or self.low, self.video_high or self.high

    def size_for(self, frames: int) -> dict[str, int]:
        """Return the processor's `size` for a video; the upper bound takes precedence."""
        low, high = self._requested
        if low is None and high is None:
            return {"shortest_edge": self.configured[0], "longest_edge": self.configured[1]}
        low = _LEAST * self.token if low is None else low
        cap = min(_MOST * self.token, int(_TOTAL * self.token * self.temporal / frames))
        cap = max(cap, int(_SLACK * low))
        high = self.video_high or min(high or cap, cap)
        count = frames if self.together else 1
        return {"shortest_edge": min(low, high) * count, "longest_edge": high * count}


def frame_range(
    processor: "BaseVideoProcessor", low: int | None, high: int | None, video_low: int | None, video_high: int | None
) -> FrameRange:
    """Return the frame range for a video processor; None: not set by the user. Raises DataError if low exceeds high."""
    side, size = processor.patch_size * processor.merge_size, processor.size
    temporal = processor.temporal_patch_size
    # Found by a test: four frames of 8 × 8 tokens fit 64 tokens only if the range is per frame.
    room = {"size": {"shortest_edge": side**2, "longest_edge": 64 * side**2}}
    once, twice = (processor.get_num_of_video_patches(n * temporal, 8 * side, 8 * side, room) for n in (1, 2))
    return FrameRange(
        (size["shortest_edge"], size["longest_edge"]),
        side**2,
        temporal,
        twice != 2 * once,
        low,
        high,
        video_low,
        video_high,
    )


def _require_range(low: int, high: int, prefix: str) -> None:
    if not 0 < low <= high:
        raise DataError(f"{prefix}min_pixels must be above 0 and at most {prefix}max_pixels, got {low} and {high}")
