"""The rows of the prompt cases: as a user writes them, as transformers is told them, and the media that they name.

`"@name"` stands for a medium of `MEDIA`, drawn anew from its seed; inside `row` it becomes what a file or a parquet
cell would hold, inside `media` (in the order in which they stand in the text) what a processor of transformers takes.
"""

import base64
import io
import random
from typing import Any

import av
import numpy as np
from PIL import Image
from transformers.video_utils import VideoMetadata, read_video_pyav

FPS = 2.0  # at which films are looked at, and the rate of frames that have none
MEDIA: dict[str, dict[str, Any]] = {
    "square": {"kind": "image", "size": [56, 56], "seed": 1},
    "wide": {"kind": "image", "size": [150, 45], "seed": 2},
    "tall": {"kind": "image", "size": [40, 120], "seed": 3},
    "large": {"kind": "image", "size": [300, 200], "seed": 4},  # over the pixel budget
    "dot": {"kind": "image", "size": [7, 9], "seed": 5},  # under it
    "clip": {"kind": "frames", "size": [64, 48], "frames": 6, "seed": 6},
    "still": {"kind": "frames", "size": [50, 50], "frames": 1, "seed": 7},
    "long": {"kind": "frames", "size": [36, 36], "frames": 40, "seed": 8},
    "slow": {"kind": "frames", "size": [44, 60], "frames": 6, "fps": 0.5, "seed": 10},  # four seconds to a token
    "film": {"kind": "film", "size": [96, 64], "frames": 24, "fps": 8, "seed": 9},
}
IMAGE, VIDEO = {"type": "image"}, {"type": "video"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, str]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def easyr1(problem: str, *parts: dict[str, str], images: tuple[str, ...] = (), videos: tuple[str, ...] = (),
           media: tuple[str, ...] = ()) -> dict[str, Any]:  # fmt: skip
    """A row with markers, and the same as parts; `media` where pictures and videos alternate."""
    columns = {"images": list(images), "videos": list(videos)}
    row = {"problem": problem, **{name: found for name, found in columns.items() if found}, "answer": "1"}
    return {"row": row, "messages": [user(*parts)], "media": list(media or images + videos)}


CASES: dict[str, dict[str, Any]] = {
    "text alone": {"row": {"problem": "2+2?", "answer": "4"}, "messages": [user(text("2+2?"))], "media": []},
    "picture first": easyr1("<image>What?", IMAGE, text("What?"), images=("@square",)),
    "picture in the middle": easyr1("See <image> here", text("See "), IMAGE, text(" here"), images=("@wide",)),
    "picture last": easyr1("What is this? <image>", text("What is this? "), IMAGE, images=("@tall",)),
    "picture over the budget": easyr1("<image>?", IMAGE, text("?"), images=("@large",)),
    "picture under the budget": easyr1("<image>?", IMAGE, text("?"), images=("@dot",)),
    "picture without a marker": easyr1("What?", IMAGE, text("What?"), images=("@square",)),
    "pictures of several sizes": easyr1(
        "<image><image>or<image>", IMAGE, IMAGE, text("or"), IMAGE, images=("@wide", "@square", "@tall")
    ),
    "the same picture twice": easyr1("<image>a<image>", IMAGE, text("a"), IMAGE, images=("@square", "@square")),
    "video first": easyr1("<video>What?", VIDEO, text("What?"), videos=("@clip",)),
    "video last": easyr1("What? <video>", text("What? "), VIDEO, videos=("@film",)),
    "video of one frame": easyr1("a<video>b", text("a"), VIDEO, text("b"), videos=("@still",)),
    "video whose time outruns the text": easyr1("?<video>", text("?"), VIDEO, videos=("@long",)),
    "video of a frame every two seconds": easyr1("<video>What?", VIDEO, text("What?"), videos=("@slow",)),
    "videos of several rates": easyr1(
        "<video>,<video><video>", VIDEO, text(","), VIDEO, VIDEO, videos=("@film", "@slow", "@clip")
    ),
    "pictures around a video": easyr1(
        "<image>a<video>b<image>", IMAGE, text("a"), VIDEO, text("b"), IMAGE,
        images=("@tall", "@square"), videos=("@clip",), media=("@tall", "@clip", "@square"),
    ),
    "videos around a picture": easyr1(
        "<video><image>b<video>", VIDEO, IMAGE, text("b"), VIDEO,
        images=("@wide",), videos=("@clip", "@still"), media=("@clip", "@wide", "@still"),
    ),
    "messages with pictures in a column": {
        "row": {
            "messages": [{"role": "user", "content": [text("Left "), IMAGE, text(" right "), IMAGE]}],
            "images": ["@square", "@wide"],
            "answer": "1",
        },
        "messages": [user(text("Left "), IMAGE, text(" right "), IMAGE)],
        "media": ["@square", "@wide"],
    },
    "messages of several turns with pictures in place": {
        "row": {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "@tall"}}, text("a?")]},
                {"role": "assistant", "content": "Yes."},
                {"role": "user", "content": [text("b?"), {"type": "image_url", "image_url": {"url": "@dot"}}]},
            ],
            "answer": "1",
        },
        "messages": [
            {"role": "system", "content": "Be brief."}, user(IMAGE, text("a?")),
            {"role": "assistant", "content": "Yes."}, user(text("b?"), IMAGE),
        ],
        "media": ["@tall", "@dot"],
    },
    "messages with a video in place": {
        "row": {"messages": [user({"type": "video", "video": "@clip"}, text("?"))], "answer": "1"},
        "messages": [user(VIDEO, text("?"))],
        "media": ["@clip"],
    },
}  # fmt: skip


