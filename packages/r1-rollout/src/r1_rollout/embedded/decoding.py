"""Continuous batching in the embedded engine: prefill of prompts, decoding steps of rows, finished groups."""

from collections import deque
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from r1_rollout.embedded.graphs import Graphs
from r1_rollout.embedded.kv import GroupCache
from r1_rollout.embedded.prefill import (
    PrefillPart,
    alike,
    distinct_parts,
    prefill,
    prefill_batches,
    rotary_axes,
)
from r1_rollout.embedded.prefix_cache import Prefix, PrefixCache
from r1_rollout.embedded.rows import BROKEN, STOPPED, DecodingRows, DecodingStrategy, SamplingRequest
from r1_rollout.embedded.stack import Stack
from r1_rollout.embedded.states import count_states
from r1_rollout.embedded.step import DecodingStep, HostCopies, Read
from r1_rollout.embedded.windows import layer_windows
from r1_rollout.errors import EngineMemoryError, NonFiniteLogits
from r1_rollout.routing import Routing
from r1_rollout.session import Finished, SampleKey
from r1_rollout.tokens import setting
from r1_rollout.types import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedModel


OVER = -1  # in place of the number of a sample that has ended and whose row is still there
# Where steps are graphs of so many rows, fewer ended ones are removed later: a share of them while requests wait for
# room, and when none does a larger share or a few.
LINGERING, LAST_LINGERING, FEW = 0.25, 0.5, 8
# Steps between two admissions where steps are graphs: each ends a graph, so requests enter together.
ADMISSION = 16


