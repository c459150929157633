"""Continuous batching in the embedded engine: prefill of prompts, decoding steps of rows, finished groups."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from r1_rollout.embedded.graphs import Graphs
from r1_rollout.embedded.kv import GroupCache
from r1_rollout.embedded.rows import DecodingStrategy, Rows
from r1_rollout.embedded.stack import Stack
from r1_rollout.errors import EngineMemoryError, NonFiniteLogits
from r1_rollout.types import Completion, PromptLike

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    """Continuous batching: whole groups enter when finished rows have made room.

    An iterator of (index of the prompt, its completions). Prompts may be appended while some are unfinished.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        prompts: Sequence[PromptLike],
        strategy: DecodingStrategy,
        *,
        filler: int,
        max_sequences: int,
        version: int,
        require: Callable[[PromptLike, int], None] = lambda prompt, limit: None,
        stack: Stack | None = None,
        graphs: bool = False,
    ) -> None:
        """Prepare the call.

        Args:
            require: raises on an appended prompt, with its answers' limit, that cannot be decoded.
            stack: computes decoding steps, unless a hook is on a module that it skips.
        """
        self._model, self._prompts, self._strategy, self._version = model, prompts, strategy, version
        stack = None if stack is None or stack.is_watched() else stack
        self._stack = Graphs(stack) if stack is not None and graphs else stack
        self._filler, self._capacity, self._require = filler, max_sequences, require
        self._known, self._drained = len(prompts), False
        self._waiting = deque(range(len(prompts)))
        self._slots: list[int] = []  # the prompt in each slot of the cache
        self._groups: dict[int, dict[int, Completion]] = {}  # prompts that have entered and are unfinished
        self._finished: deque[tuple[int, list[Completion]]] = deque()
        self._over = ""  # why there are no more groups, if somebody else decided so
        self._running: tuple[Rows, GroupCache] | None = (
            Rows(self._capacity, max(strategy.longest, 1), model.device),
            GroupCache(self._capacity, strategy.longest, in_place=isinstance(self._stack, Graphs)),
        )

    def __iter__(self) -> Iterator[tuple[int, list[Completion]]]:
        return self

    def __next__(self) -> tuple[int, list[Completion]]:
        while self._running is None or not self._finished:
            self._take_up()
            if self._running is None or not (self._waiting or self._groups):
                self.close()
                if self._over:
                    raise RuntimeError(self._over)
                raise StopIteration
            try:
                self._advance(*self._running)
            except torch.OutOfMemoryError as error:
                running = len(self._running[0])
                self.close()
                raise EngineMemoryError(
                    f"out of memory with {running} samples running: lower max_sequences ({self._capacity} of them may "
                    "run), the answers' length, or what else is on the GPU"
                ) from error
            except BaseException:
                self.close()
                raise
        return self._finished.popleft()

    def _take_up(self) -> None:
        while self._running is not None and not self._drained and self._known < len(self._prompts):
            try:
                self._require(self._prompts[self._known], self._strategy.limit(self._known))
            except BaseException:
                self.close()
                raise
            self._waiting.append(self._known)
            self._known += 1

    def drain(self) -> None:
        self._drained = True
        self._waiting.clear()

    def close(self) -> None:
        self._running = self._stack = None
        self._waiting.clear()
        self._finished.clear()

    def end(self, reason: str) -> None:
        """End the call; if it was incomplete, its iterator raises the reason."""
        if self._finished or (self._running is not None and (self._waiting or self._groups)):
            self._over = reason
        self.close()

    @torch.inference_mode()
    def _advance(self, rows: Rows, cache: GroupCache) -> None:
        entering = bool(self._waiting) and self._capacity - len(rows) >= self._strategy.samples
        first = len(rows) if entering else 0
        logits = self._admit(rows, cache) if entering else self._decode(rows, cache)
        tokens, logprobs = self._strategy.choose(logits, rows.keys[first:], rows.ages[first:])
        if not logprobs.isfinite().all():
            row = first + int(logprobs.isfinite().logical_not().nonzero()[0])
            raise NonFiniteLogits(
                f"prompt {self._prompts[rows.owners[row][0]].id}, answer token {int(rows.ages[row])}: the model's "
                f"logits are not finite at weight version {self._version}; the weights or the prompt's inputs hold NaN "
                "or inf"
            )
        rows.extend(first, tokens, logprobs)
        if (self._retire(rows, cache) or entering) and rows:
            cache.arrange(rows.slots, [len(self._prompts[prompt].token_ids) for prompt in self._slots])

    def _admit(self, rows: Rows, cache: GroupCache) -> Tensor:
        strategy, entering = self._strategy, []
        for _ in range(min((self._capacity - len(rows)) // strategy.samples, len(self._waiting))):
            index = self._waiting.popleft()
            self._groups[index] = {}  # unfinished while it is computed too, for a call that is ended meanwhile
            entering.append(index)
        logits = []
        for batch in prefill_batches([len(self._prompts[index].token_ids) for index in entering]):
            together = [entering[position] for position in batch]
            inputs = [dict(self._prompts[index].model_inputs) for index in together]
            for part in alike(inputs):
                indices = [together[place] for place in part]
                prompts = [self._prompts[index] for index in indices]
                prefilled, behind = prefill(self._model, prompts, [inputs[place] for place in part], self._filler)
                cache.insert(prefilled, [len(prompt.token_ids) for prompt in prompts], len(self._slots))
                logits.append(behind.repeat_interleave(strategy.samples, dim=0))
                for index in indices:
                    position = int(rotary_axes(self._prompts[index].position_ids).max()) + 1
                    rows.add(index, strategy.keys(index), strategy.limit(index), position, slot=len(self._slots))
                    self._slots.append(index)
        return torch.cat(logits)

    def _decode(self, rows: Rows, cache: GroupCache) -> Tensor:
        axes = len(rotary_axes(self._prompts[rows.owners[0][0]].position_ids))
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
            prompt, sample = rows.owners[row]
            tokens, logprobs = rows.decoded(row)
            reason: Literal["stop", "length"] = "stop" if stopped[row] else "length"
            self._groups[prompt][sample] = Completion(tokens.numpy(), logprobs.numpy(), reason, self._version)
        sources, targets = rows.remove(finished)
        if finished:
            cache.remove_rows(finished, sources, targets)
        for prompt in [prompt for prompt, group in self._groups.items() if len(group) == self._strategy.samples]:
            group = self._groups.pop(prompt)
            self._finished.append((prompt, [group[sample] for sample in range(self._strategy.samples)]))
            self._vacate(self._slots.index(prompt), rows, cache)
        return bool(finished)

    def _vacate(self, slot: int, rows: Rows, cache: GroupCache) -> None:
        last = len(self._slots) - 1
        cache.remove_slot(slot, last)
        if slot != last:
            rows.slots[rows.slots == last] = slot
        self._slots[slot] = self._slots[last]
        del self._slots[last]
