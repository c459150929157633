"""The types that every engine takes and gives: sampling parameters, completions, and the protocols of engines."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable
from warnings import warn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from r1_rollout.weights import WeightSource

    Tokens: TypeAlias = Sequence[int] | NDArray[np.int32]


Json: TypeAlias = Any  # what JSON texts hold
JsonObject: TypeAlias = dict[str, Any]
Pairs: TypeAlias = frozenset[tuple[int, int]]  # what a tensor's copies must come to, and what they come to

_COLDEST = 1e-5  # logits divided by less leave the range of float32


class PromptLike(Protocol):
    """What an engine reads of a prompt."""

    @property
    def id(self) -> str:
        """Seeds the noise of its samples: prompts that share an id share their noise."""

    @property
    def token_ids(self) -> Sequence[int]:
        """[prompt_length], media placeholders expanded."""

    @property
    def position_ids(self) -> "Tensor":
        """int64 [axes, prompt_length]."""

    @property
    def model_inputs(self) -> "Mapping[str, Tensor]":
        """Further forward arguments of the model, e.g. pixel_values. Tensors are read when the prompt begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample. A sample's noise depends on (seed, prompt id, sample index) and on nothing else."""

    max_tokens: int  # response tokens
    n: int = 1  # samples per prompt
    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    min_p: float = 0.0  # least probability of a token, as a share of the likeliest token's
    seed: int = 0
    ignore_eos: bool = False  # go on behind the model's own end tokens; what is named below still ends an answer
    stop_token_ids: tuple[int, ...] = ()  # tokens that end an answer, beside the model's own
    stop: tuple[str, ...] = ()  # strings that do; the tokens up to the one that completes the string are kept

    def __post_init__(self) -> None:
        values = asdict(self)
        for name in ("max_tokens", "n", "top_k", "seed"):
            if type(values[name]) is not int:
                raise ValueError(f"{name} must be a whole number, got {values[name]!r}")
        for name in ("temperature", "top_p", "min_p"):
            if not isinstance(values[name], int | float):
                raise ValueError(f"{name} must be a number, got {values[name]!r}")
        if self.n < 1 or self.max_tokens < 1:
            raise ValueError(f"n and max_tokens must be at least 1, got n={self.n}, max_tokens={self.max_tokens}")
        if not (0 < self.top_p <= 1 and 0 <= self.min_p <= 1) or (self.top_k < 1 and self.top_k != -1):
            raise ValueError(
                "top_p must be in (0, 1], min_p in [0, 1], top_k at least 1, or -1 for no limit; got "
                f"top_p={self.top_p}, min_p={self.min_p}, top_k={self.top_k}"
            )
        if self.temperature != 0 and not _COLDEST <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be 0, which is greedy, or finite and at least {_COLDEST:g}, got "
                f"temperature={self.temperature}"
            )
        if not isinstance(self.stop, tuple | list) or not all(isinstance(one, str) and one for one in self.stop):
            raise ValueError(f"stop must be a tuple of strings that are not empty, got {self.stop!r}")
        if not isinstance(self.stop_token_ids, tuple | list) or not all(
            isinstance(token, Integral) and not isinstance(token, bool) and token >= 0 for token in self.stop_token_ids
        ):
            raise ValueError(f"stop_token_ids must be a tuple of token ids of at least 0, got {self.stop_token_ids!r}")
        object.__setattr__(self, "stop_token_ids", tuple(map(int, self.stop_token_ids)))


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sampled response, 8 bytes a token also when it is pickled.

    Example: `Completion([51, 9, 2], [-0.11, -2.3, -0.02], "stop", weight_version=7)`; the end token is included.
    """

    token_ids: "NDArray[np.int32]"  # [response_length], with the token that ended it when finish_reason is "stop"
    logprobs: "NDArray[np.float32]"  # [response_length], of each token at the sampling temperature, untruncated
    finish_reason: Literal["stop", "length"]
    weight_version: int
    # uint8 or int16 [prompt_length + response_length, layers, k], if the engine returns them; see `routing`. The last
    # token's are unknown, as nothing was computed from it.
    routed_experts: "NDArray[Any] | None"

    def __init__(
        self,
        token_ids: "Sequence[int] | NDArray[Any]",
        logprobs: "Sequence[float] | NDArray[Any]",
        finish_reason: Literal["stop", "length"],
        weight_version: int,
        routed_experts: "NDArray[Any] | None" = None,
    ) -> None:
        """Raises ValueError if there is not one log-prob for each token."""
        import numpy as np

        tokens, values = np.asarray(token_ids, np.int32), np.asarray(logprobs, np.float32)
        if tokens.ndim != 1 or tokens.shape != values.shape:
            raise ValueError(f"a completion needs a log-prob for each token, got shapes {tokens.shape}, {values.shape}")
        object.__setattr__(self, "token_ids", tokens)
        object.__setattr__(self, "logprobs", values)
        object.__setattr__(self, "finish_reason", finish_reason)
        object.__setattr__(self, "weight_version", weight_version)
        object.__setattr__(self, "routed_experts", routed_experts)

    @property
    def sampled_length(self) -> int:
        """Tokens that the policy chose: all of them, in one turn."""
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Completion):
            return NotImplemented
        mine, others = (
            (one.token_ids.tobytes(), one.logprobs.tobytes(), one.finish_reason, one.weight_version)
            for one in (self, other)
        )
        return mine == others


@dataclass(frozen=True, slots=True)
class Expected:
    rows: int  # of the tensor, which may be part of a fused one in the engine
    sums: Mapping[str, int]  # by the precision of the copy, such as `bfloat16`
    constant: bool = False  # its elements are all alike, so that a layout of the engine's own would not show


@dataclass(frozen=True, slots=True)
class Comparison:
    """Which of an engine's tensors differ from the learner's, by the learner's names."""

    differing: Mapping[str, Pairs]  # those that are not the same bytes
    unread: tuple[str, ...] = ()  # those that the engine has packed, sharded or keeps in a precision nobody asked about


