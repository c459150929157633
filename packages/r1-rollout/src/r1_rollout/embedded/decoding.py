"""Continuous batching in the embedded engine: prefill of prompts, decoding steps of rows, finished groups."""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import torch
from torch import Tensor
from transformers import DynamicCache

from r1_rollout.embedded.graphs import Graphs
from r1_rollout.embedded.kv import GroupCache
from r1_rollout.embedded.rows import DecodingStrategy, Rows, SamplingRequest
from r1_rollout.embedded.stack import Stack
from r1_rollout.errors import EngineMemoryError, NonFiniteLogits
from r1_rollout.types import Completion, PromptLike

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FinishedGroup: TypeAlias = tuple[Hashable, list[Completion]]  # the key of a request, and its completions
_PROMPTS = 16  # per forward; with _TOKENS it bounds the logits and activations
_SHORT = 64  # tokens: such prompts go together whatever their lengths
_TOKENS = 16384  # per forward, padding included, unless one prompt alone has more


def prefill_batches(lengths: Sequence[int]) -> list[list[int]]:
    """Return batches of indices in which no prompt is more than twice as long as another."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        batch = batches[-1] if batches else []
        longest = lengths[batch[0]] if batch else 0
        alike = longest <= max(2 * lengths[index], _SHORT)
        if batch and alike and len(batch) < _PROMPTS and (len(batch) + 1) * longest <= _TOKENS:
            batch.append(index)
        else:
            batches.append([index])
    return batches


def alike(inputs: Sequence[Mapping[str, Tensor]]) -> list[list[int]]:
    """Return the indices of inputs that can be concatenated: those of one name agree in all but their first axis."""
    parts: list[tuple[list[int], dict[str, tuple[int, ...]]]] = []
    for index, one in enumerate(inputs):
        shapes = {name: tuple(tensor.shape[1:]) for name, tensor in one.items()}
        for indices, kind in parts:
            if kind | shapes == shapes | kind:
                indices.append(index)
                kind.update(shapes)
                break
        else:
            parts.append(([index], shapes))
    return [indices for indices, _ in parts]


def prefill(
    model: "PreTrainedModel", prompts: Sequence[PromptLike], inputs: Sequence[Mapping[str, Tensor]], filler: int
) -> tuple[DynamicCache, Tensor]:
    """Run prompts, padded on the right, through the model.

    Args:
        inputs: further arguments of the forward for each prompt, see `alike`.
        filler: the token to pad with; not a placeholder of media, for those are counted.

    Returns:
        Keys and values of the padded prompts, and the logits [prompts, vocabulary] after each prompt.
    """
    device, lengths = model.device, [len(prompt.token_ids) for prompt in prompts]
    rotary = [rotary_axes(prompt.position_ids) for prompt in prompts]
    token_ids = torch.full((len(prompts), max(lengths)), filler)
    position_ids = torch.zeros(len(rotary[0]), len(prompts), max(lengths), dtype=torch.int64)
    for row, (prompt, positions) in enumerate(zip(prompts, rotary, strict=True)):
        token_ids[row, : lengths[row]] = torch.tensor(prompt.token_ids)
        position_ids[:, row, : lengths[row]] = positions
    media = {
        name: torch.cat([one[name] for one in inputs if name in one]).to(device) for name in sorted({*chain(*inputs)})
    }
    ends, cache = sorted({*lengths}), DynamicCache()
    logits = model(
        input_ids=token_ids.to(device),
        position_ids=without_lone_axis(position_ids).to(device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=torch.tensor(ends, device=device) - 1,
        **media,
    ).logits
    return cache, logits[range(len(prompts)), [*map(ends.index, lengths)]]


def rotary_axes(position_ids: Tensor) -> Tensor:
    """Drop M-RoPE's text axis, which only tells packed sequences apart: [axes, length] -> [1 or axes - 1, length]."""
    return position_ids[1:] if len(position_ids) > 1 else position_ids


