"""What every engine takes and gives: sampling parameters, completions, and the `Generator` protocol."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class PromptLike(Protocol):
    """What an engine reads of a prompt; any object with these attributes will do."""

    @property
    def id(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]:
        """[prompt_length], media placeholders expanded."""

    @property
    def position_ids(self) -> "Tensor":
        """int64 [axes, prompt_length]."""

    @property
    def model_inputs(self) -> "Mapping[str, Tensor]":
        """Further forward arguments of the model, e.g. pixel_values."""


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
        if self.n < 1 or self.max_tokens < 1:
            raise ValueError(f"n and max_tokens must be at least 1, got n={self.n}, max_tokens={self.max_tokens}")
        if self.temperature < 0 or not 0 < self.top_p <= 1 or (self.top_k < 1 and self.top_k != -1):
            raise ValueError(
                f"temperature must be >= 0, top_p in (0, 1], top_k -1 or >= 1; got temperature={self.temperature}, "
                f"top_p={self.top_p}, top_k={self.top_k}"
            )


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer.

    Example: `Completion([51, 9, 2], [-0.11, -2.3, -0.02], "stop", weight_version=7)`; the end token is included.
    """

    token_ids: list[int]  # [response_length], end token included when finish_reason is "stop"
    logprobs: list[float]  # [response_length], log-prob of each sampled token at the sampling temperature, untruncated
    finish_reason: Literal["stop", "length"]
    weight_version: int


class Generator(Protocol):
    """An engine. It owns its copy of the weights and lets go of what it can between two `awake` blocks."""

    def awake(self, weights: "Iterable[tuple[str, Tensor]]", version: int) -> AbstractContextManager[None]:
        """Load `weights` (names as in the Hugging Face checkpoint), sample inside the block, sleep after it."""

    def generate(self, prompts: Sequence[PromptLike], params: SamplingParams) -> Iterator[tuple[int, list[Completion]]]:
        """Yield (index into `prompts`, its `params.n` completions) as each group finishes."""
