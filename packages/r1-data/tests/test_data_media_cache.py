"""Tests of the media cache: what is kept, what leaves first, and that broken files are no trouble."""

import os

import numpy as np
import pytest

from r1_data.media_cache import MediaCache


def array(number: int, size: int = 1000) -> np.ndarray:
    return np.full(size, number, np.uint8)


def test_memory_keeps_what_was_used_last():
    cache = MediaCache(3000)
    for number in range(3):
        cache.put(f"k{number}", array(number))
    assert cache.get("k0") is not None
    cache.put("k3", array(3))
    assert [cache.get(f"k{number}") is None for number in range(4)] == [False, True, False, False]
    cache.put("large", array(9, 3001))
    assert cache.get("large") is None
    assert cache.bytes == 3000


def test_disk_outlives_the_process_and_stays_bounded(tmp_path):
    first = MediaCache(0, tmp_path, 20_000)
    for number in range(12):
        first.put(f"{number:02}key", array(number))
        path = tmp_path / f"{number:02}" / f"{number:02}key.npy"
        os.utime(path, (number, number))
    assert np.array_equal(MediaCache(0, tmp_path, 20_000).get("05key"), array(5))
    for number in range(12, 40):
        first.put(f"{number:02}key", array(number))
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(sizes) <= 20_000
    assert first.get("00key") is None
    assert first.get("39key") is not None


@pytest.mark.parametrize("content", [b"", b"no array", b"\x93NUMPY\x01\x00"])
def test_broken_files_are_as_if_not_there(tmp_path, content):
    cache = MediaCache(0, tmp_path, 10_000)
    cache.put("abkey", array(1))
    (tmp_path / "ab" / "abkey.npy").write_bytes(content)
    assert cache.get("abkey") is None


def test_the_bound_on_disk_is_that_of_all_processes(tmp_path):
    caches = [MediaCache(0, tmp_path, 100_000) for _ in range(6)]  # as six workers have them, none told of the others
    for number in range(300):
        caches[number % 6].put(f"{number:03}key", array(number % 256))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.npy")) <= 100_000
    assert caches[0].get("299key") is not None