def without_lone_axis(position_ids: Tensor) -> Tensor:
    """Drop a single axis: models without M-RoPE take [batch, length]."""
    return position_ids[0] if len(position_ids) == 1 else position_ids


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
    ) -> None:
        """Prepare the call.

        Args:
            longest: the largest limit of a request.
            stack: computes decoding steps, unless a hook is on a module that it skips.
        """
        self._model, self._strategy, self._version = model, strategy, version
        stack = None if stack is None or stack.is_watched() else stack
        self._stack = Graphs(stack) if stack is not None and graphs else stack
        self._filler, self.capacity, self.longest = filler, max_sequences, longest
        self._waiting: deque[SamplingRequest] = deque()
        self._entered: dict[Hashable, SamplingRequest] = {}  # those that are unfinished, by their keys
        self.axes = 0  # of the first request's positions; 0 before it
        self._slots: list[SamplingRequest] = []  # the request in each slot of the cache
        self._finished: list[FinishedGroup] = []
        self._running: tuple[Rows, GroupCache] | None = (
            Rows(max_sequences, max(longest, 1), model.device),
            GroupCache(max_sequences, longest, in_place=isinstance(self._stack, Graphs)),
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

    def step(self) -> list[FinishedGroup]:
        """Prefill the requests that there is room for, or decode a token of each row; return the finished groups.

        Raises EngineMemoryError and NonFiniteLogits, which close the call.
        """
        if self._running is None or not self.pending:
            return []
        rows, cache = self._running
        try:
            self._advance(rows, cache)
        except torch.OutOfMemoryError as error:
            running = len(rows)
            self.close()
            del rows, cache
            raise EngineMemoryError(
                f"out of memory with {running} samples running: lower max_sequences ({self.capacity} of them may "
                "run), the answers' length, or what else is on the GPU"
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

    def drain(self) -> None:
        """Begin no further request."""
        self._waiting.clear()

    def close(self) -> None:
        self._running = self._stack = None
        self._waiting.clear()
        self._finished.clear()

    @torch.inference_mode()
    def _advance(self, rows: Rows, cache: GroupCache) -> None:
        entering = bool(self._waiting) and self.capacity - len(rows) >= len(self._waiting[0].noise)
        first = len(rows) if entering else 0
        logits = self._admit(rows, cache) if entering else self._decode(rows, cache)
        tokens, logprobs = self._strategy.choose(logits, rows.keys[first:], rows.ages[first:])
        if not logprobs.isfinite().all():
            row = first + int(logprobs.isfinite().logical_not().nonzero()[0])
            raise NonFiniteLogits(
                f"prompt {rows.owners[row][0].prompt.id}, answer token {int(rows.ages[row])}: the model's logits are "
                f"not finite at weight version {self._version}; the weights or the prompt's inputs hold NaN or inf"
            )
        rows.extend(first, tokens, logprobs)
        if self._retire(rows, cache) or entering:
            self._arrange(rows, cache)

    def _admit(self, rows: Rows, cache: GroupCache) -> Tensor:
        entering, room = [], self.capacity - len(rows)
        while self._waiting and len(self._waiting[0].noise) <= room:
            request = self._waiting.popleft()
            self._entered[request.key] = request  # unfinished while it is computed too, for a call that ends meanwhile
            entering.append(request)
            room -= len(request.noise)
        logits = []
        for batch in prefill_batches([len(request.prompt.token_ids) for request in entering]):
            together = [entering[position] for position in batch]
            inputs = [dict(request.prompt.model_inputs) for request in together]
            for part in alike(inputs):
                requests = [together[place] for place in part]
                prompts = [request.prompt for request in requests]
                prefilled, behind = prefill(self._model, prompts, [inputs[place] for place in part], self._filler)
                cache.insert(prefilled, [len(prompt.token_ids) for prompt in prompts], len(self._slots))
                counts = torch.tensor([len(request.noise) for request in requests], device=behind.device)
                logits.append(behind.repeat_interleave(counts, dim=0))
                for request in requests:
                    position = int(rotary_axes(request.prompt.position_ids).max()) + 1
                    rows.add(request, position, slot=len(self._slots))
                    self._slots.append(request)
        return torch.cat(logits)

    def _decode(self, rows: Rows, cache: GroupCache) -> Tensor:
        axes = len(rotary_axes(rows.owners[0][0].prompt.position_ids))
        before = rows.ages - 1  # tokens in the cache
        cache.aim(before)
        position_ids = without_lone_axis((rows.positions + before)[None, :, None].expand(axes, -1, -1))
        if (stack := self._stack) is not None:
            return stack.step(rows.last, position_ids, cache)
        with cache.decoding():
            logits: Tensor = self._model(
                input_ids=rows.last[:, None],
                position_ids=position_ids,
                attention_mask=cache.mask,
                past_key_values=cache,
                use_cache=True,
            ).logits
        return logits[:, -1]

    def _retire(self, rows: Rows, cache: GroupCache) -> bool:
        stopped = self._strategy.stopped(rows)
        finished = (stopped | (rows.ages >= rows.limits)).nonzero()[:, 0].tolist()
        for row in finished:
            request, sample = rows.owners[row]
            tokens, logprobs = rows.decoded(row)
            reason: Literal["stop", "length"] = "stop" if stopped[row] else "length"
            request.completions[sample] = Completion(tokens.numpy(), logprobs.numpy(), reason, self._version)
        self._remove_rows(finished, rows, cache)
        for request in [one for one in self._entered.values() if len(one.completions) == len(one.noise)]:
            del self._entered[request.key]
            self._finished.append((request.key, [request.completions[sample] for sample in range(len(request.noise))]))
            self._vacate(self._slots.index(request), rows, cache)
        return bool(finished)

    def _remove_rows(self, leaving: list[int], rows: Rows, cache: GroupCache) -> None:
        sources, targets = rows.remove(leaving)
        if leaving:
            cache.remove_rows(leaving, sources, targets)

    def _vacate(self, slot: int, rows: Rows, cache: GroupCache) -> None:
        last = len(self._slots) - 1
        cache.remove_slot(slot, last)
        if slot != last:
            rows.slots[rows.slots == last] = slot
        self._slots[slot] = self._slots[last]
        del self._slots[last]

    def _arrange(self, rows: Rows, cache: GroupCache) -> None:
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
        self._finished: deque[FinishedGroup] = deque()
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
