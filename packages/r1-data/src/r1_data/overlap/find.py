"""Find the rows of a benchmark that training rows repeat, with one pair for each."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from r1_data.overlap.fingerprints import Fingerprint
from r1_data.overlap.picture_hashes import PictureIndex
from r1_data.overlap.shares import TextIndex

Kind = Literal["text", "numbers", "pixels", "picture"]
KINDS: tuple[Kind, ...] = ("text", "pixels", "numbers", "picture")  # the surest first


@dataclass(frozen=True, slots=True)
class Overlap:
    """A held-out row, and the training row that is most like it."""

    # text: SHARE of its n-grams or sentences. numbers: the same but for numbers and names. pixels: a picture of equal
    # pixels. picture: one that looks the same.
    kind: Kind
    share: float  # of n-grams or sentences; of pictures, the correlation of their thumbnails
    training: Fingerprint
    held_out: Fingerprint
    count: int = 1  # of training rows that are like it


class RowIndex:
    """Fingerprints of many rows, to find those that are like another."""

    def __init__(self, rows: Iterable[Fingerprint]) -> None:
        """Only what rows are compared by is stored, so index the smaller of two sets."""
        self.rows: list[Fingerprint] = []
        self._texts, self._pictures = TextIndex(), PictureIndex()
        for row in rows:
            if row.content is None:
                continue
            number = len(self.rows)
            self.rows.append(replace(row, content=None))
            if row.content.text is not None:
                self._texts.add(number, row.content.text)
            for picture in row.content.pictures:
                self._pictures.add(number, picture)
        self._texts.close()
        self._pictures.close()

    def find(self, row: Fingerprint) -> Iterator[tuple[Fingerprint, Kind, float]]:
        """Yield each row that is like this one, once, with the surest reason."""
        if row.content is None:
            return
        found: dict[int, tuple[int, float]] = {}

        def note(number: int, kind: Kind, share: float) -> None:
            new = KINDS.index(kind), -share
            found[number] = min(found.get(number, new), new)

        if row.content.text is not None:
            for number, masked, share in self._texts.find(row.content.text):
                note(number, "numbers" if masked else "text", share)
        for picture in row.content.pictures:
            for number, same, likeness in self._pictures.find(picture):
                note(number, "pixels" if same else "picture", likeness)
        yield from ((self.rows[number], KINDS[kind], -share) for number, (kind, share) in found.items())


def find_overlaps(
    training: Iterable[Fingerprint], held_out: Iterable[Fingerprint], *, index_training: bool
) -> list[Overlap]:
    """Return one pair for each held-out row that a training row is like, in the order of the held-out rows.

    Args:
        index_training: index the training rows, and stream the others. Index the smaller set: of the other, no
            fingerprint is stored.
    """
    index = RowIndex(training if index_training else held_out)
    best: dict[tuple[int, int], Overlap] = {}
    for row in held_out if index_training else training:
        bare = replace(row, content=None)
        for other, kind, share in index.find(row):
            pair = Overlap(kind, share, *((other, bare) if index_training else (bare, other)))
            place = pair.held_out.source, pair.held_out.index
            before = best.get(place)
            if before is None:
                best[place] = pair
            else:
                chosen = min(before, pair, key=lambda one: (KINDS.index(one.kind), -one.share))
                best[place] = replace(chosen, count=before.count + 1)
    return [best[place] for place in sorted(best)]
