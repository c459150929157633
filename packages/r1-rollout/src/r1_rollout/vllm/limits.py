"""Limits of a request to vLLM, and r1's names in it: an invalid request can crash vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from r1_rollout.errors import PromptError
from r1_rollout.types import PromptLike

if TYPE_CHECKING:
    from r1_rollout.types import Tokens

BANNED = "r1_banned_token_ids"  # in vLLM's additional_config: tokens that are never sampled
FORCED = "r1_forced_token_ids"  # in a request's extra_args: the response to say, so that its log-probs are reported
# The temperatures that vLLM takes, beside 0: it samples at COLDEST if less is given, and refuses more than HOTTEST.
COLDEST, HOTTEST = 0.01, 2.0


def require_temperature(temperature: float) -> None:
    """Raise ValueError if vLLM would sample at another temperature, or fail; 0 is greedy."""
    if temperature != 0 and not COLDEST <= temperature <= HOTTEST:
        raise ValueError(
            f"temperature must be 0, which is greedy, or from {COLDEST:g} to {HOTTEST:g} under vLLM, got "
            f"temperature={temperature}: choose one of those, or use the embedded engine"
        )


@dataclass(frozen=True, slots=True)
class Limits:
    vocabulary: int  # token ids are less
    max_model_len: int  # tokens of prompt and response together

    def require(self, prompt: PromptLike, length: int, response: "Tokens" = ()) -> None:
        """Raise PromptError if a prompt does not fit with a response of `length` tokens, or with one to replay."""
        tokens = prompt.token_ids
        if not len(tokens):
            raise PromptError(f"prompt {prompt.id} is empty: the model needs at least one token to go on from")
        for what, given in (("", tokens), ("response ", response)):
            if (wrong := self._strange(given)) is not None:
                raise PromptError(
                    f"prompt {prompt.id}: {what}token {wrong} is outside the vocabulary of {self.vocabulary}"
                )
        if len(tokens) + length > self.max_model_len:
            raise PromptError(
                f"prompt {prompt.id} has {len(tokens)} tokens, its answer up to {length}, but "
                f"max_model_len={self.max_model_len}: raise it, or lower the lengths"
            )

    def _strange(self, tokens: "Sequence[int] | Tokens") -> int | None:
        if not len(tokens) or (min(tokens) >= 0 and max(tokens) < self.vocabulary):
            return None
        return next(int(token) for token in tokens if not 0 <= token < self.vocabulary)
