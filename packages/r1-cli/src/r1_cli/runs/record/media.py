"""Pictures and videos of recorded prompts, as the model saw them, saved once per content digest."""

import hashlib
import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r1_data.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

FRAMES = 16  # of a video that are kept, evenly spread
FRAME_MILLISECONDS = 250


class MediaFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written = 0  # bytes, by this process

    def save(self, prompt: Prompt) -> list[str]:
        """Write a prompt's missing pictures and videos; return all file names in order."""
        pictures = [self._save([picture]) for picture in prompt.images]
        return pictures + [self._save(_frames(video)) for video in prompt.videos]

    def _save(self, frames: "list[Image]") -> str:
        name = f"{_digest(frames)}{'.png' if len(frames) == 1 else '.webp'}"
        path = self.folder / name
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            draft, content = self.folder / f".draft_{name}", _encode(frames)
            draft.write_bytes(content)
            self.written += len(content)
            os.replace(draft, path)
        return name


def _frames(video: Any) -> "list[Image]":
    from PIL import Image

    count = len(video)
    chosen = sorted({round(place * (count - 1) / max(FRAMES - 1, 1)) for place in range(FRAMES)}) if count else []
    return [Image.fromarray(video[place].permute(1, 2, 0).contiguous().numpy()) for place in chosen]


def _encode(frames: "list[Image]") -> bytes:
    content = io.BytesIO()  # a picture that is saved to a path is written there in pieces, at twice the time
    if len(frames) == 1:
        frames[0].save(content, format="PNG", compress_level=1)
    elif frames:
        options: dict[str, Any] = {"save_all": True, "duration": FRAME_MILLISECONDS, "loop": 0, "method": 0}
        frames[0].save(content, format="WEBP", append_images=frames[1:], **options)
    return content.getvalue()


def _digest(frames: "Iterable[Image]") -> str:
    found = hashlib.blake2b(digest_size=16)
    for frame in frames:
        found.update(f"{frame.mode} {frame.size} ".encode())
        found.update(frame.tobytes())
    return found.hexdigest()
