"""Pictures and films as bytes: sound ones, odd ones and broken ones."""

import base64
import io
import struct
import zlib
from typing import Any

import av
import numpy as np
from PIL import Image

RED, BLACK = (255, 0, 0), (0, 0, 0)


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(kind: str = "PNG", size: tuple[int, int] = (120, 90), **options: Any) -> bytes:
    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return encode(Image.fromarray(values), kind, **options)


def flat(colour: Any = RED, mode: str = "RGB", size: tuple[int, int] = (60, 40)) -> Image.Image:
    return Image.new(mode, size, colour)


def drawing(mode: str) -> bytes:
    """A transparent picture with a black box in its middle."""
    clear: Any = {"RGBA": (0, 0, 0, 0), "LA": (0, 0)}[mode]
    ink: Any = {"RGBA": (0, 0, 0, 255), "LA": (0, 255)}[mode]
    image = Image.new(mode, (60, 40), clear)
    image.paste(ink, (20, 10, 40, 30))
    return encode(image)


def palette_clear() -> bytes:
    image = Image.new("P", (60, 40), 0)
    image.putpalette([0, 0, 0, 255, 0, 0])
    image.paste(1, (20, 10, 40, 30))
    return encode(image, transparency=0)


def with_exif_turn() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(flat(size=(80, 40)), "JPEG", exif=exif.tobytes())


def moving(kind: str, count: int = 3) -> bytes:
    frames = [flat(colour) for colour in (RED, (0, 255, 0), (0, 0, 255))][:count]
    return encode(frames[0], kind, save_all=True, append_images=frames[1:])


def lacking(data: bytes, at: float, count: int) -> bytes:
    start = int(len(data) * at)
    return data[:start] + data[start + count :]


def flipped(data: bytes, at: float = 0.5) -> bytes:
    changed = bytearray(data)
    changed[int(len(data) * at)] ^= 0xFF
    return bytes(changed)


def huge_png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    body = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")


def film(width: int = 64, height: int = 48, frames: int = 8, kind: str = "mp4", codec: str = "mpeg4") -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=4)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(frames):
            pixels = np.full((height, width, 3), 20 + 20 * index, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
        container.mux(stream.encode())
    return buffer.getvalue()


def turned_film() -> bytes:
    """A film as a telephone writes it: wide frames, and a matrix that stands it upright."""
    data = film(64, 32)
    straight = struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30)
    turned = struct.pack(">9i", 0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30)
    at = data.index(straight, data.index(b"tkhd"))
    return data[:at] + turned + data[at + len(turned) :]


def sound_only() -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


URL = base64.b64encode(encode(flat())).decode()
PNG = encode(flat())
