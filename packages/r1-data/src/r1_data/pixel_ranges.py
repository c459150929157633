"""How large a resized picture or frame may be: as the model's processor is configured, or as the user wants it.

All ranges bound height × width. For videos the user's range is read by the rule of qwen-vl-utils, as EasyR1 reads it:
with tokens of f × f pixels and n frames, of which t become one token in time, a frame may have at most

    cap(n) = max(min(768 f², 0.9 · 128,000 f² · t / n), 1.05 · min_pixels)

pixels: 768 tokens for each t frames, and 115,200 tokens for all of them.
"""

from dataclasses import dataclass
from typing import Any

from r1_data.types import DataError

_LEAST, _MOST = 128, 768  # tokens of a frame
_TOTAL = 0.9 * 128_000  # tokens of a video
_SLACK = 1.05  # of the least, which the most of a long video does not fall below


def picture_range(processor: Any, low: int | None, high: int | None) -> dict[str, int]:
    """The range as processors of the Qwen-VL families take it: areas, though they are called edges.

    None stands for what the processor is configured to. Raises DataError for a range upside down.
    """
    low = processor.size["shortest_edge"] if low is None else low
    high = processor.size["longest_edge"] if high is None else high
    _require_range(low, high, "")
    return {"shortest_edge": low, "longest_edge": high}


@dataclass(frozen=True, slots=True)
class FrameRange:
    """The range of the frames of a video, in the words of its processor."""

    configured: tuple[int, int]  # what the processor has
    token: int  # f², pixels
    temporal: int  # t
    together: bool  # the processor bounds all frames together (Qwen3-VL), not each (Qwen2-VL, Qwen2.5-VL)
    low: int | None = None  # of pictures and frames, as the user wants it
    high: int | None = None
    video_low: int | None = None  # of frames alone
    video_high: int | None = None  # likewise; it may be above the cap

    def __post_init__(self) -> None:
        """Raises DataError for a range upside down."""
        low, high = self._wanted
        if low is not None and high is not None:
            _require_range(low, high, "video_")

    @property
    def _wanted(self) -> tuple[int | None, int | None]:
        return self.video_low or self.low, self.video_high or self.high

    def of(self, frames: int) -> dict[str, int]:
        """What the processor is to be told for a video of so many frames; the most wins over the least."""
        low, high = self._wanted
        if low is None and high is None:
            return {"shortest_edge": self.configured[0], "longest_edge": self.configured[1]}
        low = _LEAST * self.token if low is None else low
        cap = min(_MOST * self.token, int(_TOTAL * self.token * self.temporal / frames))
        cap = max(cap, int(_SLACK * low))
        high = self.video_high or min(high or cap, cap)
        count = frames if self.together else 1
        return {"shortest_edge": min(low, high) * count, "longest_edge": high * count}


def frame_range(
    processor: Any, low: int | None, high: int | None, video_low: int | None, video_high: int | None
) -> FrameRange:
    """The range of frames for a video processor; None stands for nothing said. Raises DataError as `FrameRange`."""
    side, size = processor.patch_size * processor.merge_size, processor.size
    temporal = processor.temporal_patch_size
    # Told by asking: room for 64 tokens is enough for four frames of 8 × 8 tokens only where each has it to itself.
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