class Decoding:
    """Continuous batching: requests enter whole, in their order, when finished rows have made room."""

    def __init__(
        self,
        model: "PreTrainedModel",
        strategy: DecodingStrategy,
        *,
        filler: int,
        max_sequences: int,
        longest: int,
        version: int,
        stack: Stack | None = None,
        graphs: bool = False,
        prefixes: PrefixCache | None = None,
        routing: Routing | None = None,
    ) -> None:
        """Prepare the call.

        Args:
            longest: the largest limit of a request.
            stack: computes decoding steps, unless a hook is on a module that it skips.
            prefixes: gets finished samples, from which later requests go on.
            routing: records the experts of all tokens.
        """
        self._model, self._strategy, self._version = model, strategy, version
        stack = None if stack is None or stack.is_watched() else stack
        self._graphs = Graphs() if stack is not None and graphs else None
        self._step = DecodingStep(model, strategy, stack, self._graphs, routing)
        self._states = count_states(model)
        self._filler, self.capacity, self.longest = filler, max_sequences, longest
        self._waiting: deque[SamplingRequest] = deque()
        self._entered: dict[Hashable, SamplingRequest] = {}  # those that are unfinished, by their keys
        self.axes = 0  # of the first request's positions; 0 before it
        self._slots: list[SamplingRequest] = []  # the request in each slot of the cache
        self._over: list[SamplingRequest] = []  # complete requests whose rows are still there
        self._finished: list[Finished] = []
        self._prefixes, self._routing = prefixes, routing
        self.prefilled = 0  # tokens of prompts that were computed
        self._copies = None if self._graphs is None else HostCopies(3 * max_sequences)
        self._unread: Read | None = None  # the report of the last step, which all rows have decoded
        self._since = 0  # steps since the last admission
        self._running: tuple[DecodingRows, GroupCache] | None = (
            DecodingRows(max_sequences, max(longest, 1), model.device),
            GroupCache(max_sequences, longest, windows=layer_windows(model), replayed=self._graphs is not None),
        )

    @property
    def closed(self) -> bool:
        return self._running is None

    @property
    def pending(self) -> bool:
        """Whether a request is unfinished, or `step` has not returned it yet."""
        return self._running is not None and bool(self._waiting or self._entered or self._finished)

    def submit(self, request: SamplingRequest) -> None:
        self.axes = self.axes or len(request.prompt.position_ids)
        self._waiting.append(request)

    def step(self) -> list[Finished]:
        """Prefill the requests that there is room for, or decode a token of each row; return what has finished.

        Raises EngineMemoryError and NonFiniteLogits, which close the call.
        """
        if self._running is None:
            return []
        rows, cache = self._running
        try:
            if self._waiting or self._entered:
                self._advance(rows, cache)
        except torch.OutOfMemoryError as error:
            running, kept = len(rows), "" if self._prefixes is None else "prefix_cache_gb, "
            self.close()
            del rows, cache
            raise EngineMemoryError(
                f"out of memory with {running} samples running: lower max_sequences ({self.capacity} of them may "
                f"run), {kept}the answers' length, or what else is on the GPU"
            ) from error
        except BaseException:
            self.close()
            raise
        finished, self._finished = self._finished, []
        return finished

    @torch.inference_mode()
    def cancel(self, key: Hashable) -> None:
        """Remove a request and free its rows; does nothing if there is none of this key."""
        self._waiting = deque(request for request in self._waiting if request.key != key)
        if key not in self._entered or self._running is None:
            return
        rows, cache = self._running
        self._read_last(rows, cache)  # before rows move
        self._finished = [one for one in self._finished if _request(one[0]) != key]
        if (request := self._entered.pop(key, None)) is None:  # its last token has ended it
            return
        self._remove_rows([row for row, (owner, _) in enumerate(rows.owners) if owner is request], rows, cache)
        self._vacate(self._slots.index(request), rows, cache)
        self._arrange(rows, cache)

    def decoded(self, key: Hashable) -> list[int]:
        """Return the tokens so far of an unfinished request's first sample; [] before its prompt is computed."""
        if self._running is None:
            return []
        rows, _ = self._running
        found = (row for row, (request, sample) in enumerate(rows.owners) if request.key == key and sample == 0)
        return [token for row in found for token in rows.tail(row, int(rows.known[row]))]

    def drain(self) -> None:
        """Begin no further request."""
        self._waiting.clear()

    def close(self) -> None:
        self._running = self._prefixes = self._unread = None
        self._waiting.clear()
        self._finished.clear()

    @torch.inference_mode()
    def _advance(self, rows: DecodingRows, cache: GroupCache) -> None:
        if self._enters(rows) or (rows.counts >= rows.limits).any():
            self._read_last(rows, cache)
            self._retire(rows, cache)
        if self._enters(rows):
            first, self._since = len(rows), 0
            self._step.choose(self._admit(rows, cache), rows, first)
            rows.counts[first:] += 1
            self._read(rows, cache, rows.report(first).cpu().numpy, first)
            if not self._retire(rows, cache):
                self._arrange(rows, cache)
        elif rows:
            self._step.run(rows, cache)
            self._since += 1
            before, report = self._unread, rows.report(0)
            self._unread = report.cpu().numpy if self._copies is None else self._copies.start(report)
            if before is not None:
                self._read(rows, cache, before)
            if self._copies is None:
                self._read_last(rows, cache)
            self._retire(rows, cache)

    def _enters(self, rows: DecodingRows) -> bool:
        """Whether requests enter in this step: once there is room, and where steps are graphs, some steps later."""
        room = self.capacity - len(rows)
        at_once = self._graphs is None or not rows or self._since >= ADMISSION
        return bool(self._waiting) and room >= len(self._waiting[0].noise) and at_once

    def _read_last(self, rows: DecodingRows, cache: GroupCache) -> None:
        """Wait for the step that is under way, if one is, and read its report."""
        if self._unread is not None:
            report, self._unread = self._unread, None
            self._read(rows, cache, report)

    def _read(self, rows: DecodingRows, cache: GroupCache, read: Read, first: int = 0) -> None:
        """Wait for the report of the rows from `first` on, and complete the samples that it ends.

        Where the next step is under way already, they have decoded a token more, which nobody reads.
        """
        report = read()
        rows.read(first, report)
        status = report[2]
        if len(broken := np.flatnonzero(status == BROKEN)):
            row = first + int(broken[0])
            raise NonFiniteLogits(
                f"prompt {rows.owners[row][0].prompt.id}, answer token {rows.known[row] - 1}: the model's logits are "
                f"not finite at weight version {self._version}; the weights or the prompt's inputs hold NaN or inf"
            )
        stopped = {*(first + np.flatnonzero(status == STOPPED)).tolist(), *self._strategy.completed(rows, first)}
        full = np.flatnonzero(rows.known >= rows.limits).tolist()
        for row in sorted(stopped.union(full)):
            if rows.owners[row][1] != OVER:
                self._complete(row, "stop" if row in stopped else "length", rows, cache)
        self._collect()

    def _admit(self, rows: DecodingRows, cache: GroupCache) -> Tensor:
        entering, room = [], self.capacity - len(rows)
        while self._waiting and len(self._waiting[0].noise) <= room:
            request = self._waiting.popleft()
            self._entered[request.key] = request  # unfinished while it is computed too, for a call that ends meanwhile
            entering.append(request)
            room -= len(request.noise)
        parts = [self._part(request) for request in entering]
        logits = []
        for continued in (False, True):
            group = [place for place, part in enumerate(parts) if (part.prefix is not None) == continued]
            of_group = [parts[place] for place in group]
            lengths, known = [part.length for part in of_group], [part.known for part in of_group]
            for batch in prefill_batches(lengths, known, equal=bool(self._states)):
                for together in alike([of_group[position].inputs for position in batch]):
                    places = [group[batch[position]] for position in together]
                    logits.append(self._prefill([entering[i] for i in places], [parts[i] for i in places], rows, cache))
        return torch.cat(logits)

    def _part(self, request: SamplingRequest) -> PrefillPart:
        inputs = dict(request.prompt.model_inputs)
        if self._prefixes is None:
            return PrefillPart(request.prompt, inputs)
        request.inputs = inputs
        positions = rotary_axes(request.prompt.position_ids)
        if (prefix := self._prefixes.take(request.prompt, positions, inputs)) is None:
            return PrefillPart(request.prompt, inputs)
        rest = prefix.remaining(inputs)
        if rest and setting(self._model, "hands_on_kinds"):  # the mask behind a prefix knows no pictures
            return PrefillPart(request.prompt, inputs)
        return PrefillPart(request.prompt, rest, prefix)

    def _prefill(
        self, requests: Sequence[SamplingRequest], parts: Sequence[PrefillPart], rows: DecodingRows, cache: GroupCache
    ) -> Tensor:
        """Compute prompts for their slots and rows, equal ones once; return the rows' logits."""
        distinct, places = distinct_parts(parts)
        prefilled = prefill(self._model, distinct, self._filler, self._states, self._routing)
        self.prefilled += sum(part.length for part in distinct)
        if len(distinct) < len(parts):
            prefilled = prefilled.select(places)
        cache.insert(prefilled.layers, [len(request.prompt.token_ids) for request in requests], len(self._slots))
        for request in requests:
            position = int(rotary_axes(request.prompt.position_ids).max()) + 1
            rows.add(request, position, slot=len(self._slots))
            self._slots.append(request)
        for request, routed in zip(requests, prefilled.routed, strict=bool(prefilled.routed)):
            request.routed = routed
        counts = torch.tensor([len(request.noise) for request in requests])
        samples = torch.arange(len(requests)).repeat_interleave(counts).to(prefilled.logits.device)
        if prefilled.states:
            cache.fork(prefilled.states, samples)
        return prefilled.logits.index_select(0, samples)

    def _collect(self) -> None:
        """Return the requests whose samples have all ended."""
        for request in [one for one in self._entered.values() if len(one.completions) == len(one.noise)]:
            del self._entered[request.key]
            self._over.append(request)
            if not request.split:
                completions = [request.completions[sample] for sample in range(len(request.noise))]
                self._finished.append((request.key, completions))

    def _retire(self, rows: DecodingRows, cache: GroupCache) -> bool:
        """Remove the rows of samples that have ended, unless they linger; return whether rows were removed."""
        if self._lingers(rows):
            return False
        self._read_last(rows, cache)  # before rows move
        self._remove_rows([row for row, (_, sample) in enumerate(rows.owners) if sample == OVER], rows, cache)
        for request in self._over:
            self._vacate(self._slots.index(request), rows, cache)
        self._over.clear()
        self._arrange(rows, cache)
        return True

    def _complete(self, row: int, reason: Literal["stop", "length"], rows: DecodingRows, cache: GroupCache) -> None:
        request, sample = rows.owners[row]
        tokens, logprobs = rows.decoded(row)
        routed = None if (experts := rows.routed(row)) is None else experts.numpy()
        request.completions[sample] = Completion(tokens, logprobs, reason, self._version, routed)
        if request.split:
            self._finished.append((SampleKey(request.key, sample), [request.completions[sample]]))
        if self._prefixes is not None:
            self._keep(self._prefixes, rows, row, tokens.tolist(), cache)
        rows.owners[row] = (request, OVER)

    def _lingers(self, rows: DecodingRows) -> bool:
        """Whether rows of ended samples stay: a graph is of one number of rows, and idle rows cost a GPU nothing.

        They decode on, as long as their samples may have more tokens.
        """
        over, count = [row for row, (_, sample) in enumerate(rows.owners) if sample == OVER], len(rows)
        most = count * LINGERING if self._waiting else max(count * LAST_LINGERING, FEW)
        lingers = self._graphs is not None and len(over) < min(most, count)
        return not over or (lingers and not (rows.counts[over] >= rows.limits[over]).any())

    def _keep(self, prefixes: PrefixCache, rows: DecodingRows, row: int, tokens: list[int], cache: GroupCache) -> None:
        """Keep a finished row's keys and values for a prompt that goes on from it."""
        request, _ = rows.owners[row]
        prompt, decoded = request.prompt, len(tokens) - 1  # the last token's are not computed
        states = cache.read(self._slots.index(request), row, (len(prompt.token_ids), decoded))
        if states is not None:
            positions = rotary_axes(prompt.position_ids)
            behind = (positions.max() + 1 + torch.arange(decoded)).expand(len(positions), -1)
            position_ids = torch.cat([positions, behind], dim=1)
            routed = None if (experts := rows.routed(row)) is None else experts[:-1].to(self._model.device)
            prefixes.add(Prefix((*prompt.token_ids, *tokens), position_ids, request.inputs, states, routed))

    def _remove_rows(self, leaving: list[int], rows: DecodingRows, cache: GroupCache) -> None:
        sources, targets = rows.remove(leaving)
        if leaving:
            cache.remove_rows(leaving, sources, targets)

    def _vacate(self, slot: int, rows: DecodingRows, cache: GroupCache) -> None:
        last = len(self._slots) - 1
        cache.remove_slot(slot, last)
        if slot != last:
            rows.slots[rows.slots == last] = slot
        self._slots[slot] = self._slots[last]
        del self._slots[last]

    def _arrange(self, rows: DecodingRows, cache: GroupCache) -> None:
        if rows:
            lengths = [len(request.prompt.token_ids) for request in self._slots]
            cache.arrange(rows.slots, lengths, self._model.device)


def _request(key: Hashable) -> Hashable:
    return key.request if isinstance(key, SampleKey) else key