def draw(name: str) -> list[Image.Image]:
    """The picture, or the frames, of a medium: coloured blocks, drawn from its seed."""
    medium = MEDIA[name.removeprefix("@")]
    rng = random.Random(medium["seed"])
    blocks = [
        np.frombuffer(rng.randbytes(4 * 4 * 3), np.uint8).reshape(4, 4, 3) for _ in range(medium.get("frames", 1))
    ]
    return [Image.fromarray(block).resize(medium["size"], Image.Resampling.NEAREST) for block in blocks]


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def film(frames: list[Image.Image], fps: int) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        (stream.width, stream.height), stream.pix_fmt = frames[0].size, "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    return buffer.getvalue()


def written(value: Any, key: str = "") -> Any:
    """The row with its media as a data set holds them: bytes, lists of bytes, data URLs."""
    if isinstance(value, dict):
        return {name: written(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [written(item, key) for item in value]
    if not (isinstance(value, str) and value.startswith("@")):
        return value
    frames, medium = draw(value), MEDIA[value.removeprefix("@")]
    if medium["kind"] == "film":
        return film(frames, medium["fps"])
    if medium["kind"] == "frames":
        pictures = list(map(png, frames))
        return {"frames": pictures, "fps": medium["fps"]} if "fps" in medium else pictures
    data = png(frames[0])
    return f"data:image/png;base64,{base64.b64encode(data).decode()}" if key == "url" else data


def as_transformers_reads(name: str, video_processor: Any) -> tuple[Any, VideoMetadata | None]:
    """A picture, or a video's frames [frames, height, width, 3] with what is known of them.

    A video's only frame is shown twice: two make a token, and Qwen3-VL's processor refuses fewer.
    """
    frames, medium = draw(name), MEDIA[name.removeprefix("@")]
    if medium["kind"] == "image":
        return frames[0], None
    if medium["kind"] == "film":
        file = io.BytesIO(film(frames, medium["fps"]))
        return read_video_pyav(file, lambda metadata: video_processor.sample_frames(metadata, fps=FPS))
    width, height = medium["size"]
    total, fps = len(frames), medium.get("fps", FPS)
    shown = [*range(total)] if total > 1 else [0, 0]
    metadata = VideoMetadata(total_num_frames=total, fps=fps, width=width, height=height, frames_indices=shown)
    return np.stack([np.asarray(frames[index]) for index in shown]), metadata
