"""References to pictures and videos in rows: bytes, files, URLs, frames. Nothing is decoded here.

Rows are untrusted: a path may not leave its folder, and the network is used only if allowed.
"""

import base64
import binascii
import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, overload
from urllib.parse import unquote, urlsplit

from r1_data.types import Downloads as Downloads
from r1_data.types import MediaError, MediaReference, PictureReference
from r1_data.types import Url as Url
from r1_data.types import Video as Video

if TYPE_CHECKING:
    from PIL.Image import Image
    from typing_extensions import TypeIs

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):(//)?", re.IGNORECASE)
_LONGEST = 4096  # characters of a path
_BASE64 = re.compile(r"[A-Za-z0-9+/=\s]+$")
_BLOCK = 2**16  # bytes read at a time from the network


class Downloaded(bytes):
    address: str


def fetch(url: Url) -> Downloaded:
    """Download a URL. Raises MediaError: no answer, too many bytes, too slow, or a redirect to another scheme."""
    from http.client import HTTPException

    from r1_data.downloads import open_url

    address, limits = url.address, url.downloads
    end, data = time.monotonic() + limits.timeout, bytearray()
    try:
        with open_url(address, limits.timeout) as response:
            while block := response.read1(_BLOCK):  # returns what has arrived, so that a slow body is checked, too
                data += block
                if len(data) > limits.max_bytes or time.monotonic() > end:
                    raise MediaError(f"{address}: over {limits.max_bytes:,} bytes or {limits.timeout:g} seconds")
            expected = response.headers.get("Content-Length", "")
            if expected.isdecimal() and len(data) < int(expected):
                raise MediaError(f"{address}: cut off after {len(data):,} of {int(expected):,} bytes")
    except (OSError, ValueError, HTTPException) as error:
        if isinstance(error, MediaError):
            raise
        raise MediaError(f"{address}: not fetched ({error or type(error).__name__})") from error
    content = Downloaded(data)
    content.address = address
    return content


def resolve_picture(value: object, image_dir: str | None, downloads: Downloads | None = None) -> PictureReference:
    """Convert a cell to a picture reference.

    A cell is bytes, a path, a `data:`, `file://` or (with `downloads`) http URL, a PIL image, or a dict with "bytes"
    and "path" as `datasets` stores pictures. Relative paths start in `image_dir`; no path or link leaves it. Raises
    MediaError otherwise.
    """
    if isinstance(value, Mapping):
        value = next((value[name] for name in ("bytes", "path", "image", "url") if value.get(name)), None)
    if is_pil(value):
        return value
    return _resolve_file(value, image_dir, downloads, "a picture must be bytes, a path, a URL or a PIL image")


def resolve_video(value: object, image_dir: str | None, downloads: Downloads | None = None) -> Video:
    """Convert a cell to a video: what a picture can be, a list of frames, or a dict of "frames" (or "video") and "fps".

    Raises MediaError otherwise.
    """
    fps = None
    if isinstance(value, Mapping):
        fps = value.get("fps")
        if fps is not None and not (isinstance(fps, int | float) and 0 < fps < 1000):
            raise MediaError(f"the fps of a video must be above 0 and below 1000, found {fps!r}")
        value = next((value[name] for name in ("frames", "bytes", "path", "video", "url") if value.get(name)), None)
    if isinstance(value, list | tuple):
        if not value:
            raise MediaError("a video of no frames")
        return Video(tuple(resolve_picture(frame, image_dir, downloads) for frame in value), fps)
    return Video(_resolve_file(value, image_dir, downloads, "a video must be bytes, a path, a URL or a list of frames"))


def open_file(path: Path) -> BufferedReader:
    """Open a file. Raises MediaError if there is none, or if it is a folder, pipe or device."""
    try:
        if path.exists() and not path.is_file():
            raise MediaError(f"{path}: not a file")
        return path.open("rb")
    except FileNotFoundError as error:
        hint = "; base64 is read as a data URL" if len(str(path)) > 80 and _BASE64.fullmatch(path.name) else ""
        raise MediaError(f"{path}: no such file (working directory: {Path.cwd()}{hint})") from error
    except OSError as error:
        raise MediaError(f"{path}: cannot be opened ({error})") from error


def fetched(reference: MediaReference) -> MediaReference:
    """Replace every URL in a reference by its content. Raises MediaError."""
    if not isinstance(reference, Video):
        return fetched_file(reference)
    source = reference.source
    return replace(
        reference,
        source=tuple(fetched_file(frame) for frame in source) if isinstance(source, tuple) else fetched_file(source),
    )


@overload
def fetched_file(reference: bytes | Path | Url) -> bytes | Path: ...
@overload
def fetched_file(reference: PictureReference) -> "bytes | Path | Image": ...
def fetched_file(reference: PictureReference) -> "bytes | Path | Image":
    return fetch(reference) if isinstance(reference, Url) else reference


def pictures(media: Iterable[MediaReference]) -> Iterator[PictureReference]:
    for reference in media:
        if not isinstance(reference, Video):
            yield reference
        elif isinstance(reference.source, tuple):
            yield from reference.source


def digest_content(reference: MediaReference) -> bytes:
    """Return a hash of the encoded content, 16 bytes: the same for bytes, the file that holds them, and their URL.

    Raises MediaError if a file or URL cannot be read.
    """
    reference = fetched(reference)
    if isinstance(reference, Video):
        parts = reference.source if isinstance(reference.source, tuple) else (reference.source,)
        content = repr((reference.fps, len(parts))).encode() + b"".join(map(digest_content, parts))
    elif is_pil(reference):
        try:
            content = repr((reference.mode, reference.size)).encode() + reference.tobytes()
        except (OSError, SyntaxError, ValueError, MemoryError) as error:  # closed, or its file is broken
            raise MediaError(f"picture in memory: cannot be read ({error})") from error
    elif isinstance(reference, Path):
        try:
            with open_file(reference) as file:
                return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).digest()
        except OSError as error:
            raise MediaError(f"{reference}: cannot be read ({error})") from error
    else:
        assert isinstance(reference, bytes)  # URLs are fetched
        content = reference
    return hashlib.blake2b(content, digest_size=16).digest()


