"""The embedded engine: group sampling inside the process, on any CPU or GPU, with no server."""

import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from r1_rollout.embedded.agreement import agree_behind_prefixes, require_agreement
from r1_rollout.embedded.architecture import Reach, prepare
from r1_rollout.embedded.decoding import Decoding
from r1_rollout.embedded.prefill import rotary_axes
from r1_rollout.embedded.prefix_cache import PrefixCache
from r1_rollout.embedded.rows import (
    DecodingStrategy,
    SamplingRequest,
    forced_strategy,
    sampling_request,
    sampling_strategy,
)
from r1_rollout.errors import PromptError
from r1_rollout.routing import Routing, require_routing
from r1_rollout.sampling import banned_tokens
from r1_rollout.session import Finished, SteppedSession
from r1_rollout.token_kinds import prepare_media
from r1_rollout.types import Comparison, Completion, Expected, OldEngineNames, PromptLike, SamplingParams
from r1_rollout.weight_checks import compare
from r1_rollout.weights import WeightSource, WeightStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from r1_rollout.types import Tokens


log = logging.getLogger("r1")

PREFIX_CACHE_BYTES = 4 << 30  # 120,000 tokens of a model of 3 billion parameters in half precision


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


class EmbeddedEngine(OldEngineNames):
    """A `Generator` and a `Replaying` over a Hugging Face causal or vision-language model.

    A prompt is computed once for all its samples. New groups enter as finished ones leave. `logprobs_of` does not
    affect an unfinished `generate`. Answer token t of a prompt of length P has position P + t; on M-RoPE's rotary axes
    (arXiv 2409.12191) the prompt's largest position + 1 + t.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        end_token_ids: Collection[int],
        banned_token_ids: Collection[int] = (),
        max_sequences: int = 256,
        device: torch.device | str = "cpu",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        version: int | None = None,
        read_only: bool = False,
        eager: bool = False,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
        return_routed_experts: bool = False,
    ) -> None:
        """Take over `model`.

        Args:
            model: a `transformers.PreTrainedModel` with full or sliding attention, or recurrent layers. The
                engine owns it and its configuration.
            end_token_ids: tokens that end an answer.
            banned_token_ids: tokens that are never sampled, such as the placeholders of pictures.
            max_sequences: samples that decode at the same time; with the lengths it bounds the memory.
            tokenizer: a Hugging Face tokenizer, needed by stop strings only.
            version: of the weights in `model`; None: others have to be loaded first.
            read_only: the weights are another model's, which must not change them meanwhile. Only adapters can be
                loaded, which are kept beside them.
            eager: launch a GPU's steps kernel by kernel instead of replaying CUDA graphs of them.
            prefix_cache_bytes: keys and values of finished requests that a session keeps for prompts that go on from
                them; 0: none.
            return_routed_experts: completions have `routed_experts`, for the learner to compute with the same ones. A
                GPU's steps are then launched kernel by kernel.

        Raises:
            ValueError: the engine cannot decode with this model, or its log-probs differ from those of the model's own
                forward; its routers cannot be recorded; an end token is banned, or nothing is allowed.
        """
        self._reach = prepare(model)
        prepare_media(model)
        text = model.config.get_text_config()
        banned = banned_tokens(text.vocab_size, banned_token_ids)
        if both := sorted({*end_token_ids} & {*banned_token_ids}):
            raise ValueError(f"tokens {both} are both end tokens and banned: answers could not end")
        self._model = model.to(device).eval().requires_grad_(False)
        self._vocabulary: int = text.vocab_size
        self._banned = banned.to(device)
        allowed = sorted({*range(text.vocab_size)} - {*banned_token_ids})
        self._allowed, self._filler = allowed, allowed[0]
        self._stack = require_agreement(self._model, self._reach, allowed, self._filler)
        self._end_token_ids, self._tokenizer = frozenset(end_token_ids), tokenizer
        self._max_sequences = max_sequences
        self._routing = require_routing(self._model) if return_routed_experts else None
        self._graphs = self._banned.is_cuda and not eager and self._routing is None
        self._prefix_cache_bytes = prefix_cache_bytes
        self._prefixes_agree: bool | None = None  # not checked yet
        self._weights = WeightStore(self._model, read_only=read_only)
        self._weights.version = version
        self._version, self._stays_ready, self._active = version, version is not None, False
        self._call: weakref.ref[GenerateCall | SteppedSession] | None = None  # the last one, if it goes on

    keeps_layout = True  # see `r1_rollout.types.Checksummed`

    @contextmanager
    def active(self, source: WeightSource | None = None) -> Iterator[None]:
        if self._active:
            raise RuntimeError(f"the engine is active already, with weight version {self._version}")
        if source is not None:
            self._load(source)
        self._active, self._version = True, self._weights.version
        try:
            yield
        finally:
            self._active = False
            if not self._stays_ready:
                self._version = None
            self._end("its active block ended")
            if self._banned.is_cuda:
                torch.cuda.empty_cache()

    def load_weights(self, source: WeightSource) -> None:
        self._load(source)
        self._stays_ready = True

    def generate(self, prompts: Sequence[PromptLike], params: SamplingParams) -> GenerateCall:
        self._require_capacity(params.n)
        decoding = self._decode("generate", self._sampling(params), params.max_tokens, routing=self._routing)
        generation = GenerateCall(decoding, prompts, partial(self._sampling_request, decoding, params))
        self._begin(generation, "a later generate() began before it finished")
        return generation

    def open_session(self, params: SamplingParams) -> StreamingSession:
        decoding = self._decode(
            "open_session", self._sampling(params), params.max_tokens, self._prefix_cache(), self._routing
        )

        def submit(key: str, prompt: PromptLike, params: SamplingParams, split: bool) -> None:
            self._require_capacity(params.n)
            request = self._sampling_request(decoding, params, key, prompt)
            request.split = split
            decoding.submit(request)

        session = StreamingSession(decoding, params, submit)
        self._begin(session, "a later session began")
        return session

    def _prefix_cache(self) -> PrefixCache | None:
        """Return the cache of a session: None if there is no memory for it, or the model's numbers would be wrong."""
        if self._version is None or not self._prefix_cache_bytes:
            return None
        if self._prefixes_agree is None:
            self._prefixes_agree = agree_behind_prefixes(self._model, self._reach, self._allowed, self._filler)
            if self._prefixes_agree is False:
                name = type(self._model).__name__
                log.warning("the embedded engine computes each turn's history again: %s does not go on from it", name)
        return PrefixCache(self._prefix_cache_bytes) if self._prefixes_agree else None

    def drain(self) -> None:
        if self._call is not None and isinstance(call := self._call(), GenerateCall):
            call.drain()

    def logprobs_of(
        self, prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", temperature: float = 1.0
    ) -> list[list[float]]:
        if len(prompts) != len(responses):
            raise ValueError(f"got {len(prompts)} prompts and {len(responses)} responses: one response a prompt")
        for prompt, response in zip(prompts, responses, strict=True):
            if wrong := [token for token in response if not 0 <= token < self._vocabulary]:
                raise ValueError(
                    f"prompt {prompt.id}: response token {wrong[0]} is outside the vocabulary of {self._vocabulary}"
                )
        given = [index for index, response in enumerate(responses) if len(response)]
        strategy = forced_strategy([responses[index] for index in given], temperature, self._banned.device)
        logprobs: list[list[float]] = [[] for _ in responses]
        decoding = self._decode("logprobs_of", strategy, max(map(len, responses), default=0))

        def request_of(index: int, prompt: PromptLike) -> SamplingRequest:
            return self._checked(decoding, SamplingRequest(index, prompt, [index], len(responses[given[index]])))

        for index, (completion,) in GenerateCall(decoding, [prompts[index] for index in given], request_of):
            logprobs[given[index]] = completion.logprobs.tolist()
        return logprobs

    @property
    def precisions(self) -> tuple[str, ...]:
        return tuple(sorted({str(one.dtype).removeprefix("torch.") for one in self._model.parameters()}))

    def compare(self, expected: Mapping[str, Expected]) -> Comparison:
        return compare(self._weights.tensors(), expected)

    def _sampling(self, params: SamplingParams) -> DecodingStrategy:
        return sampling_strategy(
            params,
            banned=self._banned,
            end_token_ids=self._end_token_ids,
            tokenizer=self._tokenizer,
            fixed_shapes=self._graphs and self._stack is not None,
        )

    def _sampling_request(
        self, decoding: Decoding, params: SamplingParams, key: Hashable, prompt: PromptLike
    ) -> SamplingRequest:
        return self._checked(decoding, sampling_request(key, prompt, params, self._tokenizer))

    def _checked(self, decoding: Decoding, request: SamplingRequest) -> SamplingRequest:
        """Return the request. Raises PromptError if the model cannot process its prompt, or it may get too long."""
        _check_shape(request.prompt, decoding.axes or len(request.prompt.position_ids), self._vocabulary)
        _check_length(request.prompt, request.limit, self._reach)
        return request

    def _require_capacity(self, samples: int) -> None:
        if samples > self._max_sequences:
            raise ValueError(f"n={samples} samples a prompt, but max_sequences={self._max_sequences}: raise it")

    def _decode(
        self,
        name: str,
        strategy: DecodingStrategy,
        longest: int,
        prefixes: PrefixCache | None = None,
        routing: Routing | None = None,
    ) -> Decoding:
        if self._version is None:
            raise RuntimeError(
                f"{name}() needs an active engine with whole weights: call it inside `with engine.active(source)`, "
                "or after `engine.load_weights(source)`"
            )
        return Decoding(
            self._model,
            strategy,
            filler=self._filler,
            max_sequences=self._max_sequences,
            longest=longest,
            version=self._version,
            stack=self._stack,
            graphs=self._graphs,
            prefixes=prefixes,
            routing=routing,
        )

    def _load(self, source: WeightSource) -> None:
        self._weights.require_newer(source.version)
        self._end("new weights came before it finished")
        self._version = None
        self._weights.load(source.tensors(), source.version)
        self._version = source.version

    def _begin(self, call: GenerateCall | SteppedSession, reason: str) -> None:
        self._end(reason)
        self._call = weakref.ref(call)

    def _end(self, reason: str) -> None:
        if self._call is not None and (call := self._call()) is not None:
            call.end(reason)
        self._call = None


def _check_shape(prompt: PromptLike, axes: int, vocabulary: int) -> None:
    tokens = prompt.token_ids
    if not len(tokens):
        raise PromptError(f"prompt {prompt.id} is empty: the model needs at least one token to go on from")
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        wrong = next(token for token in tokens if not 0 <= token < vocabulary)
        raise PromptError(f"prompt {prompt.id}: token {wrong} is outside the vocabulary of {vocabulary}")
    if tuple(prompt.position_ids.shape) != (axes, len(tokens)):
        raise PromptError(
            f"prompt {prompt.id}: position_ids have shape {list(prompt.position_ids.shape)}, expected "
            f"{[axes, len(tokens)]}: {axes} axes like the first prompt, one column per token"
        )


def _check_length(prompt: PromptLike, limit: int, reach: Reach) -> None:
    start = int(rotary_axes(prompt.position_ids).max()) + 1
    if reach.positions is not None and start + limit > reach.positions:
        raise PromptError(
            f"prompt {prompt.id} ends at position {start} and its answer may have {limit} tokens, but the model "
            f"knows {reach.positions} positions (max_position_embeddings): shorten the prompt or the answer"
        )
