"""Fault injection: sixty kinds of broken rows among sound ones, each refused by its own name and none fatal."""

import base64
import io
import os
import re
import struct
import zlib

import pytest
from PIL import Image

from r1_data.dataset import PromptDataset
from r1_data.messages import RowReader
from r1_data.render import Renderer
from r1_data.types import DataError, MediaError

USER = {"role": "user", "content": "?"}


def png(width: int, height: int, pixels: bytes = b"\0" * 100) -> bytes:
    """A PNG whose header promises a size, whatever the pixels are."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def noise(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((200, 160), 80).save(buffer, kind)
    return buffer.getvalue()


def cut(data: bytes, share: float = 0.5) -> bytes:
    return data[: int(len(data) * share)]


def with_image(cell, prompt: str = "<image>?") -> dict:
    return {"prompt": prompt, "answer": "1", "images": [cell]}


def with_video(cell, prompt: str = "<video>?") -> dict:
    return {"prompt": prompt, "answer": "1", "videos": [cell]}


def columns_and_prompts() -> dict[str, tuple[dict, str]]:
    def asked(prompt) -> dict:
        return {"prompt": prompt, "answer": "1"}

    return {
        "no answer column": ({"prompt": "?"}, "no answer column 'answer'"),
        "no prompt column": ({"answer": "1"}, "no prompt column 'prompt'"),
        "no columns at all": ({}, "no answer column"),
        "answer is null": ({"prompt": "?", "answer": None}, "the answer column 'answer' is empty"),
        "prompt is null": (asked(None), "the prompt column 'prompt' is empty"),
        "prompt is a number": (asked(5), "a prompt must be text or a list of messages, found 5"),
        "prompt is an object": (asked({"text": "?"}), "a prompt must be text or a list of messages"),
        "prompt has no messages": (asked([]), r"an empty list: no messages"),
        "message is text": (asked(["?"]), "a message must have 'role' and 'content'"),
        "message has no role": (asked([{"content": "?"}]), "a message must have 'role' and 'content'"),
        "message has no content": (asked([{"role": "user"}]), "the content of a message must be text or a list"),
        "content is a number": (asked([{"role": "user", "content": 3}]), "the content of a message must be text"),
        "part of another kind": (asked([{"role": "user", "content": [{"type": "audio"}]}]), "a content part must be"),
        "part without text": (asked([{"role": "user", "content": [{"type": "text"}]}]), "a content part must be"),
        "answer already given": (asked([USER, {"role": "assistant", "content": "!"}]), "the assistant's own"),
        "marker without picture": ({**asked("<image>?"), "images": None}, "1 <image> markers but 0 pictures"),
        "marker without video": ({**asked("<video>?"), "videos": []}, "1 <video> markers but 0 videos"),
        "more markers than pictures": (with_image(png(9, 9), "<image><image>"), "2 <image> markers but 1 pictures"),
        "placeholder in the text": (asked("see <|image_pad|>"), "1 picture placeholders in the prompt for 0"),
        "video placeholder in the text": (asked("see <|video_pad|>"), "1 video placeholders in the prompt for 0"),
        "over the limit": (asked("long " * 900), "the prompt has 4519 tokens, max_prompt_length is 4000"),
    }


def references(folder) -> dict[str, tuple[dict, str]]:
    (folder / "folder.png").mkdir()
    (folder / "secret.png").symlink_to(folder / "nowhere.png")
    os.mkfifo(folder / "pipe.png")
    inside = [{"role": "user", "content": [{"type": "image", "image": b"1"}]}]
    return {
        "picture is null": (with_image(None), "a picture must be bytes, a path, a URL or a PIL image, found NoneType"),
        "picture is a number": (with_image(7), "found int"),
        "picture is an empty object": (with_image({}), "a picture must be"),
        "picture has neither bytes nor path": (with_image({"bytes": None, "path": None}), "a picture must be"),
        "path is empty": (with_image(""), "an empty path"),
        "path leads up": (with_image("../x.png"), "leads out of the picture folder"),
        "path leads up and down": (with_image("a/../../x.png"), "leads out of the picture folder"),
        "path is absolute": (with_image("/etc/passwd"), "leads out of the picture folder"),
        "file URL leads out": (with_image("file:///etc/passwd"), "leads out of the picture folder"),
        "path holds a zero byte": (with_image("a\0.png"), "a path holds no zero byte"),
        "file on another machine": (with_image("file://host/x.png"), "a file on another machine"),
        "no such file": (with_image("gone.png"), r"gone\.png: no such file"),
        "link to no file": (with_image("secret.png"), "no such file"),
        "path is a folder": (with_image("folder.png"), "not a file"),
        "path is a pipe": (with_image("pipe.png"), "not a file"),
        "web not allowed": (with_image("https://host/x.png"), "only with data.allow_urls=true"),
        "scheme unknown": (with_image("s3://bucket/x.png"), "URLs of kind s3 are not read"),
        "data URL not base64": (with_image("data:image/png,xx"), "a data URL must read"),
        "data URL broken": (with_image("data:image/png;base64,A"), "broken base64"),
        "pictures twice": ({"prompt": inside, "answer": "1", "images": [b"1"]}, "both in the messages and in column"),
    }


def pictures() -> dict[str, tuple[dict, str]]:
    url = f"data:image/png;base64,{base64.b64encode(cut(noise('PNG'))).decode()}"
    return {
        "no bytes": (with_image(b""), "picture of 0 bytes"),
        "not a picture": (with_image(b"hello"), "cannot be read"),
        "PostScript": (with_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "cannot be read"),
        "SVG": (with_image(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "cannot be read"),
        "only a signature": (with_image(b"\x89PNG\r\n\x1a\n"), "cannot be read"),
        "PNG cut off": (with_image(cut(noise("PNG"))), "truncated"),
        "JPEG cut off": (with_image(cut(noise("JPEG"))), "truncated"),
        "WebP cut off": (with_image(cut(noise("WEBP"))), "cannot be read"),
        "GIF cut off": (with_image(cut(noise("GIF"), 0.2)), "truncated|cannot be read"),
        "BMP cut off": (with_image(cut(noise("BMP"))), "truncated|cannot be read"),
        "data URL cut off": (with_image(url), "truncated"),
        "decompression bomb": (with_image(png(20_000, 20_000)), "limit|bomb"),
        "just over the pixel limit": (with_image(png(10_000, 9_000)), "over the limit"),
        "no width": (with_image(png(0, 9)), "cannot be read|is empty"),
        "much too wide": (with_image(Image.new("RGB", (900, 3))), "aspect ratio"),
    }


def videos(movie) -> dict[str, tuple[dict, str]]:
    film, frame = movie(64, 48, 20), png(8, 6)
    return {
        "video is null": (with_video(None), "a video must be bytes"),
        "video of no frames": (with_video([]), "a video of no frames"),
        "video of zero bytes": (with_video(b""), "video of 0 bytes: it is empty"),
        "video is a playlist": (with_video(b"#EXTM3U\nfile:///etc/passwd\n"), "not a video that is read here"),
        "video is a picture": (with_video(frame), "not a video that is read here"),
        "video is text": (with_video(b"hello, this is no film"), "not a video that is read here"),
        "video cut off": (with_video(cut(film)), "cannot be read"),
        "video without its header": (with_video(film[48:]), "not a video|cannot be read"),
        "video file missing": (with_video("gone.mp4"), "no such file"),
        "video path leads out": (with_video("../x.mp4"), "leads out of the picture folder"),
        "frames of several sizes": (with_video([frame, png(9, 9)]), "must have one size"),
        "frame not a picture": (with_video([frame, b"hello"]), "cannot be read"),
        "frames a second below zero": (with_video({"frames": [frame], "fps": -1}), "fps of a video must be"),
    }


def test_each_broken_row_is_refused_by_its_own_name_and_the_sound_ones_are_kept(processor, movie, picture, tmp_path):
    faults = columns_and_prompts() | references(tmp_path) | pictures() | videos(movie)
    assert len(faults) >= 60
    rows = [(f"t:{name}", row) for name, (row, _) in faults.items()]
    rows[30:30] = [("t:sound", with_image(picture(60, 40))), ("t:film", with_video(movie(32, 32, 4)))]
    settings = {"max_prompt_length": 4000, "filter_overlong": False, "reader": RowReader(image_dir=str(tmp_path))}
    dataset = PromptDataset(rows, Renderer(processor), bad_rows="skip", **settings)
    assert [dataset[i].id for i in range(len(dataset))] == ["t:sound", "t:film"]
    reasons = {reason.split(": ", 1)[0]: reason for reason in dataset.summary.bad}
    assert reasons.keys() == {f"t:{name}" for name in faults}
    for name, (_, message) in faults.items():
        assert re.search(f"^t:{name}: .*({message})", reasons[f"t:{name}"]), reasons[f"t:{name}"]


def test_only_rows_with_unreadable_media_are_skipped_as_such(processor, tmp_path, picture):
    sound = ("t:sound", with_image(picture(60, 40)))
    settings = {"max_prompt_length": 4000, "bad_rows": "skip_media", "reader": RowReader(image_dir=str(tmp_path))}
    for name, (row, _) in (references(tmp_path) | pictures()).items():
        rows = [("t:bad", row), sound]
        if name == "pictures twice":  # a fault of the columns: the user must mend it
            with pytest.raises(DataError, match="1 of 2 rows cannot be used"):
                PromptDataset(rows, Renderer(processor), **settings)
        else:
            assert len(PromptDataset(rows, Renderer(processor), **settings).summary.bad) == 1, name
    with pytest.raises(DataError, match="the dataset is empty: 1 of 1 rows cannot be used"):
        PromptDataset(rows[:1], Renderer(processor), **settings)
    assert issubclass(MediaError, DataError)
