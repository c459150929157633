"""Compare pictures by a digest of their pixels, and by a 64-bit difference hash that survives resizing and JPEG."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from r1_data.pictures import load_image
from r1_data.types import PictureReference

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

DISTANCE = 4  # bits of the difference hash in which two pictures that look the same may differ
ALIKE = 0.95  # least correlation of their thumbnails: sparse drawings on white have hashes of few bits
PLAIN = 8  # gray levels; a thumbnail with fewer shows nothing that tells it from others
MARGIN = 2  # gray levels; smaller differences of neighbours are noise of the encoder
SIDE = 16  # pixels of a thumbnail
MOST = 5  # rows that share one picture; more often it is a placeholder or a logo


class PicturePrint(NamedTuple):
    """A picture for comparison."""

    pixels: bytes  # digest of size and pixels
    bits: int  # difference hash
    thumbnail: bytes  # SIDE × SIDE gray levels


def print_picture(reference: PictureReference) -> PicturePrint | None:
    """Return None for a picture of one colour. Raises MediaError if it cannot be decoded."""
    return print_image(load_image(reference))


def print_image(image: "Image") -> PicturePrint | None:
    from PIL.Image import Resampling

    gray = image.convert("L")
    thumbnail = np.asarray(gray.resize((SIDE, SIDE), Resampling.BOX))
    if np.ptp(thumbnail) < PLAIN:
        return None
    columns = np.asarray(gray.resize((9, 8), Resampling.BOX), dtype=np.int16)
    falls = columns[:, :-1] > columns[:, 1:] + MARGIN
    bits = int.from_bytes(np.packbits(falls).tobytes(), "big")
    content = repr(image.size).encode() + image.tobytes()
    return PicturePrint(hashlib.blake2b(content, digest_size=16).digest(), bits, thumbnail.tobytes())


class PictureIndex:
    """Many pictures, to find those that look like another."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._bits: list[int] = []
        self._thumbnails: list[bytes] = []
        self._by_pixels = defaultdict[bytes, list[int]](list)

    def add(self, row: int, picture: PicturePrint) -> None:
        places = self._by_pixels[picture.pixels]
        places.append(row)
        if len(places) == 1:
            self._rows.append(row)
            self._bits.append(picture.bits)
            self._thumbnails.append(picture.thumbnail)

    def close(self) -> None:
        self.bits = np.array(self._bits, dtype=np.uint64)
        self.thumbnails = np.frombuffer(b"".join(self._thumbnails), np.uint8).reshape(-1, SIDE * SIDE)

    def find(self, picture: PicturePrint) -> Iterator[tuple[int, bool, float]]:
        """Yield row, whether the pixels are equal, and correlation of each picture that looks the same."""
        same = self._by_pixels.get(picture.pixels, [])
        if len(set(same)) > max(MOST, len(self._bits) // 100):
            return
        yield from ((row, True, 1.0) for row in same)
        near = np.flatnonzero(np.bitwise_count(self.bits ^ np.uint64(picture.bits)) <= DISTANCE)
        if not len(near):
            return
        likeness = _correlate(self.thumbnails[near], np.frombuffer(picture.thumbnail, np.uint8))
        for place, value in zip(near, likeness, strict=True):
            row = self._rows[place]
            if value >= ALIKE and row not in same:
                yield row, False, float(value)


def _correlate(many: "NDArray[np.uint8]", one: "NDArray[np.uint8]") -> "NDArray[np.float64]":
    centred = many - many.mean(axis=1, keepdims=True)
    own = one - one.mean()
    norms = np.linalg.norm(centred, axis=1) * np.linalg.norm(own)
    result: NDArray[np.float64] = centred @ own / norms
    return result