class Groups(Protocol):
    def __iter__(self) -> "Iterator[tuple[int, list[Completion]]]": ...

    def __next__(self) -> tuple[int, list[Completion]]: ...

    def close(self) -> None:
        """Abandon unfinished groups. Closing twice is allowed."""


class Generator(Protocol):
    """An engine. It owns its copy of the weights."""

    def load_weights(self, source: "WeightSource") -> None:
        """Load weights, or an adapter for the current base weights. Unfinished calls to `generate` end.

        The same version may be loaded again. Raises WeightsError if the version is older than the engine's, or the
        weights are not the model's: the engine may then hold a mixture, and samples only after another load.
        """

    def active(self, source: "WeightSource | None" = None) -> AbstractContextManager[None]:
        """Inside the block the engine has the memory that sampling takes; at its end it frees what it can.

        With a `source` the engine first loads these weights, when there is room for them. Raises RuntimeError if the
        engine is active already, and as `load_weights`.
        """

    def generate(self, prompts: Sequence[PromptLike], params: SamplingParams) -> Groups:
        """Yield (index into `prompts`, its `params.n` completions) as each group finishes; a later call ends this one.

        An engine of one process also begins prompts that are appended to `prompts` meanwhile.

        Raises:
            RuntimeError: the engine is not active, or the call was ended.
            PromptError: the engine cannot process a prompt, or its answer may be too long.
            ValueError: a group exceeds `max_sequences`, or the engine cannot sample with these parameters.
            NonFiniteLogits: the model's logits are not finite.
            EngineError: the engine hangs, has died or lacks memory; groups that were yielded before are complete.
        """


class GenerationSession(Protocol):
    """An open call of an engine: requests are submitted at any time, and each returns when it has finished.

    Noise depends on (seed, prompt id, sample index), as in `generate`. One thread at a time uses a session. All but
    `cancel` and `close` raise RuntimeError once the session has ended: it was closed, the engine's active block ended,
    new weights came, or a later call began.
    """

    @property
    def steps(self) -> int | None:
        """Steps of the engine so far; with the same requests before the same steps, a session repeats bit for bit.

        None: the engine runs by itself.
        """

    @property
    def prefilled(self) -> int | None:
        """Tokens of prompts that the engine has computed so far; None if it does not report them."""

    def submit(
        self,
        key: str,
        prompt: PromptLike,
        *,
        max_tokens: int,
        n: int = 1,
        stop: tuple[str, ...] = (),
        split: bool = False,
    ) -> None:
        """Add a request.

        Args:
            key: names it. It may be used again when the request has been returned or cancelled.
            max_tokens: of an answer, at most the session's `params.max_tokens`.
            stop: strings that end an answer, beside the session's.
            split: return each sample when it has finished, as (f"{key}/{number}", [completion]), instead of all
                together.

        Raises:
            PromptError: the engine cannot process the prompt; other requests go on.
            ValueError: the key is pending, or `n` or `max_tokens` is too large.
        """

    def poll(self, timeout: float | None = None) -> list[tuple[str, list[Completion]]]:
        """Return the requests that have finished, each as (key, its `n` completions), and samples of split ones.

        Args:
            timeout: seconds to wait for the first. None: until one finishes; 0: one step of an engine in this process.
                If no request is pending, it returns [] at once.

        Raises NonFiniteLogits and EngineError as `Generator.generate`.
        """

    def cancel(self, key: str) -> None:
        """Abandon a request, which is never returned. Does nothing if none of this key is pending."""

    def close(self) -> None:
        """End the session and abandon its requests. Closing twice is allowed."""


