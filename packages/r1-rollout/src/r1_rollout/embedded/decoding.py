"""Continuous batching in the embedded engine: prefill of prompts, decoding steps of rows, finished groups."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch
from torch import Tensor

from r1_rollout.embedded.forward import Forward
from r1_rollout.embedded.graphs import Graphs
from r1_rollout.embedded.kv import GroupCache
from r1_rollout.embedded.prefill import (
    PrefillPart,
    alike,
    distinct_parts,
    prefill,
    prefill_batches,
    rotary_axes,
    without_lone_axis,
)
from r1_rollout.embedded.prefix_cache import Prefix, PrefixCache
from r1_rollout.embedded.rows import DecodingRows, DecodingStrategy, SamplingRequest
from r1_rollout.embedded.stack import Stack
from r1_rollout.embedded.states import count_states
from r1_rollout.embedded.windows import layer_windows
from r1_rollout.errors import EngineMemoryError, NonFiniteLogits
from r1_rollout.routing import Routing
from r1_rollout.session import Finished, SampleKey, SteppedSession
from r1_rollout.tokens import setting
from r1_rollout.types import Completion, PromptLike, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel


OVER = -1  # in place of the number of a sample that has ended and whose row is still there
# Where steps are graphs of so many rows, fewer ended ones are removed later: a share of them while requests wait for
# room, and when none does a larger share or a few.
LINGERING, LAST_LINGERING, FEW = 0.25, 0.5, 8


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
        self._stack = Graphs(stack) if stack is not None and graphs else stack
        self._states, self._forward = count_states(model), Forward(model)
        self._filler, self.capacity, self.longest = filler, max_sequences, longest
        self._waiting: deque[SamplingRequest] = deque()
        self._entered: dict[Hashable, SamplingRequest] = {}  # those that are unfinished, by their keys
        self.axes = 0  # of the first request's positions; 0 before it
        self._slots: list[SamplingRequest] = []  # the request in each slot of the cache
        self._over: list[SamplingRequest] = []  # complete requests whose rows are still there
        self._finished: list[Finished] = []
        self._prefixes, self._routing = prefixes, routing
        self.prefilled = 0  # tokens of prompts that were computed
        self._running: tuple[DecodingRows, GroupCache] | None = (
            DecodingRows(max_sequences, max(longest, 1), model.device),
            GroupCache(max_sequences, longest, windows=layer_windows(model), in_place=isinstance(self._stack, Graphs)),
        )

    @property
    def closed(self) -> bool:
        return self._running is None

    @property
    def pending(self) -> bool:
        """Whether a request is unfinished."""
        return self._running is not None and bool(self._waiting or self._entered)

    def submit(self, request: SamplingRequest) -> None:
        self.axes = self.axes or len(request.prompt.position_ids)
        self._waiting.append(request)

    def step(self) -> list[Finished]:
        """Prefill the requests that there is room for, or decode a token of each row; return what has finished.

        Raises EngineMemoryError and NonFiniteLogits, which close the call.
        """
        if self._running is None or not self.pending:
            return []
        rows, cache = self._running
        try:
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
        request = self._entered.pop(key, None)
        if request is None or self._running is None:
            return
        rows, cache = self._running
        self._remove_rows([row for row, (owner, _) in enumerate(rows.owners) if owner is request], rows, cache)
        self._vacate(self._slots.index(request), rows, cache)
        self._arrange(rows, cache)

    def decoded(self, key: Hashable) -> list[int]:
        """Return the tokens so far of an unfinished request's first sample; [] before its prompt is computed."""
        if self._running is None:
            return []
        rows, _ = self._running
        found = (row for row, (request, sample) in enumerate(rows.owners) if request.key == key and sample == 0)
        return [token for row in found for token in rows.tail(row, int(rows.counts[row]))]

    def drain(self) -> None:
        """Begin no further request."""
        self._waiting.clear()

    def close(self) -> None:
        self._running = self._stack = self._prefixes = None
        self._waiting.clear()
        self._finished.clear()

    @torch.inference_mode()
    def _advance(self, rows: DecodingRows, cache: GroupCache) -> None:
        entering = bool(self._waiting) and self.capacity - len(rows) >= len(self._waiting[0].noise)
        first = len(rows) if entering else 0
        logits = self._admit(rows, cache) if entering else self._decode(rows, cache)
        tokens, logprobs = self._strategy.choose(logits, rows.keys[first:], rows.ages[first:])
        rows.extend(first, tokens, logprobs)
        if self._retire(self._find_stopped(rows, logprobs), rows, cache) or entering:
            self._arrange(rows, cache)

    def _find_stopped(self, rows: DecodingRows, logprobs: Tensor) -> set[int]:
        """Return the rows that their last token has ended: a step's one wait for the device.

        Args:
            logprobs: of the last tokens, of the last rows.

        Raises NonFiniteLogits if one is not finite.
        """
        first = len(rows) - len(logprobs)
        broken = torch.zeros(len(rows), dtype=torch.bool, device=logprobs.device)
        broken[first:] = logprobs.isfinite().logical_not_()
        found = torch.stack([broken, self._strategy.stopped(rows)]).nonzero().tolist()
        if found and not found[0][0]:
            row = found[0][1]
            raise NonFiniteLogits(
                f"prompt {rows.owners[row][0].prompt.id}, answer token {rows.counts[row] - 1}: the model's logits are "
                f"not finite at weight version {self._version}; the weights or the prompt's inputs hold NaN or inf"
            )
        return {row for _, row in found}

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

    def _decode(self, rows: DecodingRows, cache: GroupCache) -> Tensor:
        axes = len(rotary_axes(rows.owners[0][0].prompt.position_ids))
        before = rows.ages - 1  # tokens in the cache
        cache.aim(before, rows.counts - 1)
        position_ids = without_lone_axis((rows.positions + before)[None, :, None].expand(axes, -1, -1))
        if self._routing is None:
            return self._decode_tokens(rows.last, position_ids, cache)
        with self._routing.recording() as record:
            logits = self._decode_tokens(rows.last, position_ids, cache)
            rows.route(record())
        return logits

    def _decode_tokens(self, tokens: Tensor, position_ids: Tensor, cache: GroupCache) -> Tensor:
        if (stack := self._stack) is not None:
            return stack.step(tokens, position_ids, cache)
        with cache.decoding():
            return self._forward(tokens[:, None], position_ids, cache, mask=cache.mask)[:, -1]

    def _retire(self, stopped: set[int], rows: DecodingRows, cache: GroupCache) -> bool:
        """Complete the samples that have ended; return whether rows were removed."""
        full = {*np.flatnonzero(rows.counts >= rows.limits).tolist()}
        for row in sorted(stopped | full):
            if rows.owners[row][1] != OVER:
                self._complete(row, "stop" if row in stopped else "length", rows, cache)
        for request in [one for one in self._entered.values() if len(one.completions) == len(one.noise)]:
            del self._entered[request.key]
            self._over.append(request)
            if not request.split:
                completions = [request.completions[sample] for sample in range(len(request.noise))]
                self._finished.append((request.key, completions))
        over = [row for row, (_, sample) in enumerate(rows.owners) if sample == OVER]
        if not over or self._linger(over, len(rows), full):
            return False
        self._remove_rows(over, rows, cache)
        for request in self._over:
            self._vacate(self._slots.index(request), rows, cache)
        self._over.clear()
        return True

    def _complete(self, row: int, reason: Literal["stop", "length"], rows: DecodingRows, cache: GroupCache) -> None:
        request, sample = rows.owners[row]
        tokens, logprobs = rows.decoded(row)
        routed = None if (experts := rows.routed(row)) is None else experts.numpy()
        request.completions[sample] = Completion(tokens.numpy(), logprobs.numpy(), reason, self._version, routed)
        if request.split:
            self._finished.append((SampleKey(request.key, sample), [request.completions[sample]]))
        if self._prefixes is not None:
            self._keep(self._prefixes, rows, row, tokens.tolist(), cache)
        rows.owners[row] = (request, OVER)

    def _linger(self, over: Sequence[int], count: int, full: set[int]) -> bool:
        """Whether rows of ended samples stay: a graph is of one number of rows, and idle rows cost a GPU nothing.

        They decode on, as long as their samples may have more tokens.
        """
        most = count * LINGERING if self._waiting else max(count * LAST_LINGERING, FEW)
        return isinstance(self._stack, Graphs) and len(over) < min(most, count) and not full.intersection(over)

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
            cache.arrange(rows.slots, [len(request.prompt.token_ids) for request in self._slots])


