"""Odd and broken pictures, and where a row says they are."""

import gzip

import numpy as np
from odd_cases import Case, Named, Read, beside, row, shown
from odd_media import (
    PNG,
    RED,
    URL,
    drawing,
    encode,
    film,
    flat,
    flipped,
    huge_png,
    lacking,
    moving,
    noise,
    palette_clear,
    with_exif_turn,
)
from PIL import Image


def pictures() -> dict[str, Case]:
    deep = np.full((40, 60), 32768, np.uint16)
    # By the README's rule, JPEGs that lost bytes and still decode are taken: the format has no checksum.
    white = (255, 255, 255)
    return {
        "transparent drawing": Case(shown(drawing("RGBA")), Read(corner=white)),
        "transparent gray drawing": Case(shown(drawing("LA")), Read(corner=white)),
        "transparent palette": Case(shown(palette_clear()), Read(corner=white)),
        "transparent picture in memory": Case(shown(Image.new("RGBA", (60, 40), (0, 0, 0, 0))), Read(corner=white)),
        "16-bit gray": Case(shown(encode(Image.fromarray(deep))), Read(corner=(128, 128, 128))),
        "16-bit gray TIFF": Case(shown(encode(Image.fromarray(deep), "TIFF")), Read(corner=(128, 128, 128))),
        "float TIFF": Case(
            shown(encode(Image.fromarray(np.full((40, 60), 0.5, np.float32)), "TIFF")), Named("float|depth|mode")
        ),
        "32-bit TIFF": Case(
            shown(encode(Image.fromarray(np.full((40, 60), 70_000, np.int32)), "TIFF")), Named("32|depth|mode")
        ),
        "CMYK JPEG": Case(shown(encode(flat((0, 255, 255, 0), "CMYK"), "JPEG")), Read(pictures=1)),
        "one-bit PNG": Case(shown(encode(flat(1, "1"))), Read(corner=white)),
        "turned JPEG": Case(shown(with_exif_turn()), Read(shape="tall")),
        "animated GIF": Case(shown(moving("GIF")), Read(corner=RED)),
        "animated PNG": Case(shown(moving("PNG")), Read(corner=RED)),
        "animated WebP": Case(shown(moving("WEBP")), Read(corner=RED)),
        "TIFF of pages": Case(shown(moving("TIFF")), Read(corner=RED)),
        "JPEG that lost 40 bytes": Case(shown(lacking(noise("JPEG"), 0.5, 40)), Read(pictures=1)),
        "JPEG that lost its last rows": Case(shown(noise("JPEG")[:-200] + b"\xff\xd9"), Read(pictures=1)),
        "PNG with a flipped byte": Case(shown(flipped(noise())), Named("broken|damaged|cannot|decode|PNG")),
        "PNG cut off": Case(shown(noise()[:2000]), Named("truncated|cut")),
        "PNG with something behind": Case(shown(PNG + b"more"), Read(corner=RED)),
        "PNG with a broken colour profile": Case(shown(encode(flat(), icc_profile=b"nonsense")), Read(corner=RED)),
        "web page as a picture": Case(shown(b"<!doctype html><html>404</html>"), Named("cannot be read|no picture")),
        "pointer of git-lfs": Case(
            shown(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), Named("cannot be read|lfs")
        ),
        "picture of no bytes": Case(shown(b""), Named("0 bytes|empty")),
        "picture of one pixel": Case(shown(encode(flat(size=(1, 1)))), Read(corner=RED)),
        "picture far too wide": Case(shown(encode(flat(size=(900, 3)))), Named("aspect|wide")),
        "picture bomb": Case(shown(huge_png(30_000, 30_000)), Named("limit|bomb|pixels")),
        "BMP": Case(shown(encode(flat(), "BMP")), Read(corner=RED)),
        "WebP without loss": Case(shown(encode(flat(), "WEBP", lossless=True)), Read(corner=RED)),
        "JPEG 2000": Case(shown(encode(flat(), "JPEG2000")), Named("JPEG2000|JPEG 2000|cannot be read")),
        "PDF": Case(shown(b"%PDF-1.4\n1 0 obj\n"), Named("cannot be read")),
        "SVG": Case(shown(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), Named("cannot be read")),
        "gzip of a PNG": Case(shown(gzip.compress(PNG)), Named("cannot be read")),
        "array as a picture": Case(shown(np.zeros((40, 60, 3), np.uint8)), Named("picture|image")),
        "number as a picture": Case(shown(5), Named("picture|image")),
        "null as a picture": Case(shown(None), Named("picture|image")),
        "list in a list": Case(shown([PNG]), Named("picture|image")),
        "one picture, no list": Case(row(problem="<image>?", images=PNG), Read(corner=RED)),
        "mapping of bytes": Case(shown({"bytes": PNG, "path": None}), Read(corner=RED)),
        "mapping of nothing": Case(shown({"bytes": None, "path": None}), Named("picture|image|bytes")),
        "mapping of another key": Case(shown({"data": PNG}), Named("picture|image|bytes")),
        "raw base64": Case(shown(URL * 400), Named("base64")),
        "data URL": Case(shown(f"data:image/png;base64,{URL}"), Read(corner=RED)),
        "data URL with a character set": Case(shown(f"data:image/png;charset=utf-8;base64,{URL}"), Read(corner=RED)),
        "data URL without base64": Case(shown("data:image/png,abc"), Named("base64")),
        "data URL with a broken end": Case(shown("data:image/png;base64,A"), Named("base64")),
        "path of spaces and signs": Case(beside({"a b é%.png": PNG}, "a b é%.png"), Read(corner=RED)),
        "path by file URL": Case(beside({"a b.png": PNG}, "file://{}/a%20b.png"), Read(corner=RED)),
        "path out of the folder": Case(shown("../secret.png"), Named("leads out")),
        "path from another root": Case(shown("/etc/passwd"), Named("leads out")),
        "path of windows": Case(shown("C:\\pictures\\a.png"), Named("no such file")),
        "path with half a surrogate pair": Case(shown("a\ud800.png"), Named("surrogate")),
        "path of 5,000 letters": Case(shown("a" * 5000 + ".png"), Named("too long|no such")),
        "path of nothing": Case(shown(""), Named("empty|picture|path")),
        "file URL of brackets": Case(shown("file://[/x.png"), Named("file://")),
        "URL where none is allowed": Case(shown("https://host/x.png"), Named("allow_urls")),
        "URL of a bucket": Case(shown("s3://bucket/x.png"), Named("s3")),
        "video as a picture": Case(shown(film()), Named("cannot be read|video")),
    }
