"""Tests of media: sizes from headers, upright pixels, and pictures that must be refused."""

import io
import struct
import warnings
import zlib

import PIL.Image
import pytest
from PIL import Image, ImageChops

from r1_data.pictures import image_size, load_image
from r1_data.types import DataError


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM"])
def test_size_from_the_header_equals_size_of_the_pixels(picture, kind):
    data = picture(60, 40, kind)
    assert image_size(data) == (40, 60)
    loaded = load_image(data)
    assert (loaded.height, loaded.width, loaded.mode) == (40, 60, "RGB")


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "CMYK", "LA"])
def test_every_colour_mode_becomes_rgb(mode):
    assert load_image(Image.new(mode, (4, 6))).mode == "RGB"


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied_once_and_known_from_the_header(picture, kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = picture(60, 40, kind, exif=exif)
    loaded = load_image(data)
    assert image_size(data) == (loaded.height, loaded.width) == ((60, 40) if orientation >= 5 else (40, 60))
    expected = PIL.ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert ImageChops.difference(loaded, expected).getbbox() is None
    assert loaded.getexif().get(0x0112) is None


def test_size_needs_the_header_and_the_end_but_no_pixels(picture):
    data = bytearray(picture(300, 200))
    data[64:-16] = bytes(len(data) - 80)
    assert image_size(bytes(data)) == (200, 300)


@pytest.mark.parametrize("image_format", ["PNG", "JPEG"])
def test_a_file_that_is_cut_off_has_no_size(tmp_path, image_format):
    whole = io.BytesIO()
    Image.effect_noise((64, 48), 80).save(whole, image_format)
    for name, data in (
        ("whole", whole.getvalue()),
        ("cut", whole.getvalue()[:-200]),
        ("tailed", whole.getvalue() + bytes(99)),
    ):
        (tmp_path / name).write_bytes(data)
    assert image_size(tmp_path / "whole") == image_size(tmp_path / "tailed") == (48, 64)
    for cut in (tmp_path / "cut", (tmp_path / "cut").read_bytes()):
        with pytest.raises(DataError, match="truncated"):
            image_size(cut)


def test_picture_in_memory_stays_open_and_unchanged():
    image = Image.new("L", (5, 4), 7)
    assert image_size(image) == (4, 5)
    assert load_image(image).getpixel((0, 0)) == (7, 7, 7)
    assert image.mode == "L"


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100))


@pytest.mark.parametrize("side", [10_000, 60_000])  # just over PIL's limit (where it only warns), and far over
def test_decompression_bombs_are_errors_not_warnings(side):
    for read in (image_size, load_image):
        with warnings.catch_warnings(record=True) as warned:
            warnings.resetwarnings()
            with pytest.raises(DataError, match=r"limit|decompression bomb"):
                read(png_header(side, side))
        assert not warned
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as a user may have it
        with pytest.raises(DataError, match="decompression bomb"):
            image_size(png_header(side, side))


@pytest.mark.parametrize("read", [image_size, load_image])
@pytest.mark.parametrize("data", [b"", b"not a picture", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"%!PS-Adobe-3.0 EPSF-3.0\n"])
def test_bytes_that_are_no_picture_are_refused(read, data):
    with pytest.raises(DataError, match=f"picture of {len(data)} bytes"):
        read(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_truncated_pictures_do_not_decode(picture, kind):
    data = picture(200, 200, kind)
    with pytest.raises(DataError, match="cannot be read"):
        load_image(data[: len(data) // 2])


def test_a_tiff_whose_pixels_begin_at_a_fraction_is_refused(picture):
    data = picture(60, 40, "TIFF")
    at = data.index(struct.pack("<HHI", 273, 4, 1))  # StripOffsets, one 32-bit integer; 11 is a float
    broken = data[:at] + struct.pack("<HHIf", 273, 11, 1, 8.5) + data[at + 12 :]
    with pytest.raises(DataError, match="cannot be read"):
        load_image(broken)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.png: no such file"):
        image_size(tmp_path / "gone.png")