class GenerateCall:
    """A `generate` call: an iterator of (index of the prompt, its completions).

    Prompts may be appended while some are unfinished.
    """

    def __init__(
        self,
        decoding: Decoding,
        prompts: Sequence[PromptLike],
        request_of: Callable[[int, PromptLike], SamplingRequest],
    ) -> None:
        """`request_of` returns the request for a prompt of this index; it raises if the prompt cannot be decoded."""
        self._decoding, self._prompts, self._request_of = decoding, prompts, request_of
        self._known = 0  # prompts
        self._drained = False
        self._finished: deque[Finished] = deque()
        self._over = ""  # why there are no more groups, if somebody else decided so
        self._take_up()

    def __iter__(self) -> "GenerateCall":
        return self

    def __next__(self) -> tuple[int, list[Completion]]:
        while self._decoding.closed or not self._finished:
            self._take_up()
            if not self._decoding.pending:
                self.close()
                if self._over:
                    raise RuntimeError(self._over)
                raise StopIteration
            self._finished.extend(self._decoding.step())
        index, completions = self._finished.popleft()
        return cast(int, index), completions

    def _take_up(self) -> None:
        while not self._decoding.closed and not self._drained and self._known < len(self._prompts):
            try:
                self._decoding.submit(self._request_of(self._known, self._prompts[self._known]))
            except BaseException:
                self.close()
                raise
            self._known += 1

    def drain(self) -> None:
        self._drained = True
        self._decoding.drain()

    def close(self) -> None:
        self._decoding.close()
        self._finished.clear()

    def end(self, reason: str) -> None:
        """End the call; if it was incomplete, its iterator raises the reason."""
        if self._finished or self._decoding.pending:
            self._over = f"this generate() call is over: {reason}"
        self.close()


class StreamingSession(SteppedSession):
    """A session whose unfinished answers can be read while they grow."""

    def __init__(
        self,
        decoding: Decoding,
        params: SamplingParams,
        submit: Callable[[str, PromptLike, SamplingParams, bool], None],
    ) -> None:
        super().__init__(decoding, params, submit)
        self._decoding = decoding

    def decoded(self, key: str) -> list[int]:
        """Return the tokens so far of an unfinished request's first sample; [] before its prompt is computed."""
        return self._decoding.decoded(key)
