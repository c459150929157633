"""Read videos: their headers, which frames to sample, and the pixels of those frames.

Files are untrusted: a container is opened as what its first bytes say, because FFmpeg would follow a playlist to other
files and the network. Frames are counted before decoding, and their bytes are bounded.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from r1_data.pictures import image_size, load_image
from r1_data.references import Video, describe, fetched_file, open_file
from r1_data.types import MediaError, PictureReference, Url

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream
    from torch import Tensor

_BRANDS = {b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip"}  # the first box of an MP4 or QuickTime file
_MAX_SIDE = 16_384  # pixels; for larger frames some decoders allocate memory before they fail


@dataclass(frozen=True, slots=True)
class FrameRules:
    """Which frames of a video the model gets.

    Their number follows qwen-vl-utils, with which these models were trained: duration × `fps`, at least `min_frames`
    and at most `max_frames`, no more than there are, and a multiple of `multiple`; evenly spaced from first to last. A
    video with fewer frames than `multiple` repeats its last one.
    """

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    multiple: int = 2  # frames that become one token in time
    max_bytes: int = 2**30  # of the decoded frames, as RGB

    def sample(self, total: int, source_fps: float) -> list[int]:
        """Return the indices of the sampled frames of a video with `total` frames, `source_fps` per second."""
        expected = total / source_fps * self.fps
        count = int(min(max(expected, self.min_frames), self.max_frames, total)) // self.multiple * self.multiple
        if count == 0:
            return [*range(min(total, self.multiple)), *[total - 1] * max(0, self.multiple - total)]
        if count == 1:
            return [0]
        return [round(index * (total - 1) / (count - 1)) for index in range(count)]


@dataclass(frozen=True, slots=True)
class Clip:
    total: int  # frames in the video
    fps: float  # of the video
    indices: list[int]  # the sampled frames
    height: int  # after rotation
    width: int
    turn: int = 0  # quarter turns, counterclockwise, to apply


def probe_video(video: Video, rules: FrameRules) -> Clip:
    """Read a video's headers and count its frames without decoding.

    Raises MediaError: no video, truncated, frames of several sizes, or decoded frames of more than `rules.max_bytes`.
    """
    if isinstance(video.source, tuple):
        return _bounded(_probe_frames(video.source, video.fps or rules.fps, rules), rules, "video of frames")
    with _opened(video.source) as (container, stream):
        rate = stream.average_rate or stream.guessed_rate
        fps = float(rate) if rate else 0.0
        total = sum(1 for packet in container.demux(stream) if packet.size)
        if total < 1 or not 0 < fps <= 1000:
            raise MediaError(f"{total} frames at {fps:g} frames a second")
        turn, (height, width) = _turn(container, stream), (stream.height, stream.width)
        if turn % 2:
            height, width = width, height
        return _bounded(Clip(total, fps, rules.sample(total, fps), height, width, turn), rules, "video")


def load_frames(video: Video, clip: Clip) -> "Tensor":
    """Decode the frames of `clip`; uint8 [frames, 3, height, width]. Raises MediaError if one does not decode."""
    import torch

    if isinstance(video.source, tuple):
        pictures = [load_image(video.source[index]) for index in clip.indices]
        frames = [torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8) for picture in pictures]
    else:
        frames = _decode(video.source, clip)
    return torch.stack(frames).view(len(frames), clip.height, clip.width, 3).permute(0, 3, 1, 2)


def _probe_frames(frames: "tuple[PictureReference, ...]", fps: float, rules: FrameRules) -> Clip:
    sizes = {image_size(frame) for frame in frames}
    if len(sizes) > 1:
        shown = ", ".join(f"{width}x{height}" for height, width in sorted(sizes)[:3])
        raise MediaError(f"the frames of a video must have one size, found {shown}")
    return Clip(len(frames), fps, rules.sample(len(frames), fps), *sizes.pop())


def _turn(container: "InputContainer", stream: "VideoStream") -> int:
    """Return the quarter turns of a film from a phone, which FFmpeg gives with a decoded frame."""
    import av

    if container.format.name.split(",")[0] != "mov":
        return 0
    try:
        container.seek(0, stream=stream)
        frame = next(container.decode(stream), None)
    except (av.error.FFmpegError, OSError, ValueError):
        return 0  # raised when all frames are decoded
    return 0 if frame is None else round(frame.rotation / 90) % 4


def _bounded(clip: Clip, rules: FrameRules, name: str) -> Clip:
    size, count = f"{clip.width}x{clip.height}", len(clip.indices)
    if not 1 <= clip.height <= _MAX_SIDE or not 1 <= clip.width <= _MAX_SIDE:
        raise MediaError(f"{name}: frames of {size} pixels; a side may have 1 to {_MAX_SIDE:,}")
    if 3 * clip.height * clip.width * count > rules.max_bytes:
        raise MediaError(
            f"{name}: {count} frames of {size} pixels are over the limit of {rules.max_bytes:,} bytes decoded; "
            "lower data.video_fps or data.video_max_frames"
        )
    return clip


def _decode(source: "bytes | Path | Url", clip: Clip) -> "list[Tensor]":
    import numpy
    import torch

    expected, found = set(clip.indices), {}
    with _opened(source) as (container, stream):
        stream.thread_count = 1  # workers are parallel already
        for index, frame in enumerate(container.decode(stream)):
            if index in expected:
                pixels = numpy.rot90(frame.to_ndarray(format="rgb24"), clip.turn)
                if pixels.shape[:2] != (clip.height, clip.width):
                    raise MediaError(f"frame {index} has another size, {frame.width}x{frame.height}")
                found[index] = torch.from_numpy(numpy.ascontiguousarray(pixels)).reshape(-1)
            if len(found) == len(expected):
                break
    if len(found) < len(expected):
        missing = min(expected - found.keys())
        raise MediaError(f"{describe(source, 'video')}: cut off, frame {missing} of {clip.total} does not decode")
    return [found[index] for index in clip.indices]


@contextmanager
def _opened(source: "bytes | Path | Url") -> "Iterator[tuple[InputContainer, VideoStream]]":
    import av

    try:
        content = fetched_file(source)
        with io.BytesIO(content) if isinstance(content, bytes) else open_file(content) as file:
            kind = _container_kind(file)
            with av.open(file, mode="r", format=kind, metadata_errors="replace") as container:
                if not container.streams.video:
                    raise MediaError("it has no pictures, only sound or text")
                stream = container.streams.video[0]
                if stream.codec_context is None:  # then the stream has no size either
                    raise MediaError("its codec is not known")
                yield container, stream
    except MediaError as error:
        text = str(error)
        name = describe(source, "video")
        raise MediaError(text if name in text else f"{name}: {text}") from error
    except (av.error.FFmpegError, OSError, ValueError, MemoryError) as error:
        raise MediaError(f"{describe(source, 'video')}: cannot be read ({error})") from error


def _container_kind(file: BinaryIO) -> str:
    head = file.read(12)
    file.seek(0)
    if not head:
        raise MediaError("it is empty")
    if head[4:8] in _BRANDS:
        return "mov"
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if head.startswith(b"RIFF") and head[8:12] == b"AVI ":
        return "avi"
    if head.startswith(b"GIF8"):
        return "gif"
    raise MediaError("not a video that is read here: MP4, QuickTime, Matroska, WebM, AVI or GIF")
