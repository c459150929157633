"""Compare texts by the share of what they have in common: runs of 13 words, pairs of words, and whole sentences."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress, pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from r1_data.overlap.words import NAME, hash_whole, read_sentences

if TYPE_CHECKING:
    from numpy.typing import NDArray

RUN = 13  # words of an n-gram
SHARE = 0.5  # of the shorter text's n-grams or sentences, or the longer one's pairs: then two texts are the same
FEWEST_PLAIN = 7  # words of a masked n-gram that are no number, name or pronoun; with fewer it fits anything
FEWEST_WORDS = 4  # of a sentence
FEWEST_PAIRS = 8  # of words in common
COMMON = 0.01  # of the indexed texts: what more of them hold is an instruction that all share, and does not count
FEWEST_COMMON = 5  # texts that may share anything

Item = TypeVar("Item")


class TextParts(NamedTuple):
    """What a text is compared by: distinct hashes, and how much each counts."""

    hashes: "NDArray[np.int64]"
    weights: "NDArray[np.float32]"
    total: float  # weight of the whole text

    @property
    def none(self) -> bool:
        return not len(self.hashes)


class TextPrint(NamedTuple):
    """A text for comparison."""

    whole: int  # hash of all its words and arithmetic signs
    words: int
    runs: TextParts  # of RUN words; of a shorter text none
    masked_runs: TextParts  # without numbers and names
    pairs: TextParts  # of words that stand together, in any order: many are left if others are replaced
    masked_sentences: TextParts


def print_text(text: str) -> TextPrint:
    sentences = read_sentences(text)
    words = list(chain.from_iterable(sentences))
    if len(words) < RUN:
        return TextPrint(hash_whole(text), len(words), _NOTHING, _NOTHING, _NOTHING, _NOTHING)
    shouts = 2 * sum(word.kind == NAME for word in words) > len(words)  # a text in capitals has no names in it
    plain = [word.plain for word in words]
    masked = [word.plain if shouts and word.kind == NAME else word.masked for word in words]
    shown = [one == other for one, other in zip(plain, masked, strict=True)]
    telling = [count >= FEWEST_PLAIN for count in map(sum, zip(*_shifted(shown), strict=False))]
    ends = list(accumulate(map(len, sentences)))
    spans = [slice(end - len(sentence), end) for sentence, end in zip(sentences, ends, strict=True)]
    lengths, shown_lengths = list(map(len, sentences)), [sum(shown[span]) for span in spans]
    mostly_shown = [2 * some >= all_words for some, all_words in zip(shown_lengths, lengths, strict=True)]
    return TextPrint(
        hash_whole(text),
        len(words),
        _runs(plain),
        _runs(masked, telling),
        _parts(dict.fromkeys(map(hash, pairwise(plain)), 1)),
        _sentences([masked[span] for span in spans], shown_lengths, mostly_shown),
    )


def _shifted(words: Sequence[Item]) -> list[Sequence[Item]]:
    return [words[start:] for start in range(RUN)]


def _runs(words: list[int], counted: list[bool] | None = None) -> TextParts:
    # A hash of whole numbers is the same in all processes, unlike one of texts.
    hashes = map(hash, zip(*_shifted(words), strict=False))
    return _parts(dict.fromkeys(hashes if counted is None else compress(hashes, counted), 1))


def _sentences(sentences: list[list[int]], weights: list[int], counted: list[bool]) -> TextParts:
    found = zip(sentences, weights, counted, strict=True)
    long = {hash(tuple(words)): weight for words, weight, counts in found if counts and weight >= FEWEST_WORDS}
    return _parts(long, sum(weights))


def _parts(weights: Mapping[int, int], total: int | None = None) -> TextParts:
    hashes = np.fromiter(weights, np.int64, len(weights))
    return TextParts(hashes, np.fromiter(weights.values(), np.float32, len(weights)), float(total or len(weights)))


_NOTHING = _parts({})


@dataclass(slots=True)
class _Block:
    """TextParts of many texts: a part's hash and weight, and its text."""

    hashes: "NDArray[np.int64]"
    weights: "NDArray[np.float32]"
    rows: "NDArray[np.int32]"