@runtime_checkable
class Interactive(Protocol):
    """An engine that takes requests while it generates, as episodes of several turns need."""

    def open_session(self, params: SamplingParams) -> GenerationSession:
        """Open a session, which ends the last call. Its requests have `n`, so `params.n` is not read.

        Raises RuntimeError if the engine is not active, and ValueError if it cannot sample with these parameters.
        """


class OldEngineNames:
    """Deprecated names of `Generator.active` and `Generator.load_weights`, gone in the next version."""

    def awake(self: Any, source: "WeightSource | None" = None) -> AbstractContextManager[None]:
        warn("engine.awake() is deprecated: call engine.active()", DeprecationWarning, stacklevel=2)
        block: AbstractContextManager[None] = self.active(source)
        return block

    def update(self: Any, source: "WeightSource") -> None:
        warn("engine.update() is deprecated: call engine.load_weights()", DeprecationWarning, stacklevel=2)
        self.load_weights(source)


def accept_old_names(engine: Any) -> Any:
    """Return an engine that has only `awake` and `update` with `active` and `load_weights`, too."""
    for old, new in (("awake", "active"), ("update", "load_weights")):
        if not hasattr(engine, new) and hasattr(engine, old):
            message = f"{type(engine).__name__}.{old} is deprecated: call it {new}"
            warn(message, DeprecationWarning, stacklevel=2)
            setattr(engine, new, getattr(engine, old))
    return engine


@runtime_checkable
class Drainable(Protocol):
    """An engine that can be told, while it generates, to begin no more prompts.

    Which prompts have begun must follow from the calls alone, not from timing: a resumed run must begin the same ones.
    """

    def drain(self) -> None:
        """Begin no further prompt. The running `generate` yields the groups that have begun, and ends."""


@runtime_checkable
class Checksummed(Protocol):
    """An engine whose weights can be compared with the learner's byte by byte."""

    @property
    def precisions(self) -> tuple[str, ...]:
        """The dtypes that it keeps weights in, e.g. `("bfloat16",)`."""

    @property
    def keeps_layout(self) -> bool:
        """Whether it keeps every tensor, an adapter's factors too, in the learner's layout, so that none may differ."""

    def compare(self, expected: Mapping[str, Expected]) -> Comparison:
        """Compare its copies of these tensors with the learner's; see `r1_rollout.weight_checks`."""


@runtime_checkable
class Replaying(Protocol):
    """An engine that returns the log-probs of given responses; the canary of a weight sync reads them."""

    def logprobs_of(
        self, prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", temperature: float = 1.0
    ) -> list[list[float]]:
        """Return the log-probs of each response's tokens, [responses][response_length].

        They are computed with the engine's present weights, by the same code path that samples.
        """


@runtime_checkable
class Reading(Protocol):
    """A model that computes the log-probs of given responses for rewards: the policy, a frozen model, or another."""

    @property
    def concurrent(self) -> bool:
        """Whether another thread may call it while an engine samples, with the same results."""

    def read_logprobs(
        self,
        prompts: Sequence[PromptLike],
        responses: "Sequence[Tokens]",
        starts: Sequence[int],
        temperature: float = 1.0,
    ) -> list[list[float]]:
        """Return the log-probs of each response's tokens from its start on: [responses][response_length − start].

        Each token's log-prob is given its prompt and the response before it. Prompts that are the same object are one.
        A log-prob that is not finite is returned as it is. A row is empty if no server could be reached.
        """
