"""What every engine takes and gives: sampling parameters, completions, and the protocols of engines."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable
from warnings import warn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from r1_rollout.checksums import Comparison, Expected
    from r1_rollout.weight_source import WeightSource

    Tokens: TypeAlias = Sequence[int] | NDArray[np.int32]


_COLDEST = 1e-5  # logits divided by less leave the range of float32


class PromptLike(Protocol):
    """What an engine reads of a prompt; any object with these attributes will do."""

    @property
    def id(self) -> str:
        """What the noise of its samples is a function of: prompts that share an id share their noise."""

    @property
    def token_ids(self) -> Sequence[int]:
        """[prompt_length], media placeholders expanded."""

    @property
    def position_ids(self) -> "Tensor":
        """int64 [axes, prompt_length]."""

    @property
    def model_inputs(self) -> "Mapping[str, Tensor]":
        """Further forward arguments of the model, e.g. pixel_values.

        Tensors are read when the prompt is begun, so a mapping may fetch them then; its names are asked for before.
        """


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
        for name in ("max_tokens", "n", "top_k", "seed"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name} must be a whole number, got {getattr(self, name)!r}")
        for name in ("temperature", "top_p", "min_p"):
            if not isinstance(getattr(self, name), int | float):
                raise ValueError(f"{name} must be a number, got {getattr(self, name)!r}")
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
    """One sampled response, as arrays of its own: 8 bytes a token, also where it is pickled or sent.

    Example: `Completion([51, 9, 2], [-0.11, -2.3, -0.02], "stop", weight_version=7)`; the end token is included.
    """

    token_ids: "NDArray[np.int32]"  # [response_length], with the token that ended it when finish_reason is "stop"
    logprobs: "NDArray[np.float32]"  # [response_length], of each token at the sampling temperature, untruncated
    finish_reason: Literal["stop", "length"]
    weight_version: int

    def __init__(
        self,
        token_ids: "Sequence[int] | NDArray[Any]",
        logprobs: "Sequence[float] | NDArray[Any]",
        finish_reason: Literal["stop", "length"],
        weight_version: int,
    ) -> None:
        """Take lists or arrays; arrays of the right kind are kept as they are.

        Raises:
            ValueError: there is not one log-prob for each token.
        """
        import numpy as np

        tokens, values = np.asarray(token_ids, np.int32), np.asarray(logprobs, np.float32)
        if tokens.ndim != 1 or tokens.shape != values.shape:
            raise ValueError(f"a completion needs a log-prob for each token, got shapes {tokens.shape}, {values.shape}")
        object.__setattr__(self, "token_ids", tokens)
        object.__setattr__(self, "logprobs", values)
        object.__setattr__(self, "finish_reason", finish_reason)
        object.__setattr__(self, "weight_version", weight_version)

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same tokens with the same log-probs, to the bit."""
        if not isinstance(other, Completion):
            return NotImplemented
        mine, others = (
            (one.token_ids.tobytes(), one.logprobs.tobytes(), one.finish_reason, one.weight_version)
            for one in (self, other)
        )
        return mine == others


class Groups(Protocol):
    """Groups as they finish: an iterator of (index of the prompt, its completions)."""

    def __iter__(self) -> "Iterator[tuple[int, list[Completion]]]": ...

    def __next__(self) -> tuple[int, list[Completion]]: ...

    def close(self) -> None:
        """Abandon what is unfinished and free it; afterwards there are no more groups. Closing twice is allowed."""


class Generator(Protocol):
    """An engine. It owns its copy of the weights; which they are and whether it is active are two things."""

    def load_weights(self, source: "WeightSource") -> None:
        """Take up weights, or an adapter upon those that are there, to sample from them until others come.

        A version older than the one that the engine has is refused; the same one may come again. Calls to `generate`
        that are unfinished are over.
        """

    def active(self, source: "WeightSource | None" = None) -> AbstractContextManager[None]:
        """Hold inside the block what sampling takes, such as room for keys and values; let go of what it can after.

        With a `source` the engine takes that up first, as by `load_weights`, when waking leaves the room for it.
        """

    def generate(self, prompts: Sequence[PromptLike], params: SamplingParams) -> Groups:
        """Yield (index into `prompts`, its `params.n` completions) as each group finishes.

        An engine of one process also begins what is appended to `prompts` while some are unfinished.
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
    """Return an engine that was written with `awake` and `update` as one with `active` and `load_weights`, too."""
    for old, new in (("awake", "active"), ("update", "load_weights")):
        if not hasattr(engine, new) and hasattr(engine, old):
            message = f"{type(engine).__name__}.{old} is deprecated: call it {new}"
            warn(message, DeprecationWarning, stacklevel=2)
            setattr(engine, new, getattr(engine, old))
    return engine


@runtime_checkable
class Drainable(Protocol):
    """An engine that can be told, while it generates, that it has begun enough prompts.

    What it has begun by then must follow from the calls alone, not from the clock: a resumed run must begin the same.
    """

    def drain(self) -> None:
        """Begin no further prompt. The running `generate` finishes those that it has begun, yields them, and is over.

        None that has begun is given up: the answers that are still missing then are the long ones.
        """


@runtime_checkable
class Checksummed(Protocol):
    """An engine whose weights can be compared with the learner's byte by byte."""

    @property
    def precisions(self) -> tuple[str, ...]:
        """Those that it keeps weights in, e.g. `("bfloat16",)`."""

    @property
    def keeps_layout(self) -> bool:
        """Whether it keeps every tensor in the learner's layout, an adapter's factors too, so that none may differ."""

    def compare(self, expected: "Mapping[str, Expected]") -> "Comparison":
        """Compare its copies of these tensors with the learner's; see `r1_rollout.checksums`."""


@runtime_checkable
class Replaying(Protocol):
    """An engine that can tell what it would have said: the canary of a weight sync asks it."""

    def logprobs_of(
        self, prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", temperature: float = 1.0
    ) -> list[list[float]]:
        """Return the log-probs of each response's tokens, [responses][response_length].

        They are those of the weights the engine holds now, by the same path on which it samples.
        """


@runtime_checkable
class Reading(Protocol):
    """A model that is given responses at once, and says how likely it finds their tokens.

    Rewards ask it: of the policy, of a frozen model, or of another, in this process or elsewhere.
    """

    @property
    def concurrent(self) -> bool:
        """Whether it may be asked while an engine samples, by another thread, and answers about one prompt's responses
        alike whatever else is asked.
        """

    def read_logprobs(
        self,
        prompts: Sequence[PromptLike],
        responses: "Sequence[Tokens]",
        starts: Sequence[int],
        temperature: float = 1.0,
    ) -> list[list[float]]:
        """Return the log-probs of each response's tokens from its start on: [responses][response_length − start].

        Each token's is given its prompt and all of the response before it. Prompts that are the same object are one.
        A log-prob that is not a number is returned as it is. A row is empty where nobody could be reached to ask.
        """