class PartsIndex:
    """TextParts of many texts by hash. It takes 16 bytes a part."""

    def __init__(self) -> None:
        self._pending: list[tuple[TextParts, int]] = []
        self._blocks: list[_Block] = []
        self._totals: list[float] = []  # by text

    def add(self, parts: TextParts) -> None:
        self._pending.append((parts, len(self._totals)))
        self._totals.append(parts.total)
        if len(self._pending) >= 2**12:
            self._pack()

    def _pack(self) -> None:
        if self._pending:
            rows = [np.full(len(parts.hashes), row, np.int32) for parts, row in self._pending]
            hashes = [parts.hashes for parts, _ in self._pending]
            weights = [parts.weights for parts, _ in self._pending]
            self._blocks.append(_Block(np.concatenate(hashes), np.concatenate(weights), np.concatenate(rows)))
            self._pending = []

    def close(self) -> None:
        """Sort what was added. TextParts that too many texts have are marked: their row is -1."""
        self._pack()
        blocks, self._blocks = [*self._blocks, _Block(*_NOTHING[:2], np.empty(0, np.int32))], []
        hashes = np.concatenate([block.hashes for block in blocks])
        weights = np.concatenate([block.weights for block in blocks])
        rows = np.concatenate([block.rows for block in blocks])
        order = np.argsort(hashes, kind="stable")
        hashes, weights, rows = hashes[order], weights[order], rows[order]
        _, first, counts = np.unique(hashes, return_index=True, return_counts=True)
        common = np.repeat(counts > max(FEWEST_COMMON, COMMON * len(self._totals)), counts)
        lost = np.bincount(rows[common], weights[common], minlength=len(self._totals))
        self.totals = np.array(self._totals, dtype=np.float64) - lost
        kept = ~common
        kept[first] = True
        rows[common] = -1
        self.hashes, self.weights, self.rows = hashes[kept], weights[kept], rows[kept]

    def shares(self, parts: TextParts, least: float, *, of_longer: bool = False) -> Mapping[int, float]:
        """Return the share that each text has in common, of those from SHARE on.

        Args:
            least: the weight in common.
            of_longer: the share of the text with more parts, in place of the one with fewer.
        """
        low = np.searchsorted(self.hashes, parts.hashes)
        counts = np.searchsorted(self.hashes, parts.hashes, "right") - low
        if not counts.any():
            return {}
        # The places of all entries: `low` and those after it, `counts` of them for each part.
        entries = np.repeat(low - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        rows, weights = self.rows[entries], np.repeat(parts.weights, counts)
        common = rows < 0
        total = parts.total - float(weights[common].sum())
        kept, places = np.unique(rows[~common], return_inverse=True)
        shared = np.bincount(places, np.minimum(weights, self.weights[entries])[~common], minlength=len(kept))
        whole = (np.maximum if of_longer else np.minimum)(total, self.totals[kept])
        found = np.minimum(1.0, shared / np.maximum(1.0, whole))
        same = (found >= SHARE) & (shared >= least)
        return dict(zip(kept[same].tolist(), found[same].tolist(), strict=True))


class TextIndex:
    """Many texts, to find those that equal another."""

    def __init__(self) -> None:
        self._rows = defaultdict[int, list[int]](list)  # by the hash of the whole text
        self._distinct: list[list[int]] = []  # rows of each text that is compared by parts
        self._runs, self._masked_runs = PartsIndex(), PartsIndex()
        self._pairs, self._masked_sentences = PartsIndex(), PartsIndex()

    def add(self, row: int, text: TextPrint) -> None:
        rows = self._rows[text.whole]
        rows.append(row)
        if len(rows) == 1 and text.words >= RUN:
            self._distinct.append(rows)
            for index, parts, *_ in self._compared(text):
                index.add(parts)

    def close(self) -> None:
        for index in (self._runs, self._masked_runs, self._pairs, self._masked_sentences):
            index.close()

    def _compared(self, text: TextPrint) -> Iterator[tuple[PartsIndex, TextParts, bool, float, bool]]:
        """Yield index, parts, whether they are masked, and `least` and `of_longer` of `shares`, the surest first."""
        yield self._runs, text.runs, False, 1.0, False
        yield self._masked_runs, text.masked_runs, True, 1.0, False
        yield self._pairs, text.pairs, False, float(FEWEST_PAIRS), True
        yield self._masked_sentences, text.masked_sentences, True, float(RUN), False

    def find(self, text: TextPrint) -> Iterator[tuple[int, bool, float]]:
        """Yield row, whether only numbers or names differ, and share, of each text that is the same."""
        found: dict[int, tuple[bool, float]] = dict.fromkeys(self._rows.get(text.whole, ()), (False, 1.0))
        for index, parts, masked, least, of_longer in self._compared(text):
            for number, share in index.shares(parts, least, of_longer=of_longer).items():
                for row in self._distinct[number]:
                    if row not in found or (found[row][0] == masked and found[row][1] < share):
                        found[row] = masked, share
        yield from ((row, masked, share) for row, (masked, share) in found.items())
