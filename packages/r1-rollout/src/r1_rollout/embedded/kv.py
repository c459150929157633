"""The KV cache of running samples.

Prompts are stored once for all their samples; samples' own tokens are stored apart; both in segments.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from r1_rollout.embedded.scores import ScoreChange
from r1_rollout.embedded.segments import Layer, Numbers, Readers, Segment, cut
from r1_rollout.embedded.softmax import AttentionPart, attend
from r1_rollout.embedded.states import RecurrentState, StateHolder
from r1_rollout.embedded.windows import AttentionWindow

GRAIN = 64  # columns by which answers grow where kernels are replayed

_decoding: ContextVar["GroupCache | None"] = ContextVar("decoding", default=None)


def decoding_cache() -> "GroupCache | None":
    """Return the cache of the step that the model computes, None outside of steps."""
    return _decoding.get()


class Target(NamedTuple):
    segment: Segment
    rows: Tensor | slice  # int64 [tokens], or all rows in their order
    places: Tensor  # int64 [tokens]
    columns: Tensor | None = None  # int64 [tokens], see `GroupCache.place`


class _Aimed(NamedTuple):
    """What a segment's readers and target depend on, but for the columns."""

    changes: int  # of the segment's owners
    rows: int
    places: Numbers  # of the rows that write to it


class KeysValues(NamedTuple):
    """One layer's keys and values [prompts, heads, columns, size]."""

    keys: Tensor
    values: Tensor