def describe(reference: object, kind: str = "picture") -> str:
    if isinstance(reference, Downloaded):
        return f"{kind} {reference.address}"
    if isinstance(reference, bytes):
        return f"{kind} of {len(reference)} bytes"
    return f"{kind} {reference}" if isinstance(reference, str | os.PathLike | Url) else f"{kind} in memory"


def _resolve_file(
    value: object, image_dir: str | None, downloads: Downloads | None, expected: str
) -> bytes | Path | Url:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str | os.PathLike):
        raise MediaError(f"{expected}, found {type(value).__name__}")
    text = os.fspath(value)
    found = _SCHEME.match(text)
    scheme = found[1].lower() if found and (found[2] or found[1].lower() == "data") else None
    if scheme is None:
        return _resolve_path(text, image_dir)
    if scheme == "data":
        return _decode_data_url(text)
    if scheme == "file":
        try:
            parts = urlsplit(text)
        except ValueError as error:
            raise MediaError(f"{text[:80]!r}: not a file:// URL ({error})") from error
        if parts.netloc not in ("", "localhost"):
            raise MediaError(f"{text[:80]!r}: a file on another machine; write file:///folder/name")
        return _resolve_path(unquote(parts.path), image_dir)
    if scheme not in ("http", "https"):
        raise MediaError(f"{text[:80]!r}: URLs of kind {scheme} are not read; give a file, bytes or an http URL")
    if downloads is None:
        raise MediaError(f"{text[:80]!r}: pictures and videos are fetched only with data.allow_urls=true")
    return Url(text, downloads)


def _decode_data_url(text: str) -> bytes:
    header, comma, body = text.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise MediaError(f"{text[:40]!r}: a data URL must read data:<type>;base64,<data>")
    try:
        return base64.b64decode("".join(body.split()), validate=True)  # some writers wrap lines
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"{text[:40]!r}: a data URL with broken base64 ({error})") from error


def _resolve_path(path: str, image_dir: str | None) -> Path:
    if not path:
        raise MediaError("an empty path")
    if "\0" in path:
        raise MediaError(f"{path[:80]!r}: a path holds no zero byte")
    if len(path) > _LONGEST:
        hint = "; base64 is read as a data URL, data:image/png;base64,…" if _BASE64.match(path[:_LONGEST]) else ""
        raise MediaError(f"{path[:40]!r}…: a path of {len(path):,} characters is too long{hint}")
    try:
        path.encode("utf-8")
    except UnicodeEncodeError as error:
        raise MediaError(f"{path[:80]!r}: half of a surrogate pair, which names no file") from error
    if image_dir is None:
        return Path(path)
    folder = os.path.abspath(image_dir)
    full = os.path.normpath(os.path.join(folder, path))
    if os.path.commonpath([folder, full]) != folder:
        raise MediaError(f"{path!r} leads out of the picture folder {image_dir!r}")
    if _is_outside(full, folder):
        raise MediaError(
            f"{path!r} leads out of the picture folder {image_dir!r} by a link to {os.path.realpath(full)!r}; copy the "
            "files there, or let the picture folder be one that holds the target, too"
        )
    return Path(full)


def _is_outside(path: str, folder: str) -> bool:
    """Whether a path leaves a folder through links, except into the `blobs` of a hub snapshot."""
    target, home = os.path.realpath(path), os.path.realpath(folder)
    repository, snapshots, _ = home.rpartition(f"{os.sep}snapshots{os.sep}")
    homes = [home, os.path.join(repository, "blobs")] if snapshots else [home]
    return not any(os.path.commonpath([one, target]) == one for one in homes)


def is_pil(value: object) -> "TypeIs[Image]":
    from PIL.Image import Image

    return isinstance(value, Image)
