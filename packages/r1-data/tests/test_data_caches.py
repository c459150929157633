"""A cache never ends a run: whatever has become of it, what it held is made again."""

import errno
import sqlite3
from contextlib import closing

import numpy
import pytest

from r1_data.lengths import KnownLengths
from r1_data.media_cache import MediaCache
from r1_data.render import Renderer
from r1_data.types import Example


def test_a_damaged_file_of_lengths_is_given_up_with_a_word(tmp_path, caplog):
    path = tmp_path / "lengths.sqlite"
    known = KnownLengths(path, "f")
    known._file.executemany("INSERT INTO lengths VALUES (?, ?)", [(bytes([n]) * 200, n) for n in range(200)])
    known._file.commit()
    known.close()
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xaa" * (len(data) - 4096)
    path.write_bytes(bytes(data))
    known = KnownLengths(path, "f")
    assert [known.get(bytes([n]) * 200) for n in range(3)] == [None] * 3
    known.put(b"k", 1)
    known.close()
    assert caplog.text.count("this check will not be remembered") == 1


def test_a_length_that_is_no_number_is_measured_again(tmp_path):
    known = KnownLengths(tmp_path / "lengths.sqlite", "f")
    with sqlite3.connect(tmp_path / "lengths.sqlite") as file:
        file.execute("INSERT INTO lengths VALUES (?, ?)", (b"k", "many"))
    assert known.get(b"k") is None


def test_a_file_of_lengths_that_may_only_be_read_is_read_and_given_up_when_written(tmp_path, caplog):
    with closing(KnownLengths(tmp_path / "lengths.sqlite", "f")) as known:
        known.put(b"k", 7)
    known = KnownLengths(tmp_path / "lengths.sqlite", "f")
    known._file.execute("PRAGMA query_only = ON")
    assert known.get(b"k") == 7
    known.put(b"new", 8)
    known.close()
    assert "cannot be written" in caplog.text


def test_a_folder_of_media_that_may_only_be_read_is_of_use_and_is_not_written(tmp_path, monkeypatch):
    array = numpy.zeros((4, 4, 3), numpy.uint8)
    MediaCache(0, tmp_path, 10**9).put("abc", array)

    def refuse(*args, **settings):
        raise OSError(errno.EROFS, "Read-only file system")

    cache = MediaCache(0, tmp_path, 10**9)
    for name in ("os.utime", "pathlib.Path.mkdir", "pathlib.Path.open", "pathlib.Path.unlink"):
        monkeypatch.setattr(name, refuse)
    assert (cache.get("abc") == array).all()
    cache.put("def", array)
    assert cache.get("def") is None


def test_a_folder_that_cannot_be_used_leaves_a_cache_without_one(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    cache = MediaCache(100, tmp_path / "file" / "media", 1000)
    cache.put("key", numpy.zeros(3, numpy.uint8))
    assert cache.get("key") is not None
    assert "are not kept on disk" in caplog.text


@pytest.mark.parametrize(
    "array", [numpy.zeros((2, 2), numpy.uint8), numpy.zeros((4, 4, 3)), numpy.zeros((4, 4, 4), numpy.uint8)]
)
def test_pixels_of_another_shape_are_made_again(processor, picture, tmp_path, array):
    example = Example("t:1", [{"role": "user", "content": [{"type": "image"}]}], (picture(60, 40),), "1")
    renderer = Renderer(processor, cache=MediaCache(0, tmp_path, 10**9))
    expected = renderer.render(example).model_inputs["pixel_values"]
    (path,) = tmp_path.glob("??/*.npy")
    numpy.save(path, array)
    assert (renderer.render(example).model_inputs["pixel_values"] == expected).all()


def test_a_file_in_the_place_of_pixels_is_no_error(tmp_path):
    cache = MediaCache(0, tmp_path, 10**9)
    cache.put("abc", numpy.zeros((4, 4, 3), numpy.uint8))
    (path,) = tmp_path.glob("??/*.npy")
    path.write_bytes(b"\x93NUMPY\x01\x00\x20\x00{'descr': 7\n")
    assert cache.get("abc") is None