class GroupCache(StateHolder):
    """A slot per prompt and a row per running sample.

    Rows have their own lengths and are replaced independently. Columns past a row's length are masked. `layers` are the
    states of recurrent layers, if the model has any, a row per sample.
    """

    def __init__(
        self, rows: int, columns: int, *, windows: Sequence[AttentionWindow | None] = (), replayed: bool = False
    ) -> None:
        """Prepare the cache.

        Args:
            windows: what each layer sees; None, or no entry: all tokens.
            replayed: steps are replayed, so their shapes stay the same for `GRAIN` columns.
        """
        super().__init__(layers=[])
        self._window_of = dict(enumerate(windows))
        self._windows = sorted({window for window in windows if window})
        self._slot_of, self._lengths = np.empty(0, np.int64), np.empty(0, np.int64)  # see `arrange`
        self._before = self.mask = torch.empty(0)  # tokens of each row's prompt, int64 [rows]; what the model is given
        self._grain = GRAIN if replayed else 1
        self._prompts, self._answers = cut(rows), cut(rows, columns)
        self._kinds: list[Layer] = []  # of each layer, without places and columns
        self._prompt_readers: list[tuple[Segment, Readers]] = []
        self._answer_readers: list[tuple[Segment, Readers]] = []
        self._targets: list[Target] = []
        self._aimed: dict[int, _Aimed] = {}  # of each segment of answers, at the last step
        self._length = 0  # of the longest answer before the next token
        self._columns = np.empty(0, np.int64)  # of each row's next token in its answer
        self.layer = 0  # the one whose keys are attended to
        # The keys and values that each layer's `update` gave out in this step, and those that attention has stored.
        self._served: dict[int, tuple[Tensor, Tensor]] = {}
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}

    def insert(self, prefilled: Sequence[KeysValues], lengths: Sequence[int], first_slot: int) -> None:
        """Copy the layers of prefilled prompts, padded on the right, to consecutive slots.

        Args:
            prefilled: of the layers with keys; recurrent models have none.
        """
        self._kinds = self._kinds or [
            Layer(_without_columns(layer.keys).transpose(2, 3), _without_columns(layer.values)) for layer in prefilled
        ]
        device = self._kinds[0].keys.device if self._kinds else "cpu"
        for segment in self._prompts:
            reaching = [index for index, length in enumerate(lengths) if length > segment.first]
            if not reaching:
                break
            places = segment.enter([first_slot + index for index in reaching], self._kinds)
            columns = slice(segment.first, min(segment.last, max(lengths)))
            width = columns.stop - columns.start
            segment.width = max(segment.width, width)
            read = torch.tensor(reaching, device=device)
            for own, layer in zip(segment.layers, prefilled, strict=True):
                own.keys[places, ..., :width] = layer.keys[read, :, columns].transpose(2, 3)
                own.values[places, :, :width] = layer.values[read, :, columns]

    def fork(self, prefilled: Sequence[RecurrentState], samples: Tensor) -> None:
        """Append rows with copies of the states of prefilled prompts.

        Args:
            samples: int64 [samples], the prompt of each.
        """
        forked = [state.select(samples, in_place=True) for state in prefilled]
        before = self.layers or [state.select(samples[:0], in_place=True) for state in prefilled]
        self.layers = [RecurrentState.join(both) for both in zip(before, forked, strict=True)]

    def read(self, slot: int, row: int, lengths: tuple[int, int]) -> Tensor | None:
        """Return a copy of the keys and values [layers, 2, heads, length, size] of a prompt and then one of its rows.

        Args:
            lengths: columns of the prompt and of the row.

        Returns:
            None if layers differ in their heads or sizes, or keep a state, of which only the last is known.
        """
        if self.layers:
            return None
        shapes = {tuple(keys.shape[1:3]) for keys, _ in self._kinds} | {values.shape[1::2] for _, values in self._kinds}
        if len(shapes) > 1:
            return None
        ((heads, size),) = shapes
        states = self._kinds[0].keys.new_empty(len(self._kinds), 2, heads, sum(lengths), size)
        parts = (self._prompts, slot, lengths[0], 0), (self._answers, row, lengths[1], lengths[0])
        for segments, owner, length, begin in parts:
            for segment in segments:
                if segment.first >= length:
                    break
                width = min(segment.last, length) - segment.first
                place = int(np.flatnonzero(segment.owners == owner)[0])
                columns = slice(begin + segment.first, begin + segment.first + width)
                for own, layer in zip(states, segment.layers, strict=True):
                    own[0, :, columns] = layer.keys[place, ..., :width].transpose(1, 2)
                    own[1, :, columns] = layer.values[place, :, :width]
        return states

    def arrange(self, slots: Numbers, lengths: Sequence[int], device: torch.device) -> None:
        """Assign rows to prompts.

        Args:
            slots: int64 [rows], the slot of each row's prompt.
            lengths: [slots in use], the length of each prompt.
        """
        self._slot_of, self._lengths = slots, np.array(lengths)
        self._before = torch.from_numpy(self._lengths[slots]).to(device)
        self.mask = torch.zeros(len(slots), 1, 1, 1, device=device)  # for the model: it hides nothing
        self._prompt_readers = []
        for segment in _in_use(self._prompts):
            readers = Readers.of(segment, slots, device)
            segment.see(self._lengths)  # not changed until the next time
            segment.show(None, None, readers.of_places(self._before, len(segment.owners)))
            self._prompt_readers.append((segment, readers))

    def aim(self, columns: Numbers) -> None:
        """Set which tensors the next forward reads and writes; `place` must follow.

        Args:
            columns: of each row's next token in its answer, int64 [rows].
        """
        device = self._before.device
        self._columns = columns
        readers_before = {id(segment): readers for segment, readers in self._answer_readers}
        targets_before = {id(target.segment): target for target in self._targets}
        self._length, self._answer_readers, self._targets = int(columns.max()), [], []
        for segment in self._answers:
            if segment.first > self._length:
                break
            segment.enter(np.flatnonzero(columns == segment.first), self._kinds)
            segment.see(columns + 1, self._grain)
            before, places = self._aimed.get(id(segment)), np.flatnonzero(columns[segment.owners] < segment.last)
            self._aimed[id(segment)] = now = _Aimed(segment.changes, len(columns), places)
            stays = before is not None and before[:2] == now[:2]
            readers = readers_before[id(segment)] if stays else Readers.of(segment, np.arange(len(columns)), device)
            self._answer_readers.append((segment, readers))
            if len(places):
                known = targets_before.get(id(segment))
                whole = readers.straight and len(places) == len(columns)
                if known is not None and before is not None and stays and np.array_equal(before.places, places):
                    rows, at = known.rows, known.places  # only the columns are others
                else:
                    rows = slice(None) if whole else torch.from_numpy(segment.owners[places]).to(device)
                    at = torch.from_numpy(places).to(device)
                self._targets.append(Target(segment, rows, at))
        for window in self._windows:
            self._aim_within(window, columns)

    def _aim_within(self, window: AttentionWindow, columns: Numbers) -> None:
        """Set what layers with a window see of prompts and answers. Samples of one prompt have equally long answers."""
        before = self._lengths[self._slot_of]
        begins = window.begin(before + columns) - before  # in the rows' answers; below 0 in columns of their prompts
        in_prompts = self._lengths.copy()
        in_prompts[self._slot_of] += begins
        if (in_prompts[self._slot_of] - before != begins).any():
            raise RuntimeError("samples of one prompt have answers of different lengths, so one window does not fit")
        for segment, _ in self._prompt_readers:
            segment.see_within(window, in_prompts, self._lengths, self._grain)
        for segment, _ in self._answer_readers:
            segment.see_within(window, begins, columns + 1, self._grain)

    def place(self, ages: Tensor) -> None:
        """Compute on the device where the next forward writes and what it hides, so that a graph has it in it.

        Args:
            ages: int64 [rows], the columns that `aim` knows.
        """
        for segment, readers in self._answer_readers:
            segment.show(None, None, readers.of_places(ages, len(segment.owners)) + 1)
        self._targets = [one._replace(columns=ages[one.rows] - one.segment.first) for one in self._targets]
        for window in self._windows:
            begins = window.begin(self._before + ages)
            for segment, readers in self._prompt_readers:
                own = [readers.of_places(each, len(segment.owners)) for each in (begins, self._before)]
                segment.show(window, *own)
            for segment, readers in self._answer_readers:
                own = [readers.of_places(each, len(segment.owners)) for each in (begins - self._before, ages + 1)]
                segment.show(window, *own)

    def footprint(self) -> Hashable:
        """Return addresses and shapes of a step's tensors: while they are equal, a CUDA graph is valid."""
        read: list[Hashable] = [_place(self._before)]
        for segment, readers in (*self._prompt_readers, *self._answer_readers):
            tensors = (readers.members, readers.rows, readers.at, *segment.layers[0])
            seen = [sight and (str(sight.columns), sight.hidden) for sight in segment.sights.values()]
            read.append((len(segment.owners), segment.width, readers.straight, *seen, *map(_place, tensors)))
        hidden = [_place(sight.bias) for one, _ in self._prompt_readers if (sight := one.sights[None])]
        written = [(id(one.segment), _place(one.rows), _place(one.places)) for one in self._targets]
        return (*read, *hidden, *written)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        token = _decoding.set(self)
        try:
            yield
        finally:
            _decoding.reset(token)
            self._served.clear()
            self._stored.clear()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        # Attention stores them, expanded if they are latent.
        self.layer, self._served[layer_idx] = layer_idx, (key_states, value_states)
        return key_states, value_states

    def enter(self, key: Tensor, value: Tensor, *, latent: bool) -> bool:
        """Attend with a token's keys and values [rows, heads, 1, size]; store them, unless an earlier layer has.

        Args:
            latent: they are expanded from those of the last `update`.

        Returns:
            False if they are not those of a layer.
        """
        found = [layer for layer, (served, _) in self._served.items() if served is key]
        if not found and not latent:
            return False
        self.layer = self.layer if latent else found[-1]
        if self.layer in self._stored:
            return any(value is known[self.layer][1] for known in (self._served, self._stored))
        self._stored[self.layer] = key, value
        self.write(key[:, :, 0], value[:, :, 0], self.layer)
        return True

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        """Store one token's keys and values [rows, heads, size] in a layer, for `attend`."""
        for segment, rows, places, columns in self._targets:
            own = segment.layers[layer]
            own.keys.movedim(3, 1)[places, columns] = key[rows]
            own.values[places, :, columns] = value[rows]
        self.layer = layer

    def attend(self, query: Tensor, change: ScoreChange | None = None) -> Tensor:
        """Attend to prompts and answers with the scaled queries [rows, heads, queries, size] of each key head.

        Returns:
            [rows, heads, queries, size].
        """
        parts = []
        for segment, readers in (*self._prompt_readers, *self._answer_readers):
            if (sight := segment.sights[self.window]) is not None:
                keys, values = (each[: len(segment.owners)] for each in segment.layers[self.layer])
                parts.append(AttentionPart(keys, values, sight, readers))
        return attend(query, parts, change)

    @property
    def window(self) -> AttentionWindow | None:
        """What the layer sees whose keys are attended to."""
        return self._window_of.get(self.layer)

    def count_places(self) -> Tensor:
        """Return where the rows' tokens are in their sequences, int64 [rows, 1]."""
        return torch.from_numpy(self._lengths[self._slot_of] + self._columns).to(self.mask.device)[:, None]

    def knows(self, mask: Tensor | None) -> bool:
        """Whether a mask hides no more than `mask`; `attend` would ignore it."""
        return mask is not None and (mask.data_ptr() == self.mask.data_ptr() or not mask.any())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def remove_rows(self, rows: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        for state in self.layers:
            state.move(sources, targets, len(rows))
        for segment in _in_use(self._answers):
            segment.leave(rows)
            segment.rename(sources, targets)

    def remove_slot(self, slot: int, last: int) -> None:
        """Remove a prompt without samples; move the slot `last` to its slot."""
        for segment in _in_use(self._prompts):
            segment.leave([slot])
            segment.rename([last], [slot])


def _place(tensor: Tensor | slice | None) -> Hashable:
    return (tensor.data_ptr(), tensor.shape) if isinstance(tensor, Tensor) else str(tensor)


def _in_use(segments: Sequence[Segment]) -> Iterator[Segment]:
    return takewhile(lambda segment: len(segment.owners) > 0, segments)


def _without_columns(tensor: Tensor) -> Tensor:
    return tensor.new_empty(0, tensor.shape[1], 0, tensor.shape[3])
